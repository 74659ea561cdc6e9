"""Reader of AWQ checkpoints in AutoAWQ's "gemm" layout, which nearly all of them have.

A quantized linear is three arrays: `qweight` int32 [I, O/8], `qzeros` int32 [G, O/8], both with eight outputs a word in
the order (0, 2, 4, 6, 1, 3, 5, 7), and `scales` float16 [G, O]; value = (code - zero) * scale, group after group along
the input. Groups are always contiguous. The activation scales that AWQ searches are folded into the weights and norms
before they are stored, so that a linear needs nothing but its weight.

The tensors show which modules are quantized; the config's `modules_to_not_convert` repeats it. Not done: the gemv and
gemv_fast layouts and MIT's original llm-awq files, which order and pad differently; all are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.gptq import Gptq, checked_group_size, matrix
from attar.checkpoints.strict_io import unsupported
from attar.formats.packing import unpack_awq


class Awq(Gptq):
    """Quantized modules of an AWQ checkpoint. Raises CheckpointError where its config is not supported."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise unsupported(
                f"{folder.path}: AWQ version {version!r}: attar reads 'gemm'; quantize the original model again, or "
                "look for its gemm build"
            )
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise unsupported(f"{folder.path}: AWQ with bits {bits!r}: the gemm layout has 4")
        if config.get("zero_point", True) is not True:
            raise unsupported(f"{folder.path}: AWQ without zero points is not supported")
        self.bits = 4
        self.group_size = checked_group_size(folder, config.get("group_size", config.get("q_group_size")))

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module."""
        inputs, words = matrix(self.folder, f"{module}.qweight")
        return words * 8, inputs

    def _codes(self, module: str) -> tuple[Tensor, None]:
        matrix(self.folder, f"{module}.qweight")
        return unpack_awq(self.folder.read(f"{module}.qweight")).t().contiguous(), None

    def _zero(self, module: str) -> Tensor:
        matrix(self.folder, f"{module}.qzeros")
        return unpack_awq(self.folder.read(f"{module}.qzeros"))
