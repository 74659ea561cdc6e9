"""Transforms that keep the function of a model: per-channel scales and rotations, which make it easier to round.

Start with `fold.py`, which moves scales between neighbours, then `smoothquant.py` and `rotations.py`.
"""
