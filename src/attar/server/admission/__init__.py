"""Limits that decide whether a request is admitted, and when a refused client may retry.

`request_limits.py` bounds one request, `rate_limits.py` the requests and tokens of an API key, `fair_queue.py` a key's
share of the engine's queue. `retry_after.py` computes the header; `caller.py` is the caller of an admitted request.

Imports: `server.errors`, `protocol` and the leaf modules. There is no I/O; clocks are arguments. Start with
`caller.py`, then `rate_limits.py`.
"""
