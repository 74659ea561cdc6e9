"""The plan of each step, made on integers alone.

`scheduler.py` decides which sequences run, and `admission.py` which of those that wait start. `block_tables.py` gives
them cache blocks, `block_pool.py` owns the blocks, and `prefix_cache.py` finds the cached part of a prompt.
`step_plan.py` is the result, a step as data. A simulation drives this code in the tests.

Imports: `plan`, `protocol` and the leaf modules, and no torch.
Start with `sequence.py` and `step_plan.py`, then `scheduler.py`.
"""
