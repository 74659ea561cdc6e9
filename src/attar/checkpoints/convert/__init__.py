"""Conversion of a model between formats, bit for bit, with a proof: `attar convert`.

The package knows which values each format holds exactly. It imports the sources, layouts, `gguf` and receipts of
`checkpoints`; it never rounds, except to the dtype of a dense folder. Start reading in `run`, then `grids` and `dense`.
"""
