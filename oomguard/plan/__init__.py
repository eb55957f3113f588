"""The plan: the chosen candidate, its fallbacks, the evidence and the environment, as one value and one JSON file.

value.py says what a plan is, make.py makes one of what a search found, ladder.py its fallbacks, shortfall.py what to
say if nothing fits, store.py writes and reads the file, agree.py checks it against itself. words.py says all that in
sections of sentences and tables (section.py, phrases.py, tables.py, epoch.py), which report/ prints, html.py makes HTML
of for a notebook, and page/ a page.
"""
