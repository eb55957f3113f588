"""Errors, units, checks of arguments, atomic files and child processes: used by all other packages."""
