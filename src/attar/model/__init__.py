"""The one decoder, and the model families as data.

A `ModelConfig` (`config.py`) describes an architecture; `families.py` reads it from a config.json. `decoder.py` builds
and runs the model from named weights, `layers.py` has its blocks, `cache.py` the KV cache and a call's rows. `split.py`
and `parallel.py` divide it among processes; `kv_basis.py` calibrates KV cache schemes.

Imports: `kernels`, `kv`, `formats` and the leaf modules. `config`, `families` and `split` need no torch.
Start with `config.py`, then `decoder.py`.
"""
