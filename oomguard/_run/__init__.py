"""Runs an unmodified script: settings before it starts, a look inside while it runs, a summary at its end.

`parent` starts the script and waits for it. `hook/sitecustomize.py` is what Python loads first in every process of the
script. Once torch is imported, it calls `inside`, which watches over recurrent calls and optimizer steps. `notes` is
what the two sides write to each other, in a temporary folder.
"""
