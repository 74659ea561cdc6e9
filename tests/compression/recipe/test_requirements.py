"""What cannot be is refused before anything is computed, and calibration text that says too little is warned about."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources import hf
from attar.compression.calibration import coverage, gradients, texts
from attar.compression.calibration.amount import Amount
from attar.compression.recipe.parser import PRESETS
from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.request.request import CompressionRequest, Target, parse_candidates
from attar.compression.request.resolve import open_source, resolve
from attar.compression.runs.pipeline import compress, compress_request
from attar.compression.search import allocate, best, bit_budget
from attar.compression.search.candidates import Listed
from attar.compression.training import tune
from attar.formats import affine
from attar.formats.codecs import ggml_mix
from attar.formats.observers import KL, MSE, MinMax, Percentile
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import WEIGHT_FORMATS
from attar.kernels import ops
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.compression.test_experts import write
from tests.conftest import token_ids
from tests.errors import user_error

Ids = list[list[int]]

NEAR = 1.0  # nats, of a model of random weights whose least good recipe here costs 0.5 and which a wrong scale ruins


class Begun(Exception):
    pass


def nothing_begins(stage: str, done: int, total: int) -> None:
    """A progress callback for whatever is to be refused before the first block, and before the first trial."""
    if stage in ("blocks", "recipes", "states", "gradients", "allocating"):
        raise Begun(stage)


def test_tuning_needs_two_sequences(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for recipe in ("rtn+tune-w4g32", "guided+tune-w4g32"):
        with user_error("calibration_too_short"):
            compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration[:1], progress=nothing_begins)


@pytest.mark.parametrize(
    "family, recipe, sequences, sentence",
    [
        ("Llama", "rtn-w4g32,guided+tune-w4g32", 2, "calibration_too_short"),  # one is for the selection
        ("Mixtral", "gptq-w4g32,guided-w4g32", 8, "architecture_unsupported"),
        ("Mixtral", "gptq-w4g32,gptq-w4g48", 8, "group_size_indivisible"),
    ],
)
def test_what_one_of_several_recipes_cannot_do_is_said_before_the_first(
    family: str, recipe: str, sequences: int, sentence: str, tiny: Path, tmp_path: Path
) -> None:
    source = tiny if family == "Llama" else write(family, tmp_path / "source")
    ids = token_ids(sequences, 16, vocab=96)
    with user_error(sentence):
        compress(source, tmp_path / "out", recipe=recipe, calibration=ids, progress=nothing_begins)


def test_the_original_is_not_in_memory_while_a_recipe_is_made(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    loaded: list[weakref.ref[Decoder]] = []

    def base() -> Decoder:
        found = hf.load(tiny, torch.float32)
        loaded.append(weakref.ref(found))
        return found

    def run(name: str, ids: Ids, out: Path) -> float:
        assert not any(each() for each in loaded)
        return compress_request(CompressionRequest(tiny, out, recipe=name, overwrite=True)).bits_per_weight

    chosen = best.choose(
        Listed(("rtn-w8", "rtn-w4")), torch.tensor(calibration), base, run, tmp_path, lambda *told: None
    )
    assert chosen.winner == "rtn-w8"
    assert len(loaded) == 2


def odd(folder: Path) -> Path:
    """A Llama whose columns, 80 and 112, are multiples of 16 and of nothing larger."""
    hidden, wide, heads = 80, 112, 5
    numbers = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden), "mlp.up_proj": (wide, hidden)}
    shapes |= {"self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{norm}.weight"] = torch.ones(hidden)
    for end in ("model.embed_tokens", "lm_head"):
        tensors[f"{end}.weight"] = torch.randn(96, hidden, generator=numbers)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 96,
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": wide, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def every_scheme() -> Iterator[tuple[str, str]]:
    """Every form by name, grids of every width and kind, and mixes: with the output's name."""
    grids = ("w2g32", "w3g128", "w4g48", "w4g128", "w4g128-asym", "w5g64", "w8", "w8a8", "w8a8-static", "w4a4", "w4a8")
    alike = ("lut4-s5", "lut4-s45", "lut3", "lut3-s5", "lut2", "lut2-s5", "nf4-single")  # slow, and others go before
    for name in (*grids, "w4g32", "fp8", "fp8-e5m2", *WEIGHT_FORMATS, *PRESETS):
        if name not in alike:
            yield name, "out"
    for name in ggml_mix.MIXES:
        yield name, "out.gguf"


@pytest.mark.parametrize("scheme, out", list(every_scheme()))
def test_every_scheme_fits_or_is_refused_before_the_first_block(
    scheme: str, out: str, odd_model: Path, tmp_path: Path
) -> None:
    """By the linear's name, where the shapes are why."""
    method = "magnitude-2:4" if scheme == "sparse24" else "rtn"  # which nothing else makes of any weights
    recipe = scheme if out.endswith("gguf") else f"{method}-{scheme}"
    begun: list[str] = []
    refusal = ""
    try:
        compress(
            odd_model, tmp_path / out, recipe=recipe, calibration=token_ids(4, 16, vocab=96),
            progress=lambda stage, done, total: begun.append(stage),
        )  # fmt: skip
    except ValueError as error:
        refusal = str(error)
    assert bool(refusal) != ("blocks" in begun), refusal
    assert not refusal or "model.layers.0." in refusal or "has no place" in refusal, refusal


@pytest.mark.parametrize(
    "recipe", ["hqq-fp8", "autoround-fp8", "gptq-sparse24", "autoround-nf4", "squeezellm-w4g16", "guided-lut4"]
)
def test_what_a_method_cannot_round_to_is_refused_before_the_first_block(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    with user_error("scheme_unsupported", "model.layers.0.self_attn.q_proj"):
        compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, progress=nothing_begins)


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd(tmp_path_factory.mktemp("models") / "odd")


def test_words_for_the_output_matrix_hold_in_files_too(tiny: Path, tmp_path: Path) -> None:
    for word, kind in (("int8", "Q8_0"), ("int4", "Q4_0"), ("q6_k", "Q8_0")):  # rows of 128 are no blocks of 256
        if word == "q6_k":
            with user_error("group_size_indivisible", "lm_head"):
                compress(tiny, tmp_path / "no.gguf", recipe="q5_0", head=word)
            continue
        compress(tiny, tmp_path / f"{word}.gguf", recipe="q5_0", head=word)
        assert GgufFile(tmp_path / f"{word}.gguf").info("output.weight").kind.name == kind
    with user_error("gguf_inexpressible"):
        compress(tiny, tmp_path / "no.gguf", recipe="q5_0", head="w8")


def test_gradients_and_hints_are_asked_for_before_they_are_made(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("attar.compression.runs.run.require_free", lambda path, needed: asked.append(needed))
    for recipe in ("qronos-w4g32", "guided-w4g32"):
        with pytest.raises(Begun):
            compress(tiny, tmp_path / recipe, recipe=recipe, calibration=calibration, progress=nothing_begins)
    plain, guided = asked
    outputs = 3 * 4 * (4 * 128**2 - 2 * 64 * (128 + 64) + 2 * 256**2 + 128**2)  # [O, O] of every linear, float32
    assert guided >= plain + outputs
    assert guided >= 4 * (3 + 2) * 128 * 8 * 32 + outputs


def test_what_a_killed_pass_left_is_room_for_the_next(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ids = hf.Checkpoint.open(tiny), torch.tensor(token_ids(4, 32))
    size = 4 * (3 + 2) * ids.numel() * 128
    for i in range(3 + 2):
        (tmp_path / f"gradient-{i}.f32").write_bytes(b"\0" * (size // 5))

    class Usage:
        free = 0

    monkeypatch.setattr("attar.checkpoints.writer.shutil.disk_usage", lambda path: Usage)
    gradients.walk(source, ids, tmp_path, lambda layer, block: {})


def test_errors_from_before_tuning_are_called_so(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe="rtn+tune-w4g32", head="int8", calibration=calibration)
    measures = {record.name == "lm_head": record.measure for record in done.records}
    assert measures == {False: "weight, before tuning", True: "weight"}


def test_what_allocation_measures_on_is_not_what_tuning_judges_by(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Ids] = []

    def stop(decoder: Decoder, recipe: object, target: object, ids: tuple[torch.Tensor, ...], *rest: object) -> None:
        seen.append(ids[0].tolist())
        raise Begun

    monkeypatch.setattr("attar.compression.search.bit_budget.Allocator", stop)
    for recipe in ("rtn-w4g32", "rtn+tune-w4g32"):
        with pytest.raises(Begun):
            compress(
                tiny,
                tmp_path / "out",
                recipe=recipe,
                target=Target(bits=4, candidates=parse_candidates("w2g32,w8g32")),
                calibration=calibration,
            )
    rest = calibration[:-2]  # the last are measured on
    judges = tune.aside(torch.tensor(rest))
    assert judges
    assert seen == [rest, [row for i, row in enumerate(rest) if i not in judges]]


def test_what_allocation_measures_on_calibrates_nothing(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it tune, or weigh importances: what is made is what those sequences were never part of."""
    with user_error("calibration_too_short"):
        compress(tiny, tmp_path / "no", recipe="gptq-w4g32", target=Target(bits=4), calibration=calibration[:1])
    target = Target(bits=4, candidates=parse_candidates("w2g32,w8g32"))
    request = CompressionRequest(tiny, tmp_path / "found", target=target, calibration=calibration, resume=False)
    resolved = resolve(request, open_source(request), "rtn-w4g32", len(calibration), targeted=True).with_texts()
    found = bit_budget.for_output(resolved, lambda *told: None)
    assert (found.read.tolist(), found.calibration) == (calibration, calibration[:-2])
    found.forget()
    monkeypatch.setattr(allocate, "ROUNDS", 1)
    made = {}
    for name, ids in (("all", calibration), ("less", calibration[:-2])):
        if name == "less":
            monkeypatch.setattr(bit_budget, "apart", lambda given: (given, torch.tensor(calibration[-2:])))
        compress(
            tiny,
            tmp_path / name,
            recipe="gptq-w4g32",
            target=Target(bits=4, candidates=parse_candidates("w2g32,w8g32")),
            calibration=ids,
        )
        made[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert made["all"] == made["less"]
    receipt = json.loads((tmp_path / "all" / "receipt.json").read_text())
    hashes = [texts.token_hash(torch.tensor(each)) for each in (calibration[:-2], calibration[-2:])]
    assert [receipt["calibration"], receipt["allocation"]["selection"]] == hashes


def test_what_needs_the_original_beside_it_asks_for_room(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of 8 sequences of 32 tokens more, for the states that the original model sees."""
    asked: list[int] = []
    monkeypatch.setattr("attar.compression.runs.run.require_free", lambda path, needed: asked.append(needed))
    monkeypatch.setattr("attar.compression.outputs.folder.FolderOutput.written", lambda self, done: 1 / 0)
    for correct in (True, False):
        plan = recipe_from_dict({"recipe": "autoround-w4g32", "correct": correct})
        with pytest.raises(ZeroDivisionError):
            compress(tiny, tmp_path / str(correct), recipe=plan, calibration=calibration)
    assert asked[0] - asked[1] == 2 * 4 * 128 * 8 * 32


@pytest.mark.parametrize("layer", [1, 2])
def test_text_that_says_too_little_is_warned_about_with_figures(layer: int, tiny: Path, tmp_path: Path) -> None:
    """Of the last block too, behind which nothing is calibrated."""
    ids = texts.sample_from(hf.load(tiny, torch.float32), Amount(16, 32, 0)).tolist()
    assert compress(tiny, tmp_path / "enough", recipe="gptq-w4g32", calibration=ids).warnings == ()
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tiny / "config.json").read_bytes())
    tensors = load_file(tiny / "model.safetensors")
    tensors[f"model.layers.{layer}.input_layernorm.weight"][5:8] = 0
    save_file(tensors, source / "model.safetensors")
    few, unseen, *_ = compress(source, tmp_path / "out", recipe="gptq-w4g32", calibration=ids[:4]).warnings
    assert "128 tokens and the widest linear 256 input columns" in few
    # of three blocks: what q, o, gate and down read
    assert "3 of 1,920 input channels were zero" in unseen
    assert f"model.layers.{layer}.self_attn.q_proj (2.3%)" in unseen
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["warnings"][:2] == [few, unseen]


def test_experts_without_a_token_are_counted_and_rounded_all_the_same(tmp_path: Path) -> None:
    """One token, everywhere: every position computes the same, so that two of four experts see it."""
    source = write("Qwen3Moe", tmp_path / "source")
    done = compress(source, tmp_path / "out", recipe="gptq-w4g32", calibration=[[5] * 24] * 8)
    blind = [record.name for record in done.records if record.measure == "weight"]
    assert len(blind) == 2 * 2 * 3
    assert all(".experts." in name for name in blind)
    assert any(each.startswith("4 of 8 experts were sent no calibration token") for each in done.warnings)


IDLE = (
    "awq-w4g32", "clip+gptq-w4g32", "smoothquant+rtn-w8a8", "autoround-w4g32", "wanda-s50", "squeezellm-lut4",
    "smoothattention-w4g32", "smoothquant+gptq-w8a8-static",
)  # fmt: skip


@pytest.mark.parametrize("recipe", IDLE)
def test_an_expert_without_a_token_stops_no_method(recipe: str, tmp_path: Path) -> None:
    """It is stored by its weights alone, and the model is still near the original where it is routed to."""
    source = write("Qwen3Moe", tmp_path / "source")
    done = compress(source, tmp_path / "out", recipe=recipe, calibration=[[5] * 24] * 2)
    assert any("of 8 experts were sent no calibration token" in each for each in done.warnings)
    assert len([record for record in done.records if ".experts." in record.name]) == 2 * 4 * 3
    found, wanted = (
        hf.load(folder, torch.float32).forward(torch.arange(24), ForwardBatch((24,), 24)).log_softmax(-1)
        for folder in (tmp_path / "out", source)
    )
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    assert divergence < NEAR


def test_a_static_scale_that_nothing_was_seen_of_is_that_of_the_other_experts(tmp_path: Path) -> None:
    source = write("Qwen3Moe", tmp_path / "source")
    compress(source, tmp_path / "out", recipe="rtn-w8a8-static", calibration=[[5] * 24] * 2)
    scales = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        down = [float(scales[f"{at}.{e}.down_proj.input_scale"]) for e in range(4)]
        assert min(down) > max(down) / 1000, "the smallest of a float, where nothing was seen"
        assert down.count(max(down)) == 3, "two idle ones take the largest"


def test_a_resumed_run_warns_of_what_the_killed_one_saw(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    found = coverage.Coverage(hf.load(tiny, torch.float32).blocks[0])
    coverage.keep(tmp_path, "one", 1, found)
    assert coverage.kept(tmp_path, "one", 3) == [found.to_dict()]
    assert coverage.kept(tmp_path, "another", 3) == [], "of a run that is about something else"
    assert [path.name for path in tmp_path.iterdir()] == ["coverage-one-1.json"]
    idle = {"channels": {}, "idle": ["a", "b"], "experts": 8}
    (told,) = coverage.warnings(100, 10, [idle, idle])
    assert told.startswith("4 of 16 experts were sent no calibration token")
    assert list(coverage.warnings(100, 10, [found.to_dict()])) == []


@pytest.mark.parametrize("recipe", ["clip-nf4", "clip-lut4"])
def test_clip_needs_a_grid(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("recipe_without_effect"):
        compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, progress=nothing_begins)


@pytest.mark.parametrize(
    "recipe, word, sentence",
    [
        ("rtn-w8a8", "mse", "recipe_without_effect"),
        ("rtn-nvfp4", "kl", "scheme_unsupported"),
        ("rtn-w8a8-static", "largest", "method_option_invalid"),
    ],
)
def test_a_range_is_of_scales_that_are_fixed(
    recipe: str, word: str, sentence: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(f"recipe: {recipe}\nactivation_range: {word}\n")
    with user_error(sentence):
        compress(
            tiny, tmp_path / "out", recipe=tmp_path / "r.yaml", calibration=calibration, progress=nothing_begins
        )  # fmt: skip


@pytest.mark.parametrize("word", ["minmax", "average", "percentile", "mse", "kl"])
def test_fixed_scales_are_those_of_the_observer(word: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Of what q, k and v of the first block read, which nothing before has changed; batch by batch."""
    plan = recipe_from_dict({"recipe": "rtn-w8a8-static", "activation_range": word})
    compress(tiny, tmp_path / "out", recipe=plan, calibration=calibration)
    decoder, grid = hf.load(tiny, torch.float32), Scheme.parse("w8a8-static").activation
    assert isinstance(grid, Grid)
    known = {
        "minmax": MinMax(), "average": MinMax(momentum=0.1), "percentile": Percentile(99.99), "mse": MSE(grid),
        "kl": KL(8),
    }[word]  # fmt: skip
    rows = decoder.embedding.forward(torch.tensor(calibration).flatten(), torch.arange(32).repeat(8)).float()
    known.observe(ops.norm(rows, None, decoder.blocks[0].attention_norm)[1])
    found = load_file(tmp_path / "out" / "model.safetensors")
    largest = torch.stack([end.abs() for end in known.range()]).amax(0)
    for name in ("q_proj", "k_proj", "v_proj"):
        scale = found[f"model.layers.0.self_attn.{name}.input_scale"]
        torch.testing.assert_close(scale.float().reshape(1), affine.fixed_scale(largest, grid))
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["recipe"].get("activation_range", "minmax") == word


@pytest.mark.parametrize("recipe", ["smoothattention-w4g16", "smoothattention+gptq-w4g16"])
def test_heads_that_no_search_takes_are_refused_before_the_first_block(
    recipe: str, odd_model: Path, tmp_path: Path
) -> None:
    """Heads of 20 columns, of which the search gives bits to 8 at a time; as published it takes any."""
    source, ids = tmp_path / "source", token_ids(4, 16, vocab=96)
    shutil.copytree(odd_model, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": 4}))
    with user_error("group_size_indivisible", "model.layers.0.self_attn.q_proj"):
        compress(source, tmp_path / "out", recipe=recipe, calibration=ids, progress=nothing_begins)
    plan = recipe_from_dict({"recipe": recipe, "key_alpha": 0.5})
    assert compress(source, tmp_path / "out", recipe=plan, calibration=ids).recipe == recipe


def test_a_list_of_recipes_goes_with_no_target(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    target = Target(bits=3.5)
    with user_error("option_conflict"):
        compress(
            tiny, tmp_path / "out", recipe="rtn-w4g32,gptq-w4g32", target=target, calibration=calibration,
            progress=nothing_begins,
        )  # fmt: skip


def test_a_list_of_recipes_goes_with_no_importance_matrix(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Said before the matrix is read, or the model looked for."""
    with user_error("option_conflict"):
        compress_request(
            CompressionRequest(
                tmp_path / "none",
                tmp_path / "out.gguf",
                recipe="best-q4_k",
                imatrix=tmp_path / "none.dat",
                calibration=calibration,
            ),
            nothing_begins,
        )


@pytest.mark.parametrize(
    "recipe, head, sentence",
    [
        ("rtn-sparse24", None, "sparsity_invalid"),
        ("awq-sparse24-w4g32", None, "sparsity_invalid"),
        ("rtn-w4g32", "sparse24", "sparsity_invalid"),
        ("magnitude-2:4-sparse24", "sparse24", "sparsity_invalid"),
    ],
)
def test_sparse_storage_needs_sparse_weights(
    recipe: str, head: str | None, sentence: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    with user_error(sentence):
        compress(
            tiny, tmp_path / "out", recipe=recipe, head=head, calibration=calibration, progress=nothing_begins
        )  # fmt: skip


def test_weights_that_are_sparse_already_are_stored_so(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "pruned", recipe="magnitude-2:4")
    with pytest.raises(Begun):
        compress(tmp_path / "pruned", tmp_path / "out", recipe="rtn-sparse24", progress=nothing_begins)


def test_a_head_has_one_level(tiny: Path, tmp_path: Path) -> None:
    with user_error("scheme_unsupported"):
        compress(tiny, tmp_path / "out", recipe="rtn-w4g32", head="qserve-g32", progress=nothing_begins)
