"""Several models in one server: loaded on first use within a bound of memory, the least recently used unloaded.

`load_scheduler.py` decides, as a plain state machine. `pool.py` carries out what it decides: an engine process for each
loaded model. `front.py` picks the model of a request, whose own application then answers as if it were served alone.
`server.py` puts them together.

Imports: the rest of `server`, `protocol`, `plan` and the leaf modules. Start with `load_scheduler.py`.
"""
