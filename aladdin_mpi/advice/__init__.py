"""What to run on a cluster: every algorithm in virtual time, compared and explained."""
