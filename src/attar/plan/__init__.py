"""The planner: memory, capacity and speed of a model on a machine, before anything is loaded.

The package knows shapes, schemes and the rates of machines. It imports `model`, `kernels`, `kv` and `formats`, only
their torch-free parts, and never torch. Start reading in `fit`; `costs` and `steps` are its arithmetic.
"""
