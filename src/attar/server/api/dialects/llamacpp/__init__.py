"""Routes of llama.cpp's server: /completion, /infill, /apply-template, /embedding, /props and /slots.

Sampling parameters have llama.cpp's names and defaults there. Start with `routes.py`; `fields.py` has what bodies
share, `answers.py` the shapes of answers, and `writing.py` makes those of /completion and /infill.
"""
