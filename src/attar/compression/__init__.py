"""Compression of a model: recipes, calibration, solvers and outputs.

The package turns a checkpoint into a smaller one with a receipt. It imports `checkpoints`, `metrics`, `plan`, `model`,
`kernels`, `kv`, `formats` and `text`, never `engine` or `server`. Start with `runs/pipeline.py` (`compress`), then
`runs/block_pass.py` (one block at a time), `block/passes.py` (one block) and `solvers` (one tensor).
"""
