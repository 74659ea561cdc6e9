"""A model in several processes.

`executor.py` is the leader's side: it starts the workers and sends them each step. `worker.py` is a worker's process,
and `commands.py` has the messages between them. Tensors go by collectives (`kernels/group.py`).

Imports: `execution` and the packages below it.
Start with `executor.py`.
"""
