"""Reader and writer of bitsandbytes checkpoints, as transformers stores them: NF4, and the int8 of LLM.int8().

A module X in four bits has X.weight with two codes a byte. Names that begin with X.weight hold the magnitudes of its
blocks, the tables that codes index, and a line of JSON (`formats/codecs/nf4.py`). In eight bits it has X.weight int8,
X.SCB float32 (the largest magnitude of each row) and X.weight_format.

The tensors show what is quantized, and whether NF4's magnitudes are too. The config says which of the two formats it
is, and the threshold of LLM.int8()'s outliers. One folder has one of the two.

Not done: FP4, other block sizes, and NF4 matrices whose rows are not whole blocks. All are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attar.checkpoints.folder import Folder
from attar.checkpoints.strict_io import invalid, naming, unsupported
from attar.formats.codecs import nf4
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Outliers
from attar.kernels.operands import Linear

METHOD = "bitsandbytes"

STATE = "weight.quant_state.bitsandbytes__nf4"
STORED: Mapping[str, Mapping[str, str]] = {
    "nf4": {
        "codes": "weight",
        "absmax": "weight.absmax",
        "map": "weight.quant_map",
        "nested_absmax": "weight.nested_absmax",
        "nested_map": "weight.nested_quant_map",
        "state": STATE,
    },
    "nf4-single": {"codes": "weight", "absmax": "weight.absmax", "map": "weight.quant_map", "state": STATE},
    "llm-int8": {"codes": "weight", "absmax": "SCB", "format": "weight_format"},
}
"""Names of a PackedTensor's parts in the file, by scheme."""

MAX_STATE = 4096


def stored_part(part: str, scheme: Scheme) -> str:
    return STORED[scheme.name][part]


def stored_scale(scheme: Scheme) -> str:
    raise AssertionError("no scheme here has static activations")


def against(schemes: Collection[Scheme]) -> str | None:
    names = {scheme.name for scheme in schemes}
    if len(names) == 1 and names <= STORED.keys():
        return None
    return f"bitsandbytes has no place for {' and '.join(sorted(names))} in one folder"


def ignored_within(module: str) -> list[str]:
    return [module, f"model.{module}"]


def quantization_config(
    schemes: Mapping[str, Scheme],
    ignored: Sequence[str],
    embeddings: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    assert not embeddings, "no scheme here is for an LM head"
    one = next(iter(schemes.values()))
    four = one.name != "llm-int8"
    return {
        "quant_method": METHOD,
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "bnb_4bit_compute_dtype": one.scale_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": one.name != "nf4-single",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(ignored),
        "llm_int8_threshold": Outliers().threshold,
    }


class BitsAndBytes:
    """Quantized modules of a bitsandbytes checkpoint. Raises CheckpointError where its config is not supported."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        where = f"{folder.path}: quantization_config"
        four, eight = (config.get(key, False) for key in ("load_in_4bit", "load_in_8bit"))
        if not (type(four) is bool and type(eight) is bool and four != eight):
            raise invalid(f"{where}: one of load_in_4bit and load_in_8bit must be true")
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if four and kind != "nf4":
            raise unsupported(f"{where}: bnb_4bit_quant_type {kind!r} is not supported: nf4 is")
        threshold = config.get("llm_int8_threshold", Outliers().threshold)
        if eight and threshold != Outliers().threshold:
            raise unsupported(f"{where}: llm_int8_threshold {threshold!r} is not supported: 6 is")
        self._four = four

    def holds(self, module: str) -> bool:
        return self.folder.has(f"{module}.weight.absmax" if self._four else f"{module}.SCB")

    def scheme_of(self, module: str) -> Scheme:
        if not self._four:
            return Scheme.parse("llm-int8")
        try:
            scheme = Scheme.parse("nf4" if self._double(module) else "nf4-single")
            return scheme.with_scale_dtype(str(self._state(module).get("dtype")))
        except ValueError as error:
            raise invalid(f"{self.folder.path}: {module}: {error}") from None

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module. Raises CheckpointError where it is not a matrix."""
        shape = self._state(module).get("shape") if self._four else self.folder.info(f"{module}.weight").shape
        if not isinstance(shape, list | tuple) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise invalid(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        scheme, shape = self.scheme_of(module), self.shape(module)
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            parts = {
                part: self.folder.read(f"{module}.{stored_part(part, scheme)}")
                for part in scheme.parts(shape)
                if part not in ("state", "format")  # the state has the length that its digits gave it
            }
            if self._four:
                offset = self._state(module)["nested_offset"] if self._double(module) else None
                parts["state"] = nf4.state(shape, scheme, offset)
            else:
                parts["format"] = self._format(module)
            return Linear(module, PackedTensor(scheme, shape, parts))

    def _double(self, module: str) -> bool:
        return self.folder.has(f"{module}.weight.nested_absmax")

    def _state(self, module: str) -> dict[str, Any]:
        name = f"{module}.{STATE}"
        part = self.folder.info(name)
        if part.dtype != "uint8" or len(part.shape) != 1 or part.bytes > MAX_STATE:
            raise invalid(f"{self.folder.path}: {name} is no line of JSON: {part.dtype} {list(part.shape)}")
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            return nf4.read_state(self.folder.read(name), self._double(module))

    def _format(self, module: str) -> Any:
        found = self.folder.read(f"{module}.weight_format")
        if found.numel() != 1 or int(found) != 0:
            raise unsupported(f"{self.folder.path}: {module}.weight_format is not 0, codes in the order of rows")
        return found.reshape(())
