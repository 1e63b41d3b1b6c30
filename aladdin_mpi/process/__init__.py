"""The process: signals, fatal errors, console output and files."""
