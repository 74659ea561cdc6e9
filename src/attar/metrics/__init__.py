"""Figures of a model on a text: perplexity, KL divergence from a base model, agreement, with confidence intervals.

The package knows decoders and token ids. It imports `model`, `kernels`, `text` and packages below them; it reads no
files. Start reading in `measure`.
"""
