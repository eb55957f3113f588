"""The explorer: a page with sliders, served on loopback or shown in a notebook.

`answers.py` computes what a setting means, `server.py` serves the page, `widget.py` shows the same in a notebook.
"""
