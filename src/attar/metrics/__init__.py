"""Figures of a model on a text: perplexity, KL divergence from a base model, agreement, with confidence intervals.

The package knows decoders and token ids. It imports `model`, `kernels`, `images`, `text` and packages below them. It
reads no files but those of images. Start reading in `measure`.
"""
