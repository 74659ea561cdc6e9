"""GGUF files: header, metadata, tensors and configuration, read and written.

The package knows the format, llama.cpp's names and orders of rows, and its architectures. It imports `model`, `text`,
`formats` and the file helpers of `checkpoints`. Start reading in `header`, then `checkpoint`; `export` is the inverse.
"""
