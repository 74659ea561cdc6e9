"""Calibration text and the statistics of a model on it: hidden states, importances, gradients and coverage.

The package knows checkpoints and blocks of the original model, and the statistics in `solvers`, but no recipe. Start
with `texts.py` (tokens), then `hidden_states.py` (block inputs on disk) and `gradients.py` (the loss).
"""
