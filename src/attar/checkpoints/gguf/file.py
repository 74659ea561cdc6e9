"""One open GGUF model, of one file or several parts: headers checked by `header.py`, tensors read as bytes of blocks.

Tensors are read with `pread` into memory of their own, for the reason given in `safetensors.py`: a map of a truncated
file ends the process, a short read is an error with a name. `formats.codecs.ggml_blocks` decodes the bytes. Torch is
imported only when a tensor is read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from attar.checkpoints.gguf.header import MAX_TENSORS, GgufTensor, Part, read_header
from attar.checkpoints.gguf.parts import MAX_PARTS, PartName, part_name, part_paths
from attar.checkpoints.safetensors import byte_view
from attar.checkpoints.strict_io import CheckpointError, OnDisk, OpenFile, near

if TYPE_CHECKING:
    from torch import Tensor


class GgufPart(OpenFile):
    """One open file with a checked header.

    Raises CheckpointError as `OpenFile` does, and where the file is truncated, of another format, malformed, or of a
    kind that `header.py` refuses. Without `whole`, the header alone is enough.
    """

    def __init__(self, path: str | os.PathLike[str], whole: bool = True) -> None:
        super().__init__(path)
        try:
            self.header = read_header(self, whole)
        except CheckpointError:
            self.close()
            raise


class GgufFile(OnDisk):
    """One open model: the file at `path`, and the other parts beside it where it is the first of several. Reading is
    thread-safe.

    Raises CheckpointError as `GgufPart` does for each of them, where a part is missing, doubled, of another model or
    out of order, and where `path` is another part than the first. Without `whole`, the headers are enough, and no
    tensor can be read that is not there.
    """

    def __init__(self, path: str | os.PathLike[str], whole: bool = True) -> None:
        first = GgufPart(path, whole)
        self.path, self.header, self.metadata = first.path, first.header, first.header.metadata
        self.parts = [first] if first.header.part is None else _parts(first, first.header.part, whole)
        self.size = sum(part.size for part in self.parts)
        self._home = {name: part for part in self.parts for name in part.header.tensors}

    def names(self) -> tuple[str, ...]:
        """Return the tensors' names, in the order of their data, part after part."""
        return tuple(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def info(self, name: str) -> GgufTensor:
        """Return a tensor's type, shape and position in its part. Raises CheckpointError naming near misses."""
        if name not in self._home:
            raise self.error("checkpoint_incomplete", f"has no tensor {name!r}{near(name, self._home)}")
        return self._home[name].header.tensors[name]

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor's bytes, uint8 [..., bytes of a row], in memory of their own; with an `index`, of this
        entry of its first dimension alone."""
        import torch

        tensor, file = self.info(name), self._home[name]
        shape, begin = tensor.raw_shape, file.header.data + tensor.begin
        if index is not None:
            assert 0 <= index < shape[0], (name, index, shape)
            begin += index * (tensor.end - tensor.begin) // shape[0]
            shape = shape[1:]
        raw = torch.empty(shape, dtype=torch.uint8)
        file.fill(byte_view(raw), begin)
        return raw


def _parts(first: GgufPart, part: Part, whole: bool) -> list[GgufPart]:
    """Open the other parts of a model. Raises CheckpointError as `GgufFile`; none is opened before all are there."""
    name = part_name(first.path)
    if part.index > 0:
        stem = "NAME" if name is None else name.stem
        raise first.error(
            "file_wrong_kind",
            f"part {part.index + 1} of {part.count} of a model: give the first, {PartName(stem, 1, part.count)}",
        )
    if part.count > MAX_PARTS:
        raise first.error("checkpoint_too_large", f"{part.count} parts; attar accepts {MAX_PARTS}")
    if name is None or (name.number, name.parts) != (1, part.count):
        raise first.error(
            "checkpoint_mismatch",
            f"the first of {part.count} parts by its split.no and split.count, so its name must be like "
            f"{PartName('NAME', 1, part.count)}: give all parts their own names",
        )
    paths = part_paths(first.path)
    if missing := [path.name for path in paths if not path.exists()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise first.error(
            "checkpoint_incomplete",
            f"{len(missing)} of {part.count} parts are not beside it: {', '.join(missing[:3])}{more}; get them as well",
        )
    files, seen = [first], dict.fromkeys(first.header.tensors, first)
    for index, path in enumerate(paths[1:], 1):
        file = GgufPart(path, whole)
        _check_part(file, index, first, part)
        for tensor in file.header.tensors:
            if tensor in seen:
                raise file.error(
                    "checkpoint_mismatch",
                    f"tensor {tensor!r} is in {seen[tensor].path.name} too: one of them is doubled or of another model",
                )
            seen[tensor] = file
        if len(seen) > MAX_TENSORS:
            raise file.error("checkpoint_too_large", f"more than the {MAX_TENSORS} tensors that attar accepts")
        files.append(file)
    if len(seen) != part.tensors:
        raise first.error(
            "checkpoint_mismatch",
            f"its split.tensors.count is {part.tensors}, and its {part.count} parts hold {len(seen)} tensors: one is "
            "damaged or of another model",
        )
    return files


def _check_part(file: GgufPart, index: int, first: GgufPart, part: Part) -> None:
    """Raise CheckpointError where a file is not the part of a model that its name says."""
    found, at = file.header.part, f"part {index + 1} of {part.count} by its name"
    if found is None:
        raise file.error("checkpoint_mismatch", f"{at}, and a whole model by its metadata: get this part again")
    if found.index != index:
        raise file.error(
            "checkpoint_mismatch",
            f"{at}, and part {found.index + 1} of {found.count} by its split.no: give all parts their own names",
        )
    key = "general.architecture"
    kind = file.header.metadata.get(key, (own := first.header.metadata.get(key)))
    if (found.count, found.tensors) != (part.count, part.tensors) or kind != own:
        raise file.error(
            "checkpoint_mismatch",
            f"of another model than {first.path.name}: it says {found.count} parts with {found.tensors} tensors of a "
            f"{kind}, which says {part.count} parts with {part.tensors} tensors of a {own}",
        )
