"""HTTP apart from any API: connections, middleware and streams.

`sockets.py` and `limits.py` bound connections, `middleware.py` authenticates and logs, with `security.py` (keys, hosts)
and `cors.py`. `body.py` reads bodies; `sse.py` writes streams and notices clients that disconnect.

Imports: `server.admission`, `server.errors`, `server.options`, `server.request_context` and the leaf modules. Start
with `middleware.py`.
"""
