"""Searches over recipes and bit widths: mixed precision, the best of several recipes, comparison with plain rounding.

The package measures KL divergences on calibration text that is set aside. `candidates.py` is torch-free. Start with
`allocate.py` (bits for each linear) and `best.py` (several recipes).
"""
