"""Output formats of a compression: a checkpoint folder or one GGUF file, with the model card.

The package decides names, schemes and sizes before any weight is read, and writes the tensors. It imports `recipe`,
`block`, `rotation`, `training` and `checkpoints`. Start with `base.py`, the contract of `Output`.
"""
