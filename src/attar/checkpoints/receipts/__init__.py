"""Receipts of compressed models, and probes that check a copy on any machine: `attar verify`.

The package knows the receipt's keys and the numerical noise of kernel paths. It imports `model`, `kernels` and the
sources of `checkpoints`. Start reading in `receipt`, then `probes`.
"""
