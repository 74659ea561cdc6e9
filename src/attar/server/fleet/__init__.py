"""Servers on several hosts behind one `attar route`.

On a host, `internal.py` serves what a router asks, with `journal.py`, which numbers changes of the prefix cache. In the
router, `host_client.py` stands where an engine's client stands otherwise, and `attar_hosts.py` runs the server in front
of them. `wire.py` is what the two sides exchange, and `router_key.py` what they trust each other by.

Imports: `protocol`, `routing`, the rest of `server` and the leaf modules. Start with `wire.py`.
"""
