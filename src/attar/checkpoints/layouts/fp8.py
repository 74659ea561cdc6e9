"""Reader of checkpoints of quant_method "fp8" (E4M3), in which DeepSeek and others publish their models.

A quantized module X is X.weight in float8_e4m3fn and its scale, by which codes are *multiplied*, whatever its name:

* with `weight_block_size`, X.weight_scale_inv is a number for every block of 128 by 128 weights, and inputs are rounded
  to E4M3 in groups of 128 for each token. This is compressed-tensors' `block` strategy under other names, and our
  scheme `fp8-block`;
* without, it is one number, X.weight_scale_inv (transformers) or X.weight_scale (AutoFP8, vLLM). Inputs are rounded for
  each token, or, where `activation_scheme` is static, on the fixed scale X.activation_scale or X.input_scale: our
  schemes `fp8-tensor` and `fp8-tensor-static`.

The tensors show which modules are quantized; `modules_to_not_convert` repeats it. Not done: fixed activation scales
beside blocks, scales that are powers of two (`ue8m0`), experts in four bits. All are refused by name. Scales for a
float8 cache are not read: the user chooses the KV scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.scales import activation_scale
from attar.checkpoints.strict_io import invalid, naming, unsupported
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Fp8Blocks
from attar.kernels.operands import Linear

METHOD = "fp8"

WANTED: Mapping[str, tuple[Any, ...]] = {  # supported values; the first is the default
    "weight_block_size": (None, [Fp8Blocks.size] * 2),
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3",),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
}

SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("activation_scale", "input_scale")


class Fp8:
    """Quantized modules of an FP8 checkpoint. Raises CheckpointError where its config is not supported."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        for key, known in WANTED.items():
            if config.get(key, known[0]) not in known:
                raise unsupported(
                    f"{folder.path}: quantization_config: {key} {config.get(key, known[0])!r} is not supported: "
                    f"{' and '.join(map(repr, known))} {'is' if len(known) == 1 else 'are'}"
                )
        self._static = config.get("activation_scheme") == "static"
        self._scheme = "fp8-block"
        if config.get("weight_block_size") is None:
            self._scheme = "fp8-tensor-static" if self._static else "fp8-tensor"
        elif self._static:
            raise unsupported(
                f"{folder.path}: quantization_config: activation_scheme 'static' is not supported beside "
                "weight_block_size: 'dynamic' is"
            )

    def holds(self, module: str) -> bool:
        return any(self.folder.has(f"{module}.{name}") for name in SCALES)

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module. Raises CheckpointError where it is not a matrix."""
        shape = self.folder.info(f"{module}.weight").shape
        if len(shape) != 2:
            raise invalid(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def scheme_of(self, module: str) -> Scheme:
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            scheme = Scheme.parse(self._scheme).with_scale_dtype(self.folder.info(self._scale(module)).dtype)
            scheme.check(self.shape(module)[1])
        return scheme

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        codes, scale = self.folder.read(f"{module}.weight"), self.folder.read(self._scale(module))
        if not scale.ndim:
            scale = scale.reshape(1)
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            packed = PackedTensor(self.scheme_of(module), self.shape(module), {"codes": codes, "scale": scale})
        linear = Linear(module, packed)
        if self._static:
            linear.activation_scale = activation_scale(self.folder, self._found(module, INPUT_SCALES))
        return linear

    def _scale(self, module: str) -> str:
        return self._found(module, SCALES)

    def _found(self, module: str, names: Sequence[str]) -> str:
        """Return the first of a module's tensors with these names, or the last name where none exists."""
        known = [f"{module}.{name}" for name in names]
        return next(filter(self.folder.has, known), known[-1])
