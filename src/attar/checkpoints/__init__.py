"""Checkpoints on disk: reading, writing, converting and verifying model files, all treated as untrusted input.

The package knows file formats and the names of tensors. It imports `model`, `plan`, `kernels`, `formats`, `text` and
lower packages, never `compression` or `engine`. Start reading in `sources/opening.py`, which loads a model of either
form, then `folder` and `safetensors` (files), `sources/hf.py` (meaning) and `writer` (output).
"""
