"""Calls whose parameters stand between tags, as Qwen3-Coder, GLM, MiniMax and DeepSeek write them.

`finding.py` finds the tags in a template's own renderings. `rules.py` writes the grammar of parameters, `reading.py`
reads them, and `values.py` says what a parameter's text is as JSON.
"""
