"""The GPU backend: operations that exist as Triton kernels.

`backend.py` tells whether they can run here. Modules that hold kernels import Triton through `language.py`, and are
imported when a kernel is first needed. `weights.py` and `pages.py` draw the layouts; `tuning.py` cuts products.

Imports: `kernels`, `kv`, `formats` and the leaf modules.
Start with `weights.py`, then `linear.py` and `w4.py`.
"""
