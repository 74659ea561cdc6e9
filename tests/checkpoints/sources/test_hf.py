"""A checkpoint as a source of weights: spellings, tied embeddings, dtypes, and what is missing or misshapen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from attar.checkpoints.folder import INDEX
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from tests.errors import user_error

LOGITS = 1e-5  # of the logit range, float32 against float32
CHARACTERS = 2000  # of the text that the trained model reads

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_plain_checkpoint(tiny: Any, tmp_path: Path) -> None:
    folder, seen = tiny.write(tmp_path), []
    decoder = hf.load(folder, progress=lambda done, total: seen.append((done, total)))
    assert decoder.dtype == torch.float32
    assert seen == [(1, 2), (2, 2)]
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


def test_shards_are_read(tiny: Any, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert tiny.difference(tiny.our_logits(tmp_path), tiny.their_logits()) <= LOGITS


def test_the_dtype_is_the_checkpoints_own_or_the_one_asked_for(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, {name: tensor.bfloat16() for name, tensor in tiny.tensors.items()})
    assert hf.Checkpoint.open(folder).dtype == torch.bfloat16
    decoder = hf.load(folder, torch.float32)
    assert decoder.dtype == torch.float32
    assert all(linear.weight.dtype == torch.float32 for block in decoder.blocks for linear in block.linears())
    assert hf.compute_dtype("bfloat16") == torch.bfloat16
    assert hf.compute_dtype("auto") is None
    with user_error("name_unknown"):
        hf.compute_dtype("bf16")


def test_names_as_stored(tiny: Any, tmp_path: Path) -> None:
    """A checkpoint saved from the inner model has no `model.` in front, and has no output matrix."""
    stripped = {name.removeprefix("model."): tensor for name, tensor in tiny.tensors.items() if name != HEAD}
    folder = tiny.write(tmp_path, stripped, tie_word_embeddings=True)
    checkpoint = hf.Checkpoint.open(folder)
    module = "model.layers.1.mlp.up_proj"
    assert checkpoint.stored_name(module) == "layers.1.mlp.up_proj"
    assert checkpoint.linear(module).name == module
    assert checkpoint.linear_shape(module) == (96, 64)
    assert checkpoint.scheme_of(module) is None
    assert torch.equal(checkpoint.linear(module).weight, tiny.tensors[f"{module}.weight"])
    tiny.model.lm_head.weight.data = tiny.tensors[EMBED]
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


def test_gpt2s_weights_are_turned(tiny: Any, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    checkpoint = hf.Checkpoint.open(tmp_path)
    assert checkpoint.linear_shape("transformer.h.0.attn.c_attn") == (144, 48)
    assert checkpoint.linear("transformer.h.0.attn.c_attn").weight.shape == (144, 48)
    assert tiny.difference(tiny.our_logits(tmp_path), tiny.their_logits(model)) <= LOGITS


# Tied embeddings


@pytest.mark.parametrize("stated", [True, None])
@pytest.mark.parametrize("kept", [EMBED, HEAD])
def test_one_table_serves_both_ends(kept: str, stated: bool | None, tiny: Any, tmp_path: Path) -> None:
    """Stored under either name; where config.json does not mention tying, the one table says it."""
    tiny.model.lm_head.weight.data = tiny.model.model.embed_tokens.weight.data
    tensors = {name: tensor for name, tensor in tiny.tensors.items() if name not in (EMBED, HEAD)}
    folder = tiny.write(tmp_path, {**tensors, kept: tiny.tensors[EMBED]}, tie_word_embeddings=stated)
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS
    decoder = hf.load(folder)
    assert decoder.head.weight is decoder.embedding.table


@pytest.mark.parametrize("same", [True, False])
def test_both_tables_although_tied_is_as_in_transformers(same: bool, tiny: Any, tmp_path: Path) -> None:
    tensors = tiny.tensors
    if same:
        tensors[HEAD] = tensors[EMBED].clone()
    folder = tiny.write(tmp_path, tensors, tie_word_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) == same
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits(theirs)) <= LOGITS


@pytest.mark.parametrize("gone", [EMBED, HEAD])
def test_an_untied_model_needs_both(gone: str, tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, {n: t for n, t in tiny.tensors.items() if n != gone}, tie_word_embeddings=False)
    with user_error("checkpoint_incomplete"):
        hf.Checkpoint.open(folder)


def test_a_trained_model_that_stores_only_its_output_matrix(stories: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    text = (stories.parent.parent / "data" / "text" / "tinystories.txt").read_text()[:CHARACTERS]
    ids = torch.tensor(tokenizer.encode(text).ids)[:512]
    theirs = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    ours = hf.load(stories).forward(ids, ForwardBatch((len(ids),), len(ids)))
    assert (ours - expected).abs().max() <= LOGITS * (expected.max() - expected.min())


@pytest.mark.parametrize("kept", [EMBED, HEAD])
def test_rows_of_the_embedding(kept: str, tiny: Any, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny.tensors.items() if name not in (EMBED, HEAD)}
    table = tiny.tensors[EMBED]
    checkpoint = hf.Checkpoint.open(tiny.write(tmp_path, {**tensors, kept: table}, tie_word_embeddings=True))
    rows = checkpoint.rows(torch.tensor([3, 9, 95]))
    assert torch.equal(rows.tensor(kept), table[[3, 9, 95]])
    assert rows.has(kept)
    norm = "model.norm.weight"
    assert torch.equal(rows.tensor(norm), tensors[norm])


# What is refused


def test_a_missing_tensor_is_named_with_the_files(tiny: Any, tmp_path: Path) -> None:
    tensors = tiny.tensors
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with user_error("checkpoint_incomplete", "model.layers.1.mlp.up_proj.weight", "model.safetensors"):
        hf.Checkpoint.open(tiny.write(tmp_path, tensors))


def test_a_missing_shard_is_named(tiny: Any, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()))[1]
    (tmp_path / shard).unlink()
    with user_error("checkpoint_incomplete"):
        hf.Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("model.layers.1.mlp.up_proj.weight", (95, 64), "checkpoint_mismatch"),
        ("model.layers.0.input_layernorm.weight", (63,), "checkpoint_mismatch"),
        ("model.layers.0.mlp.up_proj.weight", (96 * 64,), "checkpoint_mismatch"),
        (EMBED, (97, 64), "checkpoint_mismatch"),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], words: str, tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, {**tiny.tensors, name: torch.zeros(shape)})
    with user_error(words):
        hf.Checkpoint.open(folder)


def test_a_folder_without_the_first_block_says_what_was_looked_for(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, {f"encoder.{name}": tensor for name, tensor in tiny.tensors.items()})
    with user_error("checkpoint_incomplete", "model.layers.0.input_layernorm.weight", "layers.0"):
        hf.Checkpoint.open(folder)


PACKED = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("method", ["quark", "hqq", None])
def test_an_unknown_quantization_lists_the_known_ones(method: str | None, tiny: Any, tmp_path: Path) -> None:
    tensors = {**tiny.tensors, f"{PACKED}.weight_scale": torch.ones(1)}
    folder = tiny.write(tmp_path, tensors, quantization_config={"quant_method": method})
    with user_error("quantization_unsupported"):
        hf.Checkpoint.open(folder)


STALE: list[Any] = [
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "gptq", "bits": 5},
    {"quant_method": "quark"},
    {"quant_method": "compressed-tensors", "config_groups": {}},
    {},
    "none",
]


@pytest.mark.parametrize("settings", STALE)
def test_settings_of_a_quantization_that_no_tensor_has_are_not_used(
    settings: Any, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model merged back to 16 bits, say: it runs, and is compressed, like any other."""
    folder = tiny.write(tmp_path / "model", quantization_config=settings)
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS
    assert "quantization_config" in caplog.text
    compress(folder, tmp_path / "small", recipe="rtn-w8")
    found = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert found["quant_method"] == "compressed-tensors"
    compress(folder, tmp_path / "pruned", recipe="magnitude-s50")
    assert "quantization_config" not in json.loads((tmp_path / "pruned" / "config.json").read_text())


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_generation_config_that_holds_none_is_not_used(
    text: str, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.write(tmp_path, eos_token_id=7)
    (folder / "generation_config.json").write_text(text)
    assert hf.Checkpoint.open(folder).config.eos_ids == (7,)
    assert "generation_config.json" in caplog.text


# Dtypes that differ within a checkpoint


@pytest.mark.parametrize("store", [None, "exact", "int8g128"])
def test_linears_of_one_input_may_be_stored_in_different_dtypes(store: str | None, tiny: Any, tmp_path: Path) -> None:
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    stored = {name: tensor.to(kinds[i % 4]) for i, (name, tensor) in enumerate(tiny.tensors.items())}
    folder = tiny.write(tmp_path, stored)
    kernels = None if store is None else dispatch.store(store)
    if store is not None and kernels is None:
        pytest.skip("the native kernels are off or do not load")
    ours = hf.load(folder, torch.float32, store=kernels)
    logits = ours.forward(tiny.ids, ForwardBatch((len(tiny.ids),), len(tiny.ids)))
    assert tiny.difference(logits, tiny.their_logits()) <= 0.02


def test_the_widest_dtype_holds_all(tiny: Any, tmp_path: Path) -> None:
    bf16 = {name: tensor.bfloat16() for name, tensor in tiny.tensors.items()}
    norm = "model.norm.weight"
    for number, (dtype, widest) in enumerate(
        [(torch.bfloat16, torch.bfloat16), (torch.float32,) * 2, (torch.float64, torch.float32)]
    ):
        folder = tiny.write(tmp_path / str(number), {**bf16, norm: bf16[norm].to(dtype)})
        checkpoint = hf.Checkpoint.open(folder)
        assert (checkpoint.dtype, checkpoint.widest()) == (torch.bfloat16, widest)
    folder = tiny.write(tmp_path / "all", {name: tensor.double() for name, tensor in tiny.tensors.items()})
    assert hf.Checkpoint.open(folder).dtype == torch.float32


def test_quantized_tensors_without_a_config_say_so(tiny: Any, tmp_path: Path) -> None:
    tensors = tiny.tensors
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors.pop("model.layers.0.mlp.up_proj.weight").int()
    with user_error("checkpoint_incomplete", "config.json"):
        hf.Checkpoint.open(tiny.write(tmp_path, tensors))


def test_integers_without_scales_are_no_weights(tiny: Any, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = tiny.write(tmp_path, {**tiny.tensors, name: torch.zeros(96, 64, dtype=torch.int8)})
    with user_error("quantization_invalid"):
        hf.Checkpoint.open(folder)


def test_an_unknown_architecture_names_the_file_and_the_known_ones(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, architectures=["LlamaForCausalLLM"])
    with user_error("architecture_unsupported", "config.json"):
        hf.Checkpoint.open(folder)


def test_the_end_of_text_ids_are_the_generation_configs(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert hf.Checkpoint.open(folder).config.eos_ids == (5, 6)
