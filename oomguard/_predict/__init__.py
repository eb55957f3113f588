"""Predictions: estimates corrected by the records of probes, with a margin, for memory and for time.

calibration.py makes them. Both corrections are the same small regression (fit.py): the logarithm of `measured /
estimated` is a sum of a few effects, which memory.py and speed.py list.
"""
