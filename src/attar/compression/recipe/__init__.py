"""Recipes as pure data: methods with options, short names, YAML files, and their checks against a model.

The package knows no tensors. `methods`, `parser`, `pattern` and `recipe` are torch-free, because planners read recipes.
Start with `recipe.py`, then `methods.py` (options) and `parser.py` (short names).
"""
