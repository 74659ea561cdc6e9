"""The requests of an engine: how messages become requests, and requests become events.

`intake.py` checks a message and makes a request of it, `outputs.py` is the request and turns its tokens into text, and
`table.py` has every request until it has ended.
"""
