"""One module per command: its arguments, its wiring, what it prints."""
