"""The public functions, and the names and types of their arguments."""
