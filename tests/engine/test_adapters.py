"""Adapters by row: each request computes with its own, beside others, and nobody's numbers depend on who is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.engine import startup
from attar.engine.engine import Engine
from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.model.split import Share
from attar.protocol.messages import Embed, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from tests.conftest import token_ids
from tests.engine.conftest import Answers, answers, make_engine, run
from tests.errors import user_error
from tests.model import test_families as families

SAME = 1e-4  # max |difference| / max |reference| against merged float32 weights
MOVES = 1e-2  # what an adapter must change, for the rest to mean anything
CONTEXT = 128
NAMES = ("tone", "style")

Shapes = Mapping[str, tuple[int, int]]


def save(folder: Path, shapes: Shapes, seed: int, rank: int = 4, rslora: bool = False) -> dict[str, Tensor]:
    """A PEFT folder that changes every linear of `shapes`; returns what each weight [O, I] gains."""
    numbers, tensors, gained = torch.Generator().manual_seed(seed), {}, {}
    for name, (rows, columns) in shapes.items():
        down = torch.randn(rank, columns, generator=numbers) / columns**0.5
        up = torch.randn(rows, rank, generator=numbers) * 0.2
        tensors |= {f"{lora.PREFIX}{name}{lora.DOWN}": down, f"{lora.PREFIX}{name}{lora.UP}": up}
        gained[name] = (6 / (rank**0.5 if rslora else rank)) * (up @ down)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "use_rslora": rslora, "target_modules": ["linear"]}
    (folder / lora.CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / lora.WEIGHTS)
    return gained


@pytest.mark.parametrize("case", ["llama3", "phi3", "gpt2", "qwen2-moe"])
def test_rows_with_an_adapter_are_those_of_merged_weights_and_others_of_the_base(case: str, tmp_path: Path) -> None:
    """Fused projections, transposed weights, experts (whose rows are gathered), the output matrix."""
    found = families.oracle(case)
    names = found.config.names
    model = found.decoder(store=dispatch.store("exact"))
    shapes = lora.shapes_of(model)
    tensors = dict(found.tensors)
    for name, gain in save(tmp_path / "adapter", shapes, 0).items():
        stored = next((at for at in names.spellings(f"{name}.weight") if at in tensors), None)
        if stored is None:  # an output matrix that is the embedding
            stored = f"{name}.weight"
            tensors[stored] = next(tensors[at] for at in names.spellings(f"{names.embed}.weight") if at in tensors)
        tensors[stored] = tensors[stored] + (gain.T if names.is_transposed(name) else gain)
    lora.install(model, 2, tmp_path / "adapter")
    ids, lengths = torch.cat(found.ids), tuple(len(each) for each in found.ids)
    mixed = model.forward(ids, ForwardBatch(lengths, max(lengths), model.cache(64, 2), (2, 0))).split(lengths)
    merged = found.decoder(tensors=tensors)
    wanted = merged.forward(found.ids[0], ForwardBatch(lengths[:1], max(lengths)))
    assert families.difference(mixed[0], wanted) <= SAME
    assert families.difference(found.logits[0], wanted) >= MOVES
    assert families.difference(mixed[1], found.logits[1]) <= SAME
    swapped = model.forward(ids, ForwardBatch(lengths, max(lengths), model.cache(64, 2), (0, 2))).split(lengths)
    assert families.difference(swapped[0], found.logits[0]) <= SAME


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters of all linears of `tiny`, of different rank."""
    shapes, at = lora.shapes_of(hf.load(tiny, torch.float32)), tmp_path_factory.mktemp("adapters")
    save(at / "tone", shapes, 1, rank=3)
    save(at / "style", shapes, 2, rank=20, rslora=True)
    return at / "tone", at / "style"


@pytest.fixture(scope="module")
def decoder(tiny: Path, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A compressed base in the native kernels' layout, with both."""
    store = dispatch.store("int8g32")
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    packed = tmp_path_factory.mktemp("packed") / "packed"
    compress(tiny, packed, recipe="rtn-w4g32")
    made = hf.load(packed, torch.float32, store=store)
    for number, folder in enumerate(folders, 1):
        lora.install(made, number, folder)
    return made


def adapted(decoder: Decoder, limits: SchedulerConfig | None = None) -> Engine:
    return make_engine(decoder, limits=limits, adapters=NAMES)


def asks() -> list[Submit | Embed]:
    """One prompt and variants of it, asked of the base and both adapters."""
    made: list[Submit | Embed] = []
    prompts = [tuple(ids) for ids in token_ids(3, 70)]
    for i, adapter in enumerate(("", "tone", "style", "tone", "", "style")):
        params = SamplingParams(max_tokens=9, temperature=0.0 if i % 2 else 0.8, seed=i, logprobs=2, ignore_eos=True)
        made.append(Submit(str(i), prompts[i % 2], params, adapter=adapter))
        made.append(Embed(f"e{i}", prompts[2], adapter=adapter))
    return made


def test_company_of_other_adapters_changes_no_bit(decoder: Decoder) -> None:
    alone: Answers = {}
    one = adapted(decoder, SchedulerConfig(max_step_tokens=200))
    for ask in asks():
        alone |= answers(run(one, [ask]))
        one.cache.flush()
    assert alone["e0", 0] != alone["e1", 0] != alone["e2", 0]
    assert answers(run(adapted(decoder), asks())) == alone
    assert answers(run(adapted(decoder, SchedulerConfig(max_step_tokens=7, max_running=3)), asks()[::-1])) == alone


def test_no_adapter_takes_what_another_has_cached(decoder: Decoder) -> None:
    made = adapted(decoder)
    prompt, params = tuple(token_ids(1, 100)[0]), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    reused = []
    for i, (adapter, cache_salt) in enumerate(
        [("", b""), ("tone", b""), ("style", b""), ("tone", b""), ("", b""), ("", b"\1\0\0\0"), ("tone", b"key")]
    ):
        ends = run(made, [Submit(str(i), prompt, params, cache_salt=cache_salt, adapter=adapter)])
        reused += [e.report.reused_tokens for e in ends if isinstance(e, Finished) and e.report is not None]
    assert [n > 0 for n in reused] == [False, False, False, True, True, False, False]


def test_only_steps_without_adapters_are_replayed(decoder: Decoder) -> None:
    made = adapted(decoder)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    run(made, [Submit("a", (1, 2, 3), params, adapter="tone")])
    assert made.runner.recordings is not None
    assert not made.runner.recordings.sizes
    run(made, [Submit("b", (1, 2, 3), params)])
    assert made.runner.recordings.sizes == [(1, 1)]


def test_an_adapter_that_is_not_there_is_refused(decoder: Decoder) -> None:
    (failed,) = run(adapted(decoder), [Submit("a", (1, 2), SamplingParams(), adapter="other")])
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == ("invalid", "the engine has no adapter 'other'")


def test_their_memory_is_counted(tiny: Path, folders: tuple[Path, Path]) -> None:
    model = hf.load(tiny, torch.float32, store=dispatch.store())
    rows, weights = 512, 0
    counted = lora.memory(folders, model.config, rows)
    for number, folder in enumerate(folders, 1):
        lora.install(model, number, folder)
        prepared = [linear.adapters[number] for linear in lora.linears_of(model)]
        weights += sum(each.down.weight.read_bytes + each.up.weight.read_bytes for each in prepared)  # type: ignore[union-attr]
    assert weights < counted <= weights + 10 * rows * 256 * 4  # 256 columns at most
    assert lora.memory([], model.config, rows) == 0


def test_their_memory_in_several_processes(tiny: Path, folders: tuple[Path, Path]) -> None:
    """Less in each, but for A of what is cut by outputs and B of what is cut by inputs."""
    config, rows = hf.load(tiny, torch.float32).config, 64
    alone = lora.memory(folders, config, rows)
    for share in (Share(0, 2, 1), Share(0, 1, 2)):
        assert alone / 2 < lora.memory(folders, config, rows, share) < 0.9 * alone


def test_an_adapter_that_does_not_fit_ends_the_start_before_a_weight_is_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "other", {"model.layers.0.mlp.up_proj": (8, 8)}, 0)
    monkeypatch.setattr(startup, "load_model", lambda *given, **more: pytest.fail("the model was loaded"))
    settings = Settings(str(tiny), "", adapters=(("other", str(tmp_path / "other")),))
    with user_error("adapter_mismatch"):
        startup.start_engine(settings)
