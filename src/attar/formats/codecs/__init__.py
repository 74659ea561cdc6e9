"""Codecs of weight formats other than uniform grids, one module a format.

Each has `quantize` and `dequantize`, and `fake_quantize` where activations can have the format
(`formats.packed.Codec`). The formats themselves are data in `formats/weight_formats.py`.

Imports: `formats` and the leaf modules. `ggml.py` and `ggml_mix.py` need no torch.
Start with `nf4.py`, a short one; for GGML with `ggml.py`, then `ggml_blocks.py`.
"""
