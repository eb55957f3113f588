"""What the screen and the JSON of every subcommand say.

common.py prints; the others have one subcommand each. What a plan says is written in plan/words.py: the screen, a
notebook and a page show the same words.
"""
