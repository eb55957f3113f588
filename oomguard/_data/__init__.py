"""Data that is never all in memory: sources are read lazily, sequences are grouped by length, and each optimizer step
gets its microbatches one at a time.

`options.py` has the options, `open.py` turns a path (or a Dataset, or pairs) into sources, `order.py` decides which
sequences there are and when they come, `loader.py` reads them. Only `loader.py` needs torch.
"""
