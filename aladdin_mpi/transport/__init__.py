"""How bytes move and time passes: one interface, two engines."""
