"""Tools over HTTP: their fields in each API, calls and results in conversations, and answers that call.

`fields.py` has OpenAI's fields, `history.py` the rules of conversations with calls. `calling.py` is what one request
may call, and `answers.py` splits its texts into events, which `chat_format.py` writes as OpenAI's chunks. What a model
makes of tools, and how it writes calls, is `text/tools/`.
"""
