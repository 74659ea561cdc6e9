"""Draft heads on disk, in the layouts of their publishers, as modules of `model/`.

A head is no model: it reads hidden states of the model that it was trained for, and cannot run without it. `files.py`
recognises its folder. Each kind has one reader, and one writer for what is trained here.
"""
