"""Our own storage of compressed weights, for schemes that no library supports: lookup tables, GGML's blocks outside of
a GGUF file, 2:4 sparse weights, float8 in E5M2, and folders that mix libraries.

The parts of module X are stored as X.weight.<part>. config.json's `quantization_config` names every module with its
scheme and shape. So the declarations are compared with the headers when the folder is opened, and fixed scales of
activations are checked, before any weight is read:

    {"quant_method": "attar", "version": 1,
     "modules": {"model.layers.0.mlp.up_proj": {"scheme": "lut4-s45", "scale_dtype": "bfloat16", "shape": [768, 256]}}}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.scales import activation_scale
from attar.checkpoints.strict_io import invalid, naming, unsupported
from attar.formats.codecs import sparse24
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Sparse24
from attar.kernels.operands import Linear

METHOD = "attar"
VERSION = 1
MAX_SIDE = 1 << 31


def stored_part(part: str, scheme: Scheme) -> str:
    return f"weight.{part}"


def stored_scale(scheme: Scheme) -> str:
    return "input_scale"


def against(schemes: Collection[Scheme]) -> str | None:
    return None


def ignored_within(module: str) -> list[str]:
    return []


def quantization_config(
    schemes: Mapping[str, Scheme],
    ignored: Sequence[str],
    embeddings: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    assert shapes is not None, "this format says shapes in the config"
    modules = {
        module: {"scheme": scheme.name, "scale_dtype": scheme.scale_dtype, "shape": list(shapes[module])}
        for module, scheme in schemes.items()
    }
    return {"quant_method": METHOD, "version": VERSION, "modules": modules}


class OwnFormat:
    """Quantized modules of a checkpoint in our own format.

    Raises CheckpointError where the config is not of this version, or does not describe the tensors of the files.
    """

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        where = f"{folder.path}: quantization_config"
        if config.get("version") != VERSION:
            raise unsupported(f"{where}: version {config.get('version')!r} is not {VERSION}, the one attar knows")
        modules = config.get("modules")
        if not isinstance(modules, dict) or not modules:
            raise invalid(f"{where}: needs modules that say how they are quantized")
        self._modules: dict[str, tuple[Scheme, tuple[int, int]]] = {}
        for module, said in modules.items():
            scheme, shape = self._modules[module] = _read_module(said, f"{where}: {module}")
            for part, wanted in scheme.parts(shape).items():
                found = folder.info(f"{module}.{stored_part(part, scheme)}")
                if found != wanted:
                    raise invalid(
                        f"{folder.path}: {module}: part {part!r} of {scheme.name} {shape} must be {wanted.dtype} "
                        f"{wanted.shape}, not {found.dtype} {found.shape}"
                    )
            if scheme.static:
                activation_scale(folder, f"{module}.{stored_scale(scheme)}")

    def holds(self, module: str) -> bool:
        return module in self._modules

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module."""
        return self._modules[module][1]

    def scheme_of(self, module: str) -> Scheme:
        return self._modules[module][0]

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where places of 2:4 weights are invalid."""
        scheme, shape = self._modules[module]
        parts = {part: self.folder.read(f"{module}.{stored_part(part, scheme)}") for part in scheme.parts(shape)}
        if isinstance(scheme.weight, Sparse24) and not sparse24.in_order(parts["places"]):
            raise invalid(f"{self.folder.path}: {module}: places must be two of every four, in their order")
        linear = Linear(module, PackedTensor(scheme, shape, parts))
        if scheme.static:
            linear.activation_scale = activation_scale(self.folder, f"{module}.{stored_scale(scheme)}")
        return linear


def _read_module(said: object, where: str) -> tuple[Scheme, tuple[int, int]]:
    if not isinstance(said, dict):
        raise invalid(f"{where} must be an object with scheme, scale_dtype and shape")
    name, dtype, shape = (said.get(key) for key in ("scheme", "scale_dtype", "shape"))
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise invalid(f"{where}: scheme and scale_dtype are names, not {name!r} and {dtype!r}")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < MAX_SIDE for n in shape):
        raise invalid(f"{where}: shape is two numbers, outputs and inputs, not {shape!r}")
    with naming(where, "quantization_invalid"):
        scheme = Scheme.parse(name).with_scale_dtype(dtype)
        scheme.check(shape[1])
    return scheme, (shape[0], shape[1])
