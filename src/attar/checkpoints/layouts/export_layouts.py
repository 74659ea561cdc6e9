"""Choice of the library format in which a folder's compressed weights are stored.

A folder has one quantization config, hence one format. This is compressed-tensors where it supports every scheme in the
folder, else bitsandbytes, else our own, which attar alone reads. A format is a module that defines the names of a
weight's stored parts and the contents of the config; it has a reader too (`hf.READERS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoints.layouts import bitsandbytes, compressed_tensors, own_format
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part, Scheme


class Library(Protocol):
    """Interface of a format's module to writers."""

    METHOD: str

    def against(self, schemes: Collection[Scheme]) -> str | None:
        """Return why a folder with these schemes cannot have the format, or None where it can."""

    def stored_part(self, part: str, scheme: Scheme) -> str:
        """Return the name, after the module's, under which a part of a PackedTensor is stored."""

    def stored_scale(self, scheme: Scheme) -> str:
        """Return the name, after the module's, of the fixed scale of static activations."""

    def ignored_within(self, module: str) -> list[str]:
        """Return entries of `ignored` for every linear layer within modules of this name, wherever they stand."""

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme],
        ignored: Sequence[str],
        embeddings: Sequence[str] = (),
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint whose modules are stored in `schemes`, by stored module
        name.

        `ignored` are the linears that stay dense, `embeddings` the modules that are embeddings, and `shapes` (out, in)
        of all modules, for a format whose config has them.
        """


LIBRARIES: tuple[Library, ...] = (compressed_tensors, bitsandbytes, own_format)


def library_for(schemes: Collection[Scheme]) -> Library:
    """Return the first format that supports all of these schemes; our own supports any."""
    return next(library for library in LIBRARIES if library.against(schemes) is None)


def library_of(method: str | None) -> Library:
    """Return the format whose config names this `quant_method`; the first, where a folder holds no compressed
    weight."""
    return next((library for library in LIBRARIES if method == library.METHOD), LIBRARIES[0])


def declared(library: Library, module: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Part]:
    """Return every tensor that stores module `module` of `shape` (out, in), without its weight."""
    parts = {f"{module}.{library.stored_part(name, scheme)}": part for name, part in scheme.parts(shape).items()}
    if scheme.static:
        parts[f"{module}.{library.stored_scale(scheme)}"] = Part("float32", (1,))
    return parts


def parts_of(
    library: Library, module: str, packed: PackedTensor, activation_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the tensors of `declared`: a packed weight, and the scale [1] of static activations."""
    scheme = packed.scheme
    assert (activation_scale is not None) == scheme.static, "a static scheme, and no other, has an activation scale"
    parts = {f"{module}.{library.stored_part(name, scheme)}": tensor for name, tensor in packed.parts.items()}
    if activation_scale is not None:
        parts[f"{module}.{library.stored_scale(scheme)}"] = activation_scale.reshape(1).float()
    return parts
