"""The estimate: the peak of a training step by arithmetic, without torch, on numbers and on NumPy arrays alike.

Import from its files (`from oomguard.estimate.terms import ...`): the name `oomguard.estimate` is the function.
"""
