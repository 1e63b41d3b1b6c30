"""What goes on the wire."""
