"""Rounding solvers: they choose the codes and scales of one weight [O, I].

`rtn.py` is the baseline and `gptq.py` the main solver. `levels.py` and `*_levels.py` describe the values that a scheme
can represent. Start with these two solvers and `levels.py`.
"""
