"""Sources of weights: from a user's model name to a decoder, and the files that describe a model beside it.

The package knows the Hub, folders, GGUF files and importance matrices. It imports the readers of `checkpoints`, its
`layouts` and `gguf`. Start reading in `opening`, then `hf`.
"""
