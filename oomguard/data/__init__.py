"""Data that is never all in memory: sources are read lazily, sequences are sorted into buckets by their length, and
each optimizer step gets its microbatches one at a time.

`options.py` says what can be asked, `open.py` turns a path (or a Dataset, or pairs) into sources, `order.py` decides
which sequences come when, `loader.py` brings them. Nothing is imported here, so that `lengths.py` needs no torch.
"""
