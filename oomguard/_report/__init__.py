"""Everything that shows results: text in a terminal, JSON, tables, charts and pages.

tables.py prints sections and tables, words.py puts values into words. estimate.py (with probes and devices), plan.py,
progress.py and tradeoffs.py have the text and the JSON of commands; screens.py shows progress; subject.py says what
tables and charts are about.
"""
