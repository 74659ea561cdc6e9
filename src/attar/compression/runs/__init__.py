"""Compression runs, which resume after a kill: `compress` and its steps.

The package combines all others of `compression`; none of them imports it. Start with `pipeline.py` (a request), then
`run.py` (one recipe), `block_pass.py` (all blocks) and `../resume.py` (progress on disk).
"""
