"""Calibration text and the statistics of a model on it: hidden states, importances, gradients and coverage.

The package reads checkpoints block by block and imports `recipe` and `solvers`, but no other package of `compression`.
Start with `texts.py` (tokens), then `hidden_states.py` (block inputs on disk) and `gradients.py` (the loss).
"""
