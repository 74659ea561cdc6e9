"""One open GGUF file: its header checked by `header.py`, its tensors read as the bytes of their blocks.

Tensors are read with `pread` into memory of their own, for the reason given in `safetensors.py`: a map of a truncated
file ends the process, a short read is an error with a name. `formats.codecs.ggml_blocks` decodes the bytes. Torch is
imported only when a tensor is read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from attar.checkpoints.gguf.header import GgufTensor, read_header
from attar.checkpoints.safetensors import byte_view
from attar.checkpoints.strict_io import CheckpointError, OpenFile, near

if TYPE_CHECKING:
    from torch import Tensor


class GgufFile(OpenFile):
    """One open GGUF file with a checked header. Reading is thread-safe.

    Raises CheckpointError as `OpenFile` does, and where the file is truncated, of another format, malformed, or of a
    kind that `header.py` refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self.header = read_header(self)
        except CheckpointError:
            self.close()
            raise
        self.metadata = self.header.metadata

    def names(self) -> tuple[str, ...]:
        """Return the tensors' names, in the order of their data in the file."""
        return tuple(self.header.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.header.tensors

    def info(self, name: str) -> GgufTensor:
        """Return a tensor's type, shape and position. Raises CheckpointError naming near misses."""
        if name not in self.header.tensors:
            raise self.error("checkpoint_incomplete", f"has no tensor {name!r}{near(name, self.header.tensors)}")
        return self.header.tensors[name]

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor's bytes, uint8 [..., bytes of a row], in memory of their own; with an `index`, of this
        entry of its first dimension alone."""
        import torch

        tensor = self.info(name)
        shape, begin = tensor.raw_shape, self.header.data + tensor.begin
        if index is not None:
            assert 0 <= index < shape[0], (name, index, shape)
            begin += index * (tensor.end - tensor.begin) // shape[0]
            shape = shape[1:]
        raw = torch.empty(shape, dtype=torch.uint8)
        self.fill(byte_view(raw), begin)
        return raw
