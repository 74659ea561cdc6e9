"""Tools that a model may call: how a template shows them, how a model writes calls, and what keeps calls well-formed.

`tool.py` has the tools of a request and their limits. `formats.py` finds the syntax of a model's calls from its chat
template. `parsers.py` reads calls from a stream of text. `constraints.py` makes the grammar of an answer that may call.

Imports: text and the leaf modules, and no torch.
"""
