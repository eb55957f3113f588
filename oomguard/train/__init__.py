"""The trainer: executes a plan on data, under the guard, and can be killed at any moment.

`options.py` says what can be asked, `start.py` puts a training together, `loop.py` runs it, `evaluate.py` validates,
`ranks.py` lets several processes train together, `predict.py` uses what was trained, `own.py` builds models of the
user's own. Nothing is imported here, so that the public function `oomguard.train` costs nothing before it is called.
"""
