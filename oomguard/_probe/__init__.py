"""Probes: a few real steps of a candidate in a child process, so that a failure hurts no other process.

runner.py starts the child, watches it and reaps it; child.py serves; sample.py runs the steps; verdict.py is the only
judge of what came of them; record.py is the frozen result, and the file of all of them.
"""
