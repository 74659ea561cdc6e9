"""Vision-language models as data: where a checkpoint holds its language model, its vision tower and its projector."""
