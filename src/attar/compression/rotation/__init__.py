"""Rotations of a whole model, folded into its weights before the first block is compressed.

`rotation.py` decides what is rotated and holds the theory. `rotated.py` is the checkpoint seen in the new coordinates,
and `spinquant_training.py` learns the matrices. Matrices come from `solvers/transforms`. Start with `rotation.py`.
"""
