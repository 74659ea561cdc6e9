"""llama.cpp's logits of files of ours, and that what differs is how it rounds the rows of its products."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp_logits import PYTHON, as_f32, llama_cpp, logits, product_errors, rounded, rounding_tap

from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf import export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.export import describe
from attar.checkpoints.sources import opening
from attar.compression.runs.pipeline import compress
from attar.formats.codecs.ggml import TYPES
from attar.metrics.divergence import compare

IDS = [0, *(torch.arange(1, 96) * 37 % 4096).tolist()]
KL_OF_FLOATS = 1e-9  # nats, where neither side rounds: float32 sums in other orders
KL_OF_YARN = 1e-7  # the same of logits of a random model, which are large
KL_OF_ROWS = 1e-2  # where they round the rows of products to 8 bits
HALF_PRECISION = 2**-11  # the relative error of a scale in fp16
PRODUCT = 1e-6  # |ours - theirs| / |theirs| of the same rows, rounded alike


@pytest.fixture(scope="module")
def file(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of matrices beside which rows are rounded to Q8_0 and, the last, to Q8_K."""
    return compress(demo, tmp_path_factory.mktemp("made") / "out.gguf", recipe="q4_0").path


def test_the_same_values_give_the_same_logits_and_rows_rounded_alike_the_same_products(file: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    ours = logits(gguf_checkpoint.load(file, torch.float32), IDS)
    theirs = llama_cpp(as_f32(file), [IDS], "--exact-attention")
    found = compare(ours, theirs, torch.zeros(len(IDS), dtype=torch.int64))
    assert found.kl.mean() < KL_OF_FLOATS
    assert found.agree.all()
    products = file.with_suffix(".npz")
    llama_cpp(file, [IDS], "--products", str(products))
    errors = product_errors(GgufCheckpoint.open(file), products)
    assert errors["rounded"] < PRODUCT
    assert errors["floats"] > 1000 * PRODUCT  # so that it could fail


@pytest.mark.parametrize("recipe", ["rtn-q4_k", "rtn-w4g32"])
def test_a_folder_that_was_converted_is_read_alike(recipe: str, demo: Path, tmp_path: Path) -> None:
    """GGML's own blocks, and integers that became some."""
    if not PYTHON.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    compress(demo, tmp_path / "folder", recipe=recipe)
    file = convert(tmp_path / "folder", tmp_path / "out.gguf", to="gguf").path
    theirs = llama_cpp(file, [IDS])
    texts = torch.zeros(len(IDS), dtype=torch.int64)
    ours, original = (logits(opening.load(path, torch.float32), IDS) for path in (file, demo))
    found, far = (compare(each, theirs, texts).kl.mean() for each in (ours, original))
    assert found < KL_OF_ROWS
    assert found < far / 3  # what the weights lost, which is far more than how rows are read


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_betas_of_yarn_are_read_by_neither_side(
    family: str, yarn: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That each moves the angles here is seen by what a folder with it computes, which no file can hold."""
    if not PYTHON.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    source, texts = yarn(family), torch.zeros(len(IDS), dtype=torch.int64)
    plain = convert(source, tmp_path / "plain.gguf", to="gguf").path
    ours, theirs = logits(opening.load(plain, torch.float32), IDS), llama_cpp(plain, [IDS], "--exact-attention")
    assert compare(ours, theirs, texts).kl.mean() < KL_OF_YARN
    for key, value in (("beta_fast", 4.0), ("beta_slow", 0.25)):

        def with_beta(*asked: Any, key: str = key, value: float = value) -> Any:
            found, factors = describe(*asked)
            return found | {f"{found['general.architecture']}.rope.scaling.yarn_{key}": value}, factors

        with monkeypatch.context() as patch:
            patch.setattr(export, "describe", with_beta)
            file = convert(source, tmp_path / f"{key}.gguf", to="gguf").path
        assert torch.equal(llama_cpp(file, [IDS], "--exact-attention"), theirs)
        assert torch.equal(logits(opening.load(file, torch.float32), IDS), ours)
        config = json.loads((source / "config.json").read_text())
        config["rope_parameters"][key] = value
        other = tmp_path / key
        other.mkdir()
        (other / "config.json").write_text(json.dumps(config))
        shutil.copy(source / "model.safetensors", other)
        assert compare(logits(opening.load(other, torch.float32), IDS), theirs, texts).kl.mean() > 1e4 * KL_OF_YARN


@pytest.fixture
def yarn(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a random model of a family whose rope is YaRN, with transformers."""

    def make(family: str) -> Path:
        import transformers

        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
        config = getattr(transformers, f"{family}Config")(
            vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, rope_parameters=rope,
            tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            offset, scale = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
            parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "IQ4_NL", "Q4_K", "IQ4_XS"])
def test_rows_are_rounded_to_the_grid_of_their_block(name: str) -> None:
    block = 256 if TYPES[name].elements == 256 else 32
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 3, 512)
    x[1, :block] = 0
    found, blocks = rounded(x, TYPES[name]).view(3, -1, block), x.view(3, -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    assert (found[1, 0] == 0).all()
    step[1, 0] = 1
    codes = found / step
    assert ((codes - codes.round()).abs() <= 127 * HALF_PRECISION).all()
    assert ((found - blocks).abs() <= step * (0.5 + 127 * HALF_PRECISION)).all()


def test_rows_beside_plain_numbers_stay_or_are_refused() -> None:
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(x, TYPES["F32"]), x)
    with pytest.raises(ValueError, match="depends on the machine"):
        rounded(x, TYPES["F16"])


def test_the_tap_rounds_rows_once_for_all_that_read_them(file: Path) -> None:
    opened, model = GgufCheckpoint.open(file), gguf_checkpoint.load(file, torch.float32)
    linears = model.blocks[0].attention.qkv
    hook, rows = rounding_tap(opened), torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    once = rounded(rows, opened.kind_of(linears[0].name))
    for linear in linears:
        hook(linear, rows)
        assert torch.equal(rows, once)
