"""Weight formats: what a compressed number is, and how it is stored.

A `Scheme` (`scheme.py`) names the format of a weight and the rounding of its inputs; `parts` lists every stored array.
A `PackedTensor` (`packed.py`) is one weight stored in a scheme. `affine.py` and `floats.py` are the codecs of uniform
grids and float8; `codecs/` has the others.

Imports: the leaf modules alone. `scheme`, `weight_formats`, `cuts` and the tables of GGML types need no torch.
Start with `scheme.py`, then `packed.py` and `affine.py`.
"""
