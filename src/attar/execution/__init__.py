"""Running planned steps: integers in, logits out.

`model_runner.py` runs a step of the scheduler. `recorded_step.py`, `recordings.py` and `cuda_graphs.py` record decode
steps and replay them; `step_inputs.py` has what the rows of a step read. `kv_cache.py` chooses and calibrates the KV
cache scheme. `parallel/` runs a model in several processes.

Imports: `scheduling`, `checkpoints`, `model`, `kernels` and the packages below them; never `engine` or `sampling`.
Start with `model_runner.py`.
"""
