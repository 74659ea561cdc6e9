"""Settings of NVIDIA's Triton Inference Server with TensorRT-LLM's backend, to and from those of `attar serve`.

The package knows `config.pbtxt` files and `protocol.scheduler_config`, and imports no torch. Start reading in `config`.
"""
