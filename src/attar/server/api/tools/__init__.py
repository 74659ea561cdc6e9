"""Tools over HTTP: their fields in each API, calls and results in conversations, and answers that call.

`fields.py` has OpenAI's fields, `anthropic.py` and `ollama.py` those of the other APIs. `calling.py` is what one
request may call, and `answers.py` has the calls of an answer, whole and as pieces. What a model makes of tools, how it
writes calls, and the rules of conversations with calls are in `text/tools/`.
"""
