"""Several engines of one model behind one HTTP process.

`group.py` stands where one engine's client stands otherwise: it routes requests and continues those whose engine has
gone. `replica.py` is one engine, and `relay.py` knows what one request has got so far. `cores.py` divides the
processor, `processes.py` starts and restarts the engines, and `observed.py` sums up and measures.

Imports: `routing`, `protocol`, `server.engine_client`, `server.admission` and the leaf modules. Start with `group.py`.
"""
