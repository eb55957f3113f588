"""The estimate: the peak of a training step by arithmetic, without torch, on numbers and on NumPy arrays alike."""
