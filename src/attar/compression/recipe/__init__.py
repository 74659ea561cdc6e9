"""Recipes as pure data: methods with options, short names, YAML files, and their checks against a model.

`methods`, `parser`, `pattern` and `recipe` are torch-free, because planners read recipes; `requirements` knows models.
The package imports no other one of `compression`. Start with `recipe.py`, then `methods.py` and `parser.py`.
"""
