"""The output matrix of an untied and of a tied model: what is stored, who reads it, and who decides about it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.sources import hf
from attar.compression.calibration import hidden_states
from attar.compression.recipe.recipe import HEAD, Override, Recipe
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.compression.solvers.rounding import rtn
from attar.formats.packed import PackedTensor
from attar.formats.scheme import HEADS, Scheme
from attar.model.cache import ForwardBatch
from attar.progress import Progress
from tests.errors import user_error

EMBED = "model.embed_tokens"
IDS = torch.arange(3, 99, 4)
RECIPE = "rtn-w4g128"
SAME_WEIGHTS = 1e-5  # of the range of the logits, both in float32
ROUNDED_WEIGHTS = 5e-3  # the same, where transformers rounds the dequantized weights to the scales' bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@pytest.fixture(scope="module")
def tied(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tiny, tmp_path_factory.mktemp("tied") / "tied", {f"{HEAD}.weight": None}, tie_word_embeddings=True)


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tied: Path, tiny: Path) -> Path:
    return tied if request.param == "tied" else tiny


def variant(source: Path, folder: Path, changed: dict[str, Tensor | None], **config: object) -> Path:
    """A copy of a model with other tensors, those without a value left out, and another config."""
    tensors = {**load_file(source / "model.safetensors"), **changed}
    folder.mkdir()
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    merged = {**json.loads((source / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return folder


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def logits(folder: Path) -> Tensor:
    return hf.load(folder, torch.float32).forward(IDS, ForwardBatch((len(IDS),), len(IDS)))


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def dense_twin(source: Path, out: Path, folder: Path) -> Path:
    """The source with every compressed matrix replaced by the numbers that its stored form stands for."""
    checkpoint = hf.Checkpoint.open(out)
    names = [f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.q_proj", "self_attn.k_proj",
             "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
    dense: dict[str, Tensor | None] = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
    for name in (*names, HEAD):
        if checkpoint.scheme_of(name) is not None:
            weight = checkpoint.linear(name).weight
            assert isinstance(weight, PackedTensor)
            dense[f"{checkpoint.stored_linear(name)}.weight"] = weight.dequantize()
    return variant(source, folder, dense, dtype="float32", tie_word_embeddings=checkpoint.config.tied)


# What is stored


@pytest.mark.parametrize("head", [*HEADS, "w3g32-asym", "fp8-weight"])
def test_ledger_receipt_and_probes_include_the_head(head: str, source: Path, tmp_path: Path) -> None:
    done = compress(source, tmp_path / "out", recipe=RECIPE, head=head)
    file = TensorFile(tmp_path / "out" / "model.safetensors")
    checkpoint, is_tied = hf.Checkpoint.open(tmp_path / "out"), source.name == "tied"
    scheme = checkpoint.scheme_of(HEAD)
    module = checkpoint.stored_linear(HEAD)
    stored = {name: file.info(name).bytes for name in file.names() if name.startswith((EMBED, HEAD))}
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    if head == "bf16":
        assert scheme is None
        assert stored == {f"{m}.weight": 2 * 256 * 128 for m in ([EMBED] if is_tied else [EMBED, HEAD])}
    else:
        assert scheme is not None
        assert scheme.name == HEADS.get(head, head)
        assert module == (EMBED if is_tied else HEAD), "the one matrix of a tied model is its embedding"
        assert sum(size for name, size in stored.items() if name.startswith(module)) == scheme.bytes((256, 128))
        assert is_tied or stored[f"{EMBED}.weight"] == 2 * 256 * 128
    bits = weights = 0
    for record in done.records:
        found, shape = checkpoint.scheme_of(record.name), checkpoint.linear_shape(record.name)
        assert found is not None
        assert record.scheme == found.name
        bits, weights = bits + 8 * found.bytes(shape), weights + math.prod(shape)
    assert (HEAD in {record.name for record in done.records}) == (scheme is not None)
    seen = inspect(tmp_path / "out")
    assert done.bits_per_weight == bits / weights == pytest.approx(seen.bits_per_weight)
    assert sum(seen.schemes.values()) == len(done.records)
    assert seen.parameters == inspect(source).parameters
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["recipe"]["head"] == done.head == ("keep" if scheme is None else scheme.name)
    verdict = verify(tmp_path / "out")
    assert verdict.ok, verdict
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is is_tied


@pytest.mark.parametrize("search", ["minmax", "mse"])
@pytest.mark.parametrize("head", ["w8", "w4g32", "w3g32-asym", "fp8-weight"])
def test_rows_at_a_time_are_the_whole(
    head: str, search: str, source: Path, calibration: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are rounded at once: the stored parts are those of the whole matrix rounded at once."""
    monkeypatch.setattr(hidden_states, "HEAD_ROWS", 96)  # not a divisor of 256
    recipe = "gptq-w4g128" if search == "mse" else RECIPE
    assert load_recipe(recipe).rounding.scale_search == search
    compress(source, tmp_path / "out", recipe=recipe, head=head, calibration=calibration)
    table = load_file(source / "model.safetensors")[f"{EMBED if source.name == 'tied' else HEAD}.weight"]
    scheme = Scheme.parse(head).with_scale_dtype("bfloat16")
    expected = rtn.solve(table, scheme, scale_search=search)  # type: ignore[arg-type]
    found = hf.Checkpoint.open(tmp_path / "out").linear(HEAD).weight
    assert isinstance(found, PackedTensor)
    assert found.parts.keys() == expected.parts.keys()
    for part, tensor in expected.parts.items():
        assert torch.equal(found.parts[part].view(torch.uint8), tensor.view(torch.uint8)), part


def test_only_the_head_may_be_compressed(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE)
    only = Recipe(recipe.passes, recipe.scheme, (Override("model.layers.*", None),), head=Scheme.parse("w8"))
    done = compress(source, tmp_path / "out", recipe=only)
    assert [record.name for record in done.records] == [HEAD]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = before.keys() & after.keys()
    assert len(kept) == len(before) - 1
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert verify(tmp_path / "out").ok


def test_two_tables_stay_two(tiny: Path, tmp_path: Path) -> None:
    """Tied says the config, and the file has both, and different: what counts is the file, and the output says so."""
    source = variant(tiny, tmp_path / "both", {}, tie_word_embeddings=True)
    compress(source, tmp_path / "out", recipe=RECIPE, head="int8")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    compress(tiny, tmp_path / "expected", recipe=RECIPE, head="int8")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "expected"))


def test_a_table_that_is_stored_as_the_head(tied: Path, tmp_path: Path) -> None:
    """A tied model may store its one table as the output matrix: packed, it comes out as every other."""
    table = load_file(tied / "model.safetensors")[f"{EMBED}.weight"]
    other = variant(tied, tmp_path / "other", {f"{EMBED}.weight": None, f"{HEAD}.weight": table})
    for name, folder in (("a", tied), ("b", other)):
        compress(folder, tmp_path / name, recipe=RECIPE, head="int4")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# That it computes what is stored


@pytest.mark.parametrize("head", [*HEADS, "w3g32-asym", "fp8-weight"])
def test_both_ends_compute_what_is_stored(head: str, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out", recipe=RECIPE, head=head)
    twin = dense_twin(source, tmp_path / "out", tmp_path / "twin")
    assert difference(logits(tmp_path / "out"), logits(twin)) <= SAME_WEIGHTS


def test_positions_are_added_to_packed_rows(tmp_path: Path) -> None:
    """GPT-2 is tied and has learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).float().eval()
    model.save_pretrained(tmp_path / "gpt2")
    compress(tmp_path / "gpt2", tmp_path / "out", recipe="rtn-w8", head="int8")
    assert verify(tmp_path / "out").ok
    ids = IDS % 64
    step = ForwardBatch((len(ids),), len(ids))
    ours = hf.load(tmp_path / "out", torch.float32).forward(ids, step)
    with torch.no_grad():
        assert difference(ours, model(ids[None]).logits[0]) < 0.02


def theirs(folder: Path, **how: object) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model(IDS[None]).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("head", ["int8", "int4", "fp8-weight"])
def test_untied_heads_load_in_transformers(head: str, tiny: Path, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe=RECIPE, head=head)
    assert done.notes == ()
    assert difference(logits(tmp_path / "out"), theirs(tmp_path / "out")) <= SAME_WEIGHTS


DEQUANTIZE = CompressedTensorsConfig(dequantize=True)


@pytest.mark.parametrize("scheme", ["w4g128", "w4g32-asym"])
def test_tied_heads_of_the_one_scheme_load_dequantized_in_transformers(scheme: str, tied: Path, tmp_path: Path) -> None:
    done = compress(tied, tmp_path / "out", recipe=f"rtn-{scheme}", head=scheme)
    assert "CompressedTensorsConfig(dequantize=True)" in done.notes[0]
    assert done.notes[0] in (tmp_path / "out" / "README.md").read_text()
    expected = theirs(tmp_path / "out", quantization_config=DEQUANTIZE)
    assert difference(logits(tmp_path / "out"), expected) <= ROUNDED_WEIGHTS


@pytest.mark.parametrize("head", ["int8", "int4"])
def test_transformers_stops_at_packed_tied_heads(head: str, tied: Path, tmp_path: Path) -> None:
    """As the notes say: were it to go on with random weights, the one copy would be stored in the wrong place."""
    done = compress(tied, tmp_path / "out", recipe=RECIPE, head=head)
    assert "transformers 5.23 stops" in done.notes[0]
    with pytest.raises(AttributeError, match="weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_packed_zero_points_beside_another_scheme(tiny: Path, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe="rtn-w4g128-asym", head="int8")
    assert "no place for packed zero points" in done.notes[0]
    for how in ({}, {"quantization_config": DEQUANTIZE}):
        with pytest.raises(RuntimeError):
            theirs(tmp_path / "out", **how)


# Runs that were stopped


class Stop(Exception):
    pass


def stop_at(stage: str, done: int) -> Progress:
    def progress(now: str, at: int, total: int) -> None:
        if (now, at) == (stage, done):
            raise Stop

    return progress


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "HEAD_ROWS", 64)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("recipe", ["rtn-w4g32", "gptq-w4g32"])
def test_a_run_stopped_at_the_head_resumes_to_the_same_bytes(
    recipe: str, source: Path, calibration: list[list[int]], tmp_path: Path
) -> None:
    settings = {"recipe": recipe, "head": "int4", "calibration": calibration}
    compress_request(CompressionRequest(source, tmp_path / "whole", **settings))  # type: ignore[arg-type]
    for stage, done in (("blocks", 1), ("blocks", 3), ("LM head", 64), ("LM head", 256), ("copying", 1)):
        with pytest.raises(Stop):
            compress_request(CompressionRequest(source, tmp_path / "out", **settings), stop_at(stage, done))  # type: ignore[arg-type]
    with user_error("resume_mismatch"):
        compress_request(CompressionRequest(source, tmp_path / "out", **settings | {"head": "int8"}))  # type: ignore[arg-type]
    compress_request(CompressionRequest(source, tmp_path / "out", **settings))  # type: ignore[arg-type]
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


# Who decides


def yaml(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"recipe: {RECIPE}\n{text}")
    return path


@pytest.mark.parametrize(
    ("text", "head", "scheme"),
    [
        ("head: int8", None, "w8"),
        ("overrides: [{match: lm_head, scheme: w8}]", None, "w8"),
        ("keep: []", None, "w4g128"),
        ("head: int8", "int4", "w4g128"),
        ("head: int8", "bf16", None),
        ("overrides: [{match: lm_head, scheme: w8}]", "bf16", None),
        ("overrides: [{match: lm_head, scheme: keep}]", None, None),
        ("keep: [lm_head]", "w8", "w8"),
    ],
)
def test_the_recipe_decides_unless_the_caller_does(
    text: str, head: str | None, scheme: str | None, tied: Path, tmp_path: Path
) -> None:
    done = compress(tied, tmp_path / "out", recipe=yaml(tmp_path, text), head=head)
    found = hf.Checkpoint.open(tmp_path / "out").scheme_of(HEAD)
    assert (found.name if found else None) == scheme
    assert done.head == (scheme or "keep")


@pytest.mark.parametrize(
    ("recipe", "head", "sentence"),
    [
        (RECIPE, "int9", "scheme_unknown"),
        (RECIPE, "w4g96", "group_size_indivisible"),
        (RECIPE, "w8a8", "scheme_unsupported"),
        (RECIPE, "w4-tensor", "scheme_unsupported"),
    ],
)
def test_what_is_refused_before_any_work(recipe: str, head: str, sentence: str, source: Path, tmp_path: Path) -> None:
    with user_error(sentence):
        compress(source, tmp_path / "out", recipe=recipe, head=head)
    assert list(tmp_path.iterdir()) == []


def test_a_nan_names_the_head(tiny: Path, tmp_path: Path) -> None:
    table = load_file(tiny / "model.safetensors")[f"{HEAD}.weight"].clone()
    table[200, 7] = torch.nan
    source = variant(tiny, tmp_path / "bad", {f"{HEAD}.weight": table})
    with user_error("not_finite", "lm_head"):
        compress(source, tmp_path / "out", recipe=RECIPE, head="int8")
