"""The search: from a spec and a budget to the best candidate, in a handful of probes.

space.py says what may be tried, screen.py what of it fits, score.py what is best, propose.py which probe comes next (a
pure function of the records so far), and loop.py runs them with Optuna. buckets.py cuts sequences by length, cache.py
keeps calibrations for the next search.
"""
