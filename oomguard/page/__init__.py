"""One page about a plan: a file that needs nothing else, to be opened, printed or sent.

make.py puts it together, summary.py is its top, curves.py its end; between them are the sections of plan/words.py, so
that the page says what the screen says. How a page looks and behaves is in curves/page.py.
"""
