"""Compression methods on single tensors: rounding, pruning and transforms, one file each.

Solvers know tensors, schemes and statistics, never models, checkpoints or the other packages of `compression` but
`recipe` (an import-linter contract). Each module docstring states the statistic, the equation and the paper. Start with
`rounding/rtn.py`, then `rounding/gptq.py`.
"""
