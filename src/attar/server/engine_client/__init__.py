"""The engine process as the server sees it.

`client.py` holds the connection and hands out events, `response_stream.py` queues the events of one HTTP request,
`connection.py` frames bytes, and `heartbeat.py` tells whether the engine makes progress.

Imports: `protocol`, `server.admission`, `server.http.limits` and the leaf modules. Start with `client.py`.
"""
