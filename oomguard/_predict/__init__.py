"""Predictions: estimates corrected by the records of probes, with a margin, for memory and for time.

calibration.py makes them. Both corrections are Gaussian processes (fit.py): the logarithm of `measured / estimated` is
a sum of a few smooth functions of the coordinates that memory.py and speed.py list.
"""
