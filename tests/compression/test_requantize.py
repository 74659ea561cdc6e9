"""Compression of what is compressed already: refused without the option; with it the decoded values are the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.receipts.receipt import known, read_receipt
from attar.checkpoints.receipts.verify import verify
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.importance import make as imatrix
from attar.compression.request.request import CompressionRequest, Target
from attar.compression.runs.pipeline import Compressed, compress, compress_request
from tests.errors import user_error

Sources = dict[str, Path]


@pytest.fixture(scope="module")
def sources(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """`tiny`, compressed in several formats."""
    at = tmp_path_factory.mktemp("compressed")
    packed = compress(tiny, at / "ct", recipe="rtn-w8g32").path
    return {
        "gptq": convert(packed, at / "gptq", to="gptq").path,
        "bitsandbytes": compress(tiny, at / "bnb", recipe="rtn-nf4").path,
        "gguf": compress(tiny, at / "q8_0.gguf", recipe="q8_0").path,
        "dense gguf": compress(tiny, at / "f32.gguf", recipe="bf16").path,
    }


@pytest.fixture(scope="module")
def dense(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    at = tmp_path_factory.mktemp("dense")
    return {name: convert(path, at / name, to="dense").path for name, path in sources.items()}


def requantize(source: Path, out: Path, recipe: str, **more: Any) -> Compressed:
    return compress_request(CompressionRequest(source, out, recipe=recipe, requantize=True, **more))


@pytest.mark.parametrize("name", ["gptq", "bitsandbytes", "gguf"])
@pytest.mark.parametrize("recipe", ["gptq-w4g32", "quarot+rtn-w4g32"])
def test_it_is_what_becomes_of_the_dense_folder(
    name: str, recipe: str, sources: Sources, dense: Sources, calibration: list[list[int]], tmp_path: Path
) -> None:
    given = {"calibration": calibration} if recipe.startswith("gptq") else {}
    made = requantize(sources[name], tmp_path / "ours", recipe, **given)
    compress(dense[name], tmp_path / "theirs", recipe=recipe, **given)  # type: ignore[arg-type]
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(each.dtype == theirs[key].dtype and each.equal(theirs[key]) for key, each in ours.items())
    about = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "theirs")]
    assert about[0] == about[1]
    assert verify(tmp_path / "ours").ok
    assert any(name in each and "compressed already" in each for each in made.warnings)


@pytest.mark.parametrize("name", ["gptq", "gguf"])
def test_files_are_made_of_them_too(name: str, sources: Sources, dense: Sources, tmp_path: Path) -> None:
    requantize(sources[name], tmp_path / "ours.gguf", "q4_0")
    compress(dense[name], tmp_path / "theirs.gguf", recipe="q4_0")
    ours, theirs = (GgufFile(tmp_path / f"{each}.gguf") for each in ("ours", "theirs"))
    assert ours.names() == theirs.names()
    assert all(ours.read(each).equal(theirs.read(each)) for each in theirs.names())


def test_the_receipt_names_the_original(sources: Sources, tmp_path: Path) -> None:
    for name, schemes in (("gptq", {"w8g32": 21}), ("bitsandbytes", {"nf4": 21}), ("gguf", {"Q8_0": 23})):
        found = read_receipt(requantize(sources[name], tmp_path / name, "rtn-w4g32").path)
        assert found is not None
        original = {"format": name, "schemes": schemes, "receipts": known(sources[name])}
        assert found.value["original"] == original
        files = {"q8_0.gguf"} if name == "gguf" else {"config.json", "model.safetensors"}
        assert found.value["source"]["files"].keys() == files


def test_it_is_refused_without_the_option(sources: Sources, tmp_path: Path) -> None:
    for name in ("gptq", "gguf"):
        with user_error("source_compressed", name, "--requantize"):
            compress(sources[name], tmp_path / "out", recipe="rtn-w4g32")


def test_a_file_of_dense_tensors_needs_no_option(sources: Sources, dense: Sources, tmp_path: Path) -> None:
    made = compress(sources["dense gguf"], tmp_path / "ours", recipe="rtn-w4g32")
    assert made.warnings == ()
    assert made.source_bytes == sources["dense gguf"].stat().st_size
    compress(dense["dense gguf"], tmp_path / "theirs", recipe="rtn-w4g32")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert all(each.equal(theirs[key]) for key, each in ours.items())
    found = read_receipt(made.path)
    assert found is not None
    assert "original" not in found.value


def test_the_option_changes_nothing_for_a_dense_source(tiny: Path, tmp_path: Path) -> None:
    requantize(tiny, tmp_path / "ours", "rtn-w4g32")
    compress(tiny, tmp_path / "theirs", recipe="rtn-w4g32")
    for name in ("model.safetensors", "receipt.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("more", [{"target": Target(bits=4.5)}, {}])
def test_searches_measure_against_the_decoded_values(
    more: dict[str, Any], sources: Sources, calibration: list[list[int]], tmp_path: Path
) -> None:
    """Targets of bits, choices among recipes, and what recipes gain over plain rounding."""
    recipe = "gptq-w4g32" if more else "rtn-w4g32,gptq-w4g32"
    made = requantize(sources["gguf"], tmp_path / "out", recipe, calibration=calibration, **more)
    assert verify(made.path).ok


def test_importances_of_a_file_are_those_of_its_dense_folder(
    sources: Sources, dense: Sources, calibration: list[list[int]], tmp_path: Path
) -> None:
    for name, source in (("ours", sources["gguf"]), ("theirs", dense["gguf"])):
        imatrix(source, tmp_path / f"{name}.dat", calibration=calibration, amount=Amount(8, 32))
    assert (tmp_path / "ours.dat").read_bytes() == (tmp_path / "theirs.dat").read_bytes()
