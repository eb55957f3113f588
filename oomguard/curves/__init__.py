"""The curves: memory and speed over one knob or another, each described once, whatever draws it.

value.py says what a curve is, make.py makes all of a plan or a subject, by one small file for each family of curves.
draw_plotly.py draws a curve for a page or a notebook, draw_matplotlib.py for print; page.py puts several on one page.
Import from its files (`from oomguard.curves.value import ...`): the name `oomguard.curves` is the function.
"""
