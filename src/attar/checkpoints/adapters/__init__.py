"""Low-rank adapters (LoRA) of PEFT: read onto a decoder, or merged into a checkpoint.

The package knows PEFT's files and which bases an adapter fits. It imports `model`, `plan`, `kernels` and the readers of
`checkpoints`. Start reading in `lora`.
"""
