"""KV cache formats: how keys and values are stored.

`schemes.py` names the schemes and counts their bytes, without torch. `pages.py` has the blocks of a layer and the
placement of a call's rows. `bit_planes.py`, `kivi.py` and `kvquant.py` are the reference codecs, one file a layout.

Imports: `formats` and the leaf modules.
Start with `schemes.py`, then `pages.py`.
"""
