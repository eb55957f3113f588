"""Fleets: many jobs on a list of cards, by arithmetic.

`read.py` reads jobs and cards, `fit.py` finds the candidates, `find.py` puts all together into the `Fleet` of
`value.py`, `pack.py` puts small jobs on one card, and `emit/` writes files for schedulers.
"""
