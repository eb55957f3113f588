"""The search: from a spec and a budget to the best candidate, in a handful of probes.

space.py says what may be tried, screen.py what of it fits, propose.py which probe comes next (a pure function of the
records so far), approach.py how a candidate is approached, and run.py runs them, as trials that loop.py keeps in an
Optuna study. buckets.py cuts sequences by length, cache.py keeps calibrations for the next search.
"""
