"""A model in several processes.

`executor.py` is the leader's side, which sends each step to the processes of `worker_group.py`. `worker.py` is such a
process, `part.py` what each process does to have its part of the model, and `commands.py` the messages between them.
Tensors go by collectives (`kernels/group.py`).

Imports: `execution` and the packages below it.
Start with `executor.py`.
"""
