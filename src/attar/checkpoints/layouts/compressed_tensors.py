"""Reader and writer of compressed-tensors checkpoints: the format that vLLM and transformers load.

config.json's `quantization_config` has groups, which say how modules are quantized (`compressed_tensors_groups`), and
perhaps rotations of inputs (`compressed_tensors_rotations`). The tensors of a module X are

* X.weight_packed int32, X.weight_shape (pack-quantized), or X.weight in int8 or float8 (int-, float-, naive-quantized),
  or X.weight_packed uint8 (mxfp4-, nvfp4-pack-quantized), and X.weight_global_scale of the latter;
* X.weight_scale, and X.weight_zero_point where asymmetric;
* X.input_scale where activations have a static scale, X.input_global_scale where they are NVFP4; X.weight_g_idx where
  GPTQ reordered the columns;
* other ones where 2:4 zeros are left out, with `sparsity_config` or in marlin-24 (`compressed_tensors_24`).

When reading, the tensors say *whether* a module is quantized and the groups say *how*. `ignore` repeats what the
tensors show, and so is not needed; a module that has scales but no group is an error.

Asymmetric packed weights, ours and compressed-tensors' own, load in transformers 5.23 only with
`CompressedTensorsConfig(dequantize=True)`; its default path does not support packed zero points.

Not done: quantized KV caches and sparse-bitmask, refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts import compressed_tensors_24 as sparse
from attar.checkpoints.layouts.compressed_tensors_groups import MIXED, Groups, config_groups, format_of
from attar.checkpoints.layouts.compressed_tensors_rotations import Rotations
from attar.checkpoints.layouts.compressed_tensors_rotations import transform_config as transform_config
from attar.checkpoints.layouts.gptq import by_group
from attar.checkpoints.layouts.scales import activation_scale
from attar.checkpoints.strict_io import CheckpointError, invalid, naming, unsupported
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import NVFP4, Grid, Layout, Scheme
from attar.formats.weight_formats import Fp4, Sparse24
from attar.kernels.operands import Linear

METHOD = "compressed-tensors"

STORED: Mapping[str, str] = {
    "scale": "weight_scale",
    "zero": "weight_zero_point",
    "shape": "weight_shape",
    "global": "weight_global_scale",
}
"""Names of a PackedTensor's parts in the file, except its codes."""


def stored_part(part: str, scheme: Scheme) -> str:
    """Return the name, after the module's, under which a part of a PackedTensor is stored."""
    if part == "codes":
        return "weight_packed" if scheme.layout == "packed" or isinstance(scheme.weight, Fp4) else "weight"
    return STORED[part]


def stored_scale(scheme: Scheme) -> str:
    """Return the name, after the module's, of the fixed scale of static activations."""
    return "input_global_scale" if scheme.activation == NVFP4 else "input_scale"


# Reading


class CompressedTensors:
    """Quantized modules of a compressed-tensors checkpoint.

    Raises CheckpointError where the config asks for what is not supported.
    """

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        where = f"{folder.path}: quantization_config"
        if config.get("kv_cache_scheme"):
            raise unsupported(f"{where}: kv_cache_scheme is set: a quantized KV cache is not supported")
        self._rotations = Rotations(config.get("transform_config") or {}, f"{where}: transform_config")
        sparsity = config.get("sparsity_config") or {}
        storage = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
        if storage not in ("dense", sparse.BITMASK):
            raise unsupported(
                f"{where}: sparsity_config: format {storage!r} is not one that attar reads: dense and "
                f"{sparse.BITMASK} are"
            )
        self._masks = storage == sparse.BITMASK
        groups = config.get("config_groups") or {}
        if not isinstance(groups, dict) or not (groups or sparsity):
            raise invalid(f"{where}: needs config_groups that say how modules are quantized")
        self._groups = Groups({**config, "config_groups": groups}, where)

    def holds(self, module: str) -> bool:
        """Return whether the module is stored quantized. Raises CheckpointError for a dense one with rotated inputs."""
        held = self._scaled(module) or self._masked(module) or sparse.is_marlin(self.folder, module)
        if not held and self._rotations.reach(module):
            raise unsupported(
                f"{self.folder.path}: {module}: transform_config rotates its inputs, which is supported of quantized "
                "linears alone"
            )
        return held

    def _scaled(self, module: str) -> bool:
        return self.folder.has(f"{module}.weight_scale")

    def _masked(self, module: str) -> bool:
        return self._masks and sparse.is_masked(self.folder, module)

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of the module. Raises CheckpointError where no group covers it."""
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            if sparse.is_marlin(self.folder, module):
                return self._marlin_scheme(module)
            if not self._scaled(module):
                return sparse.masked_scheme(self.folder, module)
            group = self._groups.of(module)
            words = isinstance(group.weight, Grid) and self.folder.has(f"{module}.weight_packed")
            layout: Layout = "packed" if words else "plain"
            scheme = Scheme(group.weight, group.activation, group.static, layout=layout)
            if isinstance(scheme.weight, Fp4):
                return scheme  # its scales have a dtype of their own
            return scheme.with_scale_dtype(self.folder.info(f"{module}.weight_scale").dtype)

    def _marlin_scheme(self, module: str) -> Scheme:
        group = self._groups.of(module)
        if not isinstance(group.weight, Grid) or group.activation is not None:
            raise unsupported(f"{self.folder.path}: {module}: marlin-24 is supported of weights alone, in integers")
        return sparse.marlin_scheme(self.folder, module, group.weight)

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module. Raises CheckpointError where it is not a matrix."""
        shape: Sequence[int]
        if sparse.is_marlin(self.folder, module):
            scheme = self._marlin_scheme(module)
            shape = sparse.marlin_shape(self.folder, module, scheme)
        elif self._masked(module):
            shape = sparse.masked_shape(self.folder, module)
        elif isinstance(self._groups.of(module).weight, Fp4):
            shape = self.folder.info(f"{module}.weight_packed").shape
            shape = (*shape[:-1], 2 * shape[-1]) if shape else shape
        elif self.folder.has(f"{module}.weight_packed"):
            stored = self.folder.info(f"{module}.weight_shape")
            if stored.shape != (2,) or stored.dtype not in ("int64", "int32"):
                raise invalid(
                    f"{self.folder.path}: {module}.weight_shape must be two whole numbers, outputs and inputs, not "
                    f"{stored.dtype} {list(stored.shape)}"
                )
            shape = self.folder.read(f"{module}.weight_shape").tolist()
        else:
            shape = self.folder.info(f"{module}.weight").shape
        if len(shape) != 2 or not 0 < min(shape) <= max(shape) < 1 << 31:
            raise invalid(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        scheme, shape = self.scheme_of(module), self.shape(module)
        try:
            packed = PackedTensor(scheme, shape, self._parts(module, scheme, shape))
        except CheckpointError:
            raise
        except (ValueError, RuntimeError) as error:
            raise invalid(f"{self.folder.path}: {module}: {error}") from None
        linear = Linear(module, packed, hadamard=self._rotations.of(module, shape[1]))
        if scheme.static:
            linear.activation_scale = activation_scale(self.folder, f"{module}.{stored_scale(scheme)}")
        if self.folder.has(f"{module}.weight_g_idx"):
            self._sort_columns(linear, packed, self.folder.read(f"{module}.weight_g_idx"))
        return linear

    def _parts(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Tensor]:
        declared, masked = scheme.parts(shape), self._masked(module)
        if isinstance(scheme.weight, Sparse24):
            return (sparse.read_masked if masked else sparse.read_marlin)(self.folder, module, scheme)
        parts = {}
        for part in declared:
            if part == "codes" and masked:
                parts[part] = sparse.read_masked_codes(self.folder, module, scheme)
                continue
            parts[part] = self.folder.read(f"{module}.{stored_part(part, scheme)}")
            if part in ("scale", "global") and declared[part].shape == (1,):
                parts[part] = parts[part].reshape(1)  # some files store it as a scalar
            if part == "shape":
                parts[part] = parts[part].long()
        return parts

    def _sort_columns(self, linear: Linear, packed: PackedTensor, g_idx: Tensor) -> None:
        if bool((g_idx == -1).all()):  # declared and never filled in
            return
        if not isinstance(packed.scheme.weight, Grid):
            raise unsupported(
                f"{self.folder.path}: {linear.name}: {packed.scheme.name} with weight_g_idx is not supported"
            )
        inputs = packed.shape[1]
        permutation = by_group(linear.name, g_idx, inputs, packed.scheme.grid.group_size or inputs)
        if permutation is None:
            return
        codes, scale, zero = affine.decode(packed)
        linear.weight = affine.encode(codes[:, permutation], scale, zero, packed.scheme, packed.shape)
        linear.permutation = permutation


# Writing


def against(schemes: Collection[Scheme]) -> str | None:
    """Return why no folder can have the format with these schemes, or None; see `export_layouts.Library`."""
    try:
        for scheme in schemes:
            format_of(scheme)
    except ValueError as error:
        return str(error)
    return None


def ignored_within(module: str) -> list[str]:
    return [f"re:.*{module}[.].*"]


def quantization_config(
    schemes: Mapping[str, Scheme],
    ignored: Sequence[str],
    embeddings: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Return the `quantization_config` of modules; see `export_layouts.Library`. Raises ValueError where the format
    cannot store a scheme."""
    formats = {format_of(scheme) for scheme in schemes.values()}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": config_groups(schemes, embeddings),
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def with_patterns(config: Mapping[str, Any], patterns: Sequence[str], scheme: Scheme) -> dict[str, Any]:
    """Return a `quantization_config` with one more group: modules of these patterns are stored in `scheme`.

    Patterns win over the class "Linear". Raises ValueError where the format cannot store the scheme.
    """
    group = config_groups(dict.fromkeys(patterns, scheme))["group_0"] | {"targets": list(patterns)}
    groups = config["config_groups"] | {f"group_{len(config['config_groups'])}": group}
    formats = {each["format"] for each in groups.values()}
    return {**config, "format": formats.pop() if len(formats) == 1 else MIXED, "config_groups": groups}
