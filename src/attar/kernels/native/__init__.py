"""The CPU backend: operations that exist in C++ (`csrc/`).

`extension.py` alone loads the compiled extension. The other modules check operands and call it by address; C++ checks
the contents of tensors. `layouts.py` gives what the kernels can multiply by, and needs no torch.

Imports: `kernels`, `kv`, `formats` and the leaf modules.
Start with `extension.py`, then `linear.py`.
"""
