"""The command line: commands, flags, parsing of values, and messages."""
