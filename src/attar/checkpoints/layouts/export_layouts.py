"""In which library's format the compressed weights of a folder are stored.

A folder has one quantization config, hence one format: that of compressed-tensors where it has a place for every scheme
in it, else bitsandbytes', else our own, which attar alone reads. A format is a module that says under which names the
parts of a weight lie and what the config says; it has a reader too (`hf.READERS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoints.layouts import bitsandbytes, compressed_tensors, own_format
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part, Scheme


class Library(Protocol):
    """What the module of a format offers to writers."""

    METHOD: str

    def against(self, schemes: Collection[Scheme]) -> str | None:
        """Why a folder with these schemes cannot have the format, or None where it can."""
        ...

    def stored_part(self, part: str, scheme: Scheme) -> str:
        """The name, after the module's, under which a part of a PackedTensor is stored."""
        ...

    def stored_scale(self, scheme: Scheme) -> str:
        """The same of the fixed scale of static activations."""
        ...

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme],
        ignored: Sequence[str],
        embeddings: Sequence[str] = (),
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint whose modules are stored in `schemes`, by stored module name.

        `ignored` are the linears that stay dense, `embeddings` those of the modules that are one, and `shapes` (out,
        in) of all modules, for a format that says them there.
        """
        ...


LIBRARIES: tuple[Library, ...] = (compressed_tensors, bitsandbytes, own_format)


def library_for(schemes: Collection[Scheme]) -> Library:
    """The first format that has a place for all of these; ours has one for any."""
    return next(library for library in LIBRARIES if library.against(schemes) is None)


def library_of(method: str | None) -> Library:
    """The format whose config names this `quant_method`; the first, where a folder holds no compressed weight."""
    return next((library for library in LIBRARIES if method == library.METHOD), LIBRARIES[0])


def declared(library: Library, module: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Part]:
    """Every tensor that module `module` of `shape` (out, in) is stored as; no weight is needed to know."""
    parts = {f"{module}.{library.stored_part(name, scheme)}": part for name, part in scheme.parts(shape).items()}
    if scheme.static:
        parts[f"{module}.{library.stored_scale(scheme)}"] = Part("float32", (1,))
    return parts


def parts_of(
    library: Library, module: str, packed: PackedTensor, activation_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of `declared`: a packed weight, and the scale [1] of static activations."""
    scheme = packed.scheme
    assert (activation_scale is not None) == scheme.static, "a static scheme, and no other, has an activation scale"
    parts = {f"{module}.{library.stored_part(name, scheme)}": tensor for name, tensor in packed.parts.items()}
    if activation_scale is not None:
        parts[f"{module}.{library.stored_scale(scheme)}"] = activation_scale.reshape(1).float()
    return parts
