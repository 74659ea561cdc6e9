"""Limits that decide whether a request is admitted, and when a refused client may retry.

`rate_limits.py` bounds the requests and tokens of an API key, and has the caller of an admitted request.
`fair_queue.py` bounds a key's share of the engine's queue, and `retry_after.py` computes the header.

Imports: `server.errors`, `protocol` and the leaf modules. There is no I/O; clocks are arguments. Start with
`rate_limits.py`.
"""
