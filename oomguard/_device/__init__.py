"""The memory that this process may use and uses, each figure with its source. Only this package reads /proc, cgroups,
rlimits, torch's memory statistics and NVML.

limits.py reads free RAM, cgroups and rlimits; proc.py the memory of a process; nvml.py the cards, through NVML; cuda.py
the cards, through torch; find.py finds devices (it needs NumPy, which the readers of memory do without). None of them
imports torch before it is needed.
"""
