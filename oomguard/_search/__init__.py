"""The search: from a spec and a budget to the best candidate, in a handful of probes.

space.py says what is to be solved and which candidates there are, screen.py which of them fit. propose.py chooses the
next probe (a pure function of the records so far), approach.py how a candidate is approached. run.py runs the probes
and keeps their records for later searches; study.py keeps them as trials in Optuna. lengths.py is about sequence
lengths: shorter ones for probes, length buckets, padding.
"""
