"""The trade-offs: what each setting of the knobs costs in memory and brings in speed, one row per candidate.

subject.py says what is asked about and predicts, values.py reads what varies, grid.py makes the candidates, measured.py
finds what was measured of them, table.py puts it all side by side.
Import from its files (`from oomguard.tradeoffs.table import ...`): the name `oomguard.tradeoffs` is the function.
"""
