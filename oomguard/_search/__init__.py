"""The search: from a spec and a budget to the best candidate, in a handful of probes.

space.py says what is to be solved and which candidates there are, screen.py which of them fit. propose.py chooses the
next probe, a pure function of the records so far. sampler.py makes that a sampler for Optuna, study.py keeps the probes
as trials of a study, and run.py runs them. lengths.py shortens sequences for probes and finds the longest that fit.
"""
