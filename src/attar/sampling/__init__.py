"""The next token from logits, masks of grammars, and stop strings.

`sampler.py` defines the steps and their order; `device_sampler.py` makes the same choices on a GPU with one wait.
`masks.py` says which tokens a grammar allows, and `stop_strings.py` cuts streamed text at stop strings.

Imports: `execution` and the packages below it.
Start with `sampler.py`.
"""
