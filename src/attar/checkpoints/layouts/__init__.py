"""Layouts of quantized weights in Hugging Face folders: one module for each library's format.

A module knows the stored names and bit order of its format, and turns them into `PackedTensor` values and back. It
imports `formats`, `kernels.operands` and the file readers of `checkpoints`. Start reading in `export_layouts`.
"""
