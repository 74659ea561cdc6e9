"""Finished blocks of the KV cache outside an engine: in files, and on their way between engines. Torch-free.

`header.py` names a block and says what it holds. `folder.py` is a folder of private files, `disk_cache.py` a cache in
it, and `worker.py` the thread in which blocks are read and written. `wire.py` is the connection between two engines.
`puller.py` is its side of a decode engine, and `listener.py` that of a prefill engine. `credentials.py` proves on
networks who they are. Blocks are bytes here.

Imports: `protocol` and the leaf modules. Start with `header.py`.
"""
