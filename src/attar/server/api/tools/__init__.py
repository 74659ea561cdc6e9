"""Tools over HTTP: their fields in each API, calls and results in conversations, and answers that call.

`fields.py` has OpenAI's fields, `anthropic.py` and `ollama.py` those of the other APIs. `answers.py` has the calls of
an answer as pieces. What one request may call, what a model makes of tools, how it writes calls, and the rules of
conversations with calls are in `text/tools/`.
"""
