"""HTTP apart from any API: connections, middleware and streams.

`sockets.py` and `limits.py` bound connections, `middleware.py` authenticates and logs, with `security.py` (keys,
hosts). `sse.py` writes streams and notices clients that disconnect.

Imports: `server.admission`, `server.errors`, `server.options`, `server.request_handler` and the leaf modules. Start
with `middleware.py`.
"""
