"""Reader of SqueezeLLM's own checkpoints (Kim et al. 2023, arXiv 2306.07629), in safetensors.

A quantized linear X is

* X.qweight int32 [I*bits/32, O], codes of 3 or 4 bits packed down the input dimension as GPTQ's are;
* X.lookup_table [O, 2^bits], a row's numbers in no order, float32 as they were fitted (some conversions: 16 bits);
* where it is dense and sparse, X.rows int32 [O + 1], X.cols int32 [n] and X.vals [n]: CSR of what is *added* to the
  looked-up values, as in `formats/codecs/lookup.py`;
* in some, X.startrows: where the threads of its GPU kernel begin. It follows from X.rows and is not read.

So all of it is the scheme `lut4-s...`, number for number. The project publishes pickles, which are refused like all
pickles; safetensors made of them have these names. The bits are `wbits`, in config.json's `quantization_config`, or in
the quant_config.json beside it that the project's own tools write (`beside.py`).

Not done: the rows that its hybrid kernel keeps whole (X.full_rows), refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.gptq import matrix
from attar.checkpoints.strict_io import invalid, unsupported
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import NUMBERS, Lookup, ScaleDtype
from attar.kernels.operands import Linear

METHOD = "squeezellm"
TABLE = "lookup_table"
BITS = (3, 4)
PLACES = ("rows", "cols")


class SqueezeLlm:
    """Quantized modules of a SqueezeLLM checkpoint. Raises CheckpointError where its config is not supported."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        bits = config.get("wbits")
        if type(bits) is not int or bits not in BITS:
            raise unsupported(f"{folder.path}: SqueezeLLM with wbits {bits!r}: attar reads 3 and 4")
        self.bits = bits

    def holds(self, module: str) -> bool:
        return self.folder.has(f"{module}.{TABLE}")

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module. Raises CheckpointError where its words do not make one."""
        words, outputs = matrix(self.folder, f"{module}.qweight")
        if not words or not outputs or words % self.bits:
            raise invalid(
                f"{self.folder.path}: {module}.qweight is {words} x {outputs}: {self.bits} words hold 32 inputs"
            )
        return outputs, words * 32 // self.bits

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of a module, from headers alone. Raises CheckpointError where they do not fit together."""
        folder, shape = self.folder, self.shape(module)
        if folder.has(f"{module}.full_rows"):
            raise unsupported(f"{folder.path}: {module}.full_rows is not supported: the whole rows of a hybrid kernel")
        table, count = folder.info(f"{module}.{TABLE}"), 0
        if table.shape != (shape[0], 1 << self.bits):
            raise invalid(
                f"{folder.path}: {module}.{TABLE} must have {1 << self.bits} numbers for each of {shape[0]} rows, not "
                f"{list(table.shape)}"
            )
        dtypes = {table.dtype}
        if any(
            folder.has(f"{module}.{part}") for part in (*PLACES, "vals")
        ):  # one alone is a file that lost the others
            rows, places, values = (folder.info(f"{module}.{part}") for part in (*PLACES, "vals"))
            if rows.shape != (shape[0] + 1,) or len(values.shape) != 1 or places.shape != values.shape:
                raise invalid(
                    f"{folder.path}: {module}: rows, cols and vals are CSR of {shape[0]} rows, not {list(rows.shape)}, "
                    f"{list(places.shape)} and {list(values.shape)}"
                )
            if rows.dtype != "int32" or places.dtype != "int32":
                raise invalid(f"{folder.path}: {module}: rows and cols must be int32")
            count = values.shape[0]
            if count > shape[0] * shape[1]:
                raise invalid(f"{folder.path}: {module}: {count} numbers apart are more than {shape} has")
            dtypes.add(values.dtype)
        if not dtypes <= NUMBERS.keys():
            raise invalid(f"{folder.path}: {module}: {TABLE} and vals must be floats of 16 or 32 bits")
        numbers = cast(ScaleDtype, dtypes.pop()) if len(dtypes) == 1 else "float32"
        return Scheme(Lookup.of(self.bits, count, shape, numbers), layout="plain")

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        scheme, shape = self.scheme_of(module), self.shape(module)
        assert isinstance(scheme.weight, Lookup)
        codes = self.folder.read(f"{module}.qweight").t().contiguous()  # words down the inputs are our rows of words
        parts = {"codes": codes, "table": self._numbers(f"{module}.{TABLE}", scheme.weight)}
        if scheme.weight.outliers:
            starts, places = (self.folder.read(f"{module}.{part}") for part in PLACES)
            inside = int(starts[0]) == 0 and int(starts[-1]) == len(places) and bool((starts.long().diff() >= 0).all())
            if not inside or not 0 <= int(places.min()) <= int(places.max()) < shape[1]:
                raise invalid(f"{self.folder.path}: {module}: rows and cols lie outside of the matrix")
            parts |= {"starts": starts, "places": places, "extras": self._numbers(f"{module}.vals", scheme.weight)}
        return Linear(module, PackedTensor(scheme, shape, parts))

    def _numbers(self, name: str, form: Lookup) -> Tensor:
        return self.folder.read(name).to(getattr(torch, form.numbers))
