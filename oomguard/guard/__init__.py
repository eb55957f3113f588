"""The guard: falls back one rung of a plan's ladder when memory gets tight, loses nothing by it, and grows back.

`ladder.py` is arithmetic on rungs, `watch.py` tells when memory gets tight without an error, `update.py` makes good an
update that ran out of memory halfway, `guard.py` puts them around a step. Nothing is imported here, so that the public
function `oomguard.guard` costs nothing before it is called.
"""
