"""The process itself: signals, errors that end it, what it prints."""
