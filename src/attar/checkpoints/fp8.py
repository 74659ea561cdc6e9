"""Reading checkpoints of quant_method "fp8", in which DeepSeek and others publish their models: E4M3 in blocks.

A quantized module X is X.weight in float8_e4m3fn and X.weight_scale_inv, a number for every block of 128 by 128
weights, by which codes are *multiplied*, whatever its name; its inputs are rounded to E4M3 in groups of 128 for each
token. That is compressed-tensors' `block` strategy under other names, and our scheme `fp8-block`.

Which modules are quantized is read off the tensors; `modules_to_not_convert` says the same. Not done: one scale for a
tensor or fixed activation scales, scales that are powers of two (`ue8m0`), experts in four bits. All are refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.checkpoints.folder import Folder
from attar.checkpoints.safetensors import CheckpointError
from attar.formats.forms import Fp8Blocks
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear

METHOD = "fp8"

WANTED: Mapping[str, tuple[Any, Any]] = {  # what is read, and what is meant where nothing is said
    "weight_block_size": ([Fp8Blocks.size] * 2, None),
    "activation_scheme": ("dynamic", "dynamic"),
    "fmt": ("e4m3", "e4m3"),
    "scale_fmt": ("float", "float"),
    "expert_dtype": ("fp8", "fp8"),
}


class Fp8:
    """The quantized modules of an FP8 checkpoint. Raises CheckpointError where its config is not one that is read."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        for key, (wanted, default) in WANTED.items():
            if config.get(key, default) != wanted:
                raise CheckpointError(
                    f"{folder.path}: quantization_config: {key} {config.get(key, default)!r} is not supported: "
                    f"{wanted!r} is"
                )

    def holds(self, module: str) -> bool:
        return self.folder.has(f"{module}.weight_scale_inv")

    def shape(self, module: str) -> tuple[int, int]:
        """(out, in)."""
        shape = self.folder.info(f"{module}.weight").shape
        if len(shape) != 2:
            raise CheckpointError(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def scheme_of(self, module: str) -> Scheme:
        try:
            scheme = Scheme.parse("fp8-block").with_scale_dtype(self.folder.info(f"{module}.weight_scale_inv").dtype)
            scheme.check(self.shape(module)[1])
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None
        return scheme

    def read(self, module: str) -> Linear:
        """The linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        codes, scale = (self.folder.read(f"{module}.{part}") for part in ("weight", "weight_scale_inv"))
        try:
            packed = PackedTensor(self.scheme_of(module), self.shape(module), {"codes": codes, "scale": scale})
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None
        return Linear(module, packed)
