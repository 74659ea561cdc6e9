"""Training on whole models: frozen-code tuning after compression, and QLoRA adapters.

The package knows checkpoints, decoders and Adam, but no solver. Start with `trainable_model.py`, then `tune.py` and
`trainable_parameters.py`, or `finetune.py` for adapters.
"""
