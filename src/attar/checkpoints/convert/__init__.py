"""Conversion of a compressed model between formats, bit for bit, with a proof: `attar convert`.

The package knows which values each format holds exactly. It imports the sources, layouts, `gguf` and receipts of
`checkpoints`; it never rounds. Start reading in `run`, then `grids`.
"""
