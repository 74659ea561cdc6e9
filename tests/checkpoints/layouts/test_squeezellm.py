"""SqueezeLLM: files packed by naive loops over its layout come back as the numbers that went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.inspect import inspect
from attar.checkpoints.layouts.squeezellm import SqueezeLlm
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.formats.codecs import lookup
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import NUMBERS, Lookup
from attar.kernels import dispatch, ref
from attar.model.cache import ForwardBatch
from tests.errors import user_error
from tests.model.random_model import together

LOGITS = 1e-5  # of the logit range, float32 against float32
KERNELS = 1e-4  # the same, by kernels that sum in another order


class Layer:
    """Random codes, tables and outliers, as a SqueezeLLM module of `outputs` x `inputs` stores them."""

    def __init__(self, outputs: int, inputs: int, bits: int = 4, outliers: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
        table = 0.15 * torch.randn(outputs, 1 << bits, generator=generator)
        self.tensors = {"qweight": down(codes, bits), "lookup_table": table}
        self.weight = torch.stack([table[row][codes[row]] for row in range(outputs)])
        if outliers:
            at = torch.randperm(outputs * inputs, generator=generator)[:outliers].sort().values
            apart = torch.zeros(outputs, inputs)
            apart.view(-1)[at] = torch.randn(outliers, generator=generator)
            starts = [int((apart[:row] != 0).sum()) for row in range(outputs + 1)]
            rows, columns = apart.nonzero().t()
            self.tensors |= {"rows": torch.tensor(starts).int(), "cols": columns.int(), "vals": apart[rows, columns]}
            self.tensors["startrows"] = torch.zeros(128, dtype=torch.int32)
            self.weight = self.weight + apart


def down(codes: Tensor, bits: int) -> Tensor:
    """Codes [O, I] to words [I * bits / 32, O], a code's lowest bit first, one input below the other."""
    outputs, inputs = codes.shape
    words = [[0] * outputs for _ in range(inputs * bits // 32)]
    for row in range(outputs):
        for column in range(inputs):
            for bit in range(bits):
                at = column * bits + bit
                words[at // 32][row] |= (int(codes[row, column]) >> bit & 1) << at % 32
    found = torch.tensor(words)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def settings(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "squeezellm", "wbits": bits, **more}


def module(folder: Path, tensors: dict[str, Tensor], tiny: Any) -> Folder:
    return Folder(tiny.write(folder, {f"m.{name}": tensor for name, tensor in tensors.items()}))


@pytest.mark.parametrize("outliers", [0, 1, 41])
@pytest.mark.parametrize("bits", [3, 4])
def test_weights_are_exact(bits: int, outliers: int, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(24, 96, bits, outliers)
    reader = SqueezeLlm(module(tmp_path, layer.tensors, tiny), settings(bits))
    assert reader.holds("m")
    assert reader.shape("m") == (24, 96)
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.scheme == reader.scheme_of("m") == Scheme.parse(linear.weight.scheme.name)
    assert linear.weight.parts["table"].dtype == torch.float32
    assert linear.weight.dequantize().equal(layer.weight)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ref.linear(x, (linear,)), x @ layer.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "table, vals, numbers",
    [
        (torch.float16, torch.float16, "float16"),
        (torch.bfloat16, torch.bfloat16, "bfloat16"),
        (torch.float16, torch.float32, "float32"),
        (torch.float16, torch.bfloat16, "float32"),
    ],
)
def test_numbers_of_other_dtypes_stay_what_they_are(
    table: torch.dtype, vals: torch.dtype, numbers: str, tiny: Any, tmp_path: Path
) -> None:
    layer = Layer(24, 64, outliers=9)
    dense = lookup_of(layer.tensors["qweight"], layer.tensors["lookup_table"].to(table).float())
    for row in range(24):
        for at in range(int(layer.tensors["rows"][row]), int(layer.tensors["rows"][row + 1])):
            dense[row, int(layer.tensors["cols"][at])] += layer.tensors["vals"][at].to(vals).float()
    tensors = layer.tensors | {"lookup_table": layer.tensors["lookup_table"].to(table)}
    tensors["vals"] = tensors["vals"].to(vals)
    linear = SqueezeLlm(module(tmp_path, tensors, tiny), settings()).read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert isinstance(linear.weight.scheme.weight, Lookup)
    assert linear.weight.scheme.weight.numbers == numbers
    assert linear.weight.dequantize().equal(dense)


def lookup_of(qweight: Tensor, table: Tensor) -> Tensor:
    """Four-bit codes looked up one by one."""
    rows = [[int(word) >> 4 * i & 15 for word in column for i in range(8)] for column in qweight.t().tolist()]
    return torch.stack([table[row][torch.tensor(codes)] for row, codes in enumerate(rows)])


@given(st.sampled_from((2, 3, 4)), st.integers(1, 1 << 15), st.integers(1, 1 << 15), st.data())
def test_a_form_of_any_count_is_its_name(bits: int, rows: int, columns: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, rows * columns))
    numbers = data.draw(st.sampled_from(sorted(NUMBERS)))
    form = Lookup.of(bits, count, (rows, columns), numbers)
    assert form.count((rows, columns)) == count
    assert Lookup.parse(form.name) == form


def test_names_that_are_none() -> None:
    for name in ("lut5", "lut4-s", "lut4-s1.2.3", "lut4-s10001", "lut4-f64", "lut4-snan", "lut4-s-1"):
        assert Lookup.parse(name) is None
        with user_error("scheme_unknown"):
            Scheme.parse(name)


def test_tables_in_float32_are_written_too() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    packed = lookup.quantize(weight, Scheme.parse("lut4-s45-f32"))
    half = lookup.quantize(weight, Scheme.parse("lut4-s45"))
    assert packed.parts["table"].dtype == packed.parts["extras"].dtype == torch.float32
    assert packed.parts["table"].half().equal(half.parts["table"])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("outliers", [0, 50])
def test_a_model_gives_the_logits_of_its_dense_twin(beside: bool, outliers: int, tiny: Any, tmp_path: Path) -> None:
    """One linear is left dense. The bits stand in config.json, or where the project's tools write them."""
    tensors, kept = tiny.tensors, "model.layers.1.mlp.down_proj"
    for seed, (name, linear) in enumerate(tiny.linears.items()):
        if name == kept:
            continue
        layer = Layer(*linear.weight.shape, 4, outliers and outliers + seed, seed)
        linear.weight.data = layer.weight
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
    config = {} if beside else {"quantization_config": settings()}
    folder = tiny.write(tmp_path / "squeezed", tensors, **config)
    if beside:
        (folder / "quant_config.json").write_text(json.dumps({"wbits": 4}))
    logits = tiny.their_logits()
    assert tiny.difference(tiny.our_logits(folder), logits) <= LOGITS
    assert sum(inspect(folder).schemes.values()) == len(tiny.linears)
    with user_error("source_compressed"):  # wherever its bits stand
        compress(folder, tmp_path / "again", recipe="rtn-w4g32")
    if (store := dispatch.store()) is not None:
        model = hf.load(folder, torch.float32, store=store)
        assert (
            tiny.difference(model.forward(tiny.ids, ForwardBatch((len(tiny.ids),), len(tiny.ids))), logits) <= KERNELS
        )


def test_a_model_is_shared_by_processes(tiny: Any, tmp_path: Path) -> None:
    """Where a process reads what is its own; outliers, row by row of the whole matrix, cannot be cut."""
    for outliers in (0, 5):
        tensors = tiny.tensors
        for seed, (name, linear) in enumerate(tiny.linears.items()):
            del tensors[f"{name}.weight"]
            layer = Layer(*linear.weight.shape, 4, outliers, seed)
            tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
        folder = tiny.write(tmp_path / f"{outliers}", tensors)
        (folder / "quant_config.json").write_text(json.dumps({"wbits": 4}))
        if outliers:
            with user_error("parallel_unsupported"):
                together(folder, 2, 1, lambda model: None)
            continue
        found = together(
            folder, 2, 1, lambda model: model.forward(tiny.ids, ForwardBatch((len(tiny.ids),), len(tiny.ids)))
        )
        assert tiny.difference(found[0], tiny.our_logits(folder)) <= LOGITS


def test_another_tools_file_beside_config_says_nothing(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)
    (folder / "quant_config.json").write_text(json.dumps({"wbits": 4}))
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


@pytest.mark.parametrize("bits", [None, 2, 8, "4", True, 4.0])
def test_other_bits_are_refused(bits: Any, tiny: Any, tmp_path: Path) -> None:
    with user_error("quantization_unsupported"):
        SqueezeLlm(module(tmp_path, Layer(24, 64).tensors, tiny), settings(bits))


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"qweight": torch.zeros(8, 24)}, "quantization_invalid"),
        ({"qweight": torch.zeros(0, 24, dtype=torch.int32)}, "quantization_invalid"),
        ({"qweight": None}, "checkpoint_incomplete"),
        ({"lookup_table": torch.zeros(24, 8)}, "quantization_invalid"),
        ({"lookup_table": torch.zeros(23, 16)}, "quantization_invalid"),
        ({"lookup_table": torch.zeros(24, 16, dtype=torch.float64)}, "quantization_invalid"),
        ({"lookup_table": torch.zeros(24, 16, dtype=torch.int32)}, "quantization_invalid"),
        ({"vals": torch.zeros(9, dtype=torch.int64)}, "quantization_invalid"),
        ({"vals": torch.zeros(8)}, "quantization_invalid"),
        ({"vals": torch.zeros(9, 1)}, "quantization_invalid"),
        ({"vals": None}, "checkpoint_incomplete"),
        ({"rows": None}, "checkpoint_incomplete"),
        ({"rows": None, "vals": None}, "checkpoint_incomplete"),
        ({"rows": torch.zeros(24, dtype=torch.int32)}, "quantization_invalid"),
        ({"rows": torch.zeros(25)}, "quantization_invalid"),
        ({"rows": torch.zeros(25, dtype=torch.int32)}, "quantization_invalid"),
        ({"rows": ints(*range(24), 1 << 30)}, "quantization_invalid"),
        ({"rows": ints(0, 9, 0, *([9] * 22))}, "quantization_invalid"),
        ({"rows": ints(-1, *([9] * 24))}, "quantization_invalid"),
        ({"cols": ints(*range(8), 64)}, "quantization_invalid"),
        ({"cols": ints(*range(8), -1)}, "quantization_invalid"),
        ({"full_rows": torch.zeros(64, 10)}, "quantization_unsupported"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    change: dict[str, Tensor | None], words: str, tiny: Any, tmp_path: Path
) -> None:
    changed = {name: t for name, t in (Layer(24, 64, outliers=9).tensors | change).items() if t is not None}
    with user_error(words):
        SqueezeLlm(module(tmp_path, changed, tiny), settings()).read("m")


def test_three_bits_need_whole_runs(tiny: Any, tmp_path: Path) -> None:
    folder = module(tmp_path, Layer(24, 64, 4).tensors, tiny)
    with user_error("quantization_invalid"):
        SqueezeLlm(folder, settings(3)).shape("m")
