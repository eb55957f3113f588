"""The plan: the chosen candidate, its fallbacks, the evidence and the environment, as one value and one JSON file.

value.py says what a plan is, find.py finds it, make.py makes it of the result of a search, store.py writes, reads and
checks its file. advice.py says what would make one candidate fit, or any, if there is no plan.
"""
