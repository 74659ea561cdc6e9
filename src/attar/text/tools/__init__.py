"""Tools that a model may call: how a template shows them, how a model writes calls, and what keeps calls well-formed.

`tool.py` has the tools of a request and their limits, `openai.py` their shape in requests, `functions.py` Python
functions as tools. `formats.py` finds the syntax of a model's calls from its chat template. `parsers.py` reads calls
from a stream of text. `constraints.py` makes the grammar of an answer that may call. `xml/` has calls whose parameters
stand between tags.
`calling.py` is all of this for one request: the server and `LLM.chat` share it.

Imports: text, protocol and the leaf modules, and no torch.
"""
