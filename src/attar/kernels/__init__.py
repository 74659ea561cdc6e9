"""Operations on tensors and their dispatch.

`ops.py` lists the operations of a decoder and is their specification. It selects the first backend that supports a
call: `triton/` (GPUs), `native/` (C++ on CPUs) or the reference (`ref.py`, `ref_attention.py`), the oracle of every
test. `operands.py` describes linear layers, norms and attention; `group.py` exchanges tensors between processes.

Imports: `kv`, `formats` and the leaf modules; never models.
Start with `ops.py`, then `ref.py`.
"""
