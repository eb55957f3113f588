"""Everything that shows results: text in a terminal, JSON, tables, charts and pages.

tables.py prints sections and tables, words.py puts values into words. estimate.py (with probes and devices), plan.py,
progress.py (shown on a screen of screens.py) and tradeoffs.py have the text and the JSON of commands; subject.py says what tables and charts are about.
"""
