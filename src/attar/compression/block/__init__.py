"""A recipe applied to one transformer block: transforms, fixed activation scales, rounding and pruning.

The package connects the solvers, which know tensors, to the linears of a block and their calibration inputs. It imports
`solvers`, `recipe`, `calibration` and `groups`, never `runs`. Start with `passes.py`, then `work.py`.
"""
