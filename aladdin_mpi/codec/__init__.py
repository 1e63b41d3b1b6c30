"""What goes on the wire: number formats and compression."""
