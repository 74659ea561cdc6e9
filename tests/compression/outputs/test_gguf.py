"""GGUF files that come out of the walk: what they hold, that they are resumed and verified, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf, imatrix, opening
from attar.compression.calibration import importance
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.formats.codecs import ggml_blocks, ggml_round, ggml_search
from attar.formats.codecs.ggml import TYPES
from attar.model.cache import ForwardBatch
from attar.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.errors import user_error

Ids = list[list[int]]


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    return opening.load(path, torch.float32).forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Stop(Exception):
    pass


def stop_after(blocks: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "blocks" and done == blocks:
            raise Stop

    return progress


@pytest.mark.parametrize("recipe", ["f32", "bf16"])
def test_a_file_of_plain_numbers_is_the_very_model(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out.gguf", recipe=recipe)
    assert done.bits_per_weight == {"f32": 32, "bf16": 16}[recipe]
    assert torch.equal(logits(tmp_path / "out.gguf", calibration[0]), logits(tiny, calibration[0]))
    assert done.bytes == (tmp_path / "out.gguf").stat().st_size
    assert verify(tmp_path / "out.gguf").ok


@pytest.mark.parametrize("recipe", ["q4_0", "q5_1", "q8_0", "iq4_nl", "rtn-q5_0"])
def test_matrices_hold_what_their_types_make_of_them(recipe: str, tiny: Path, tmp_path: Path) -> None:
    """Every value, through our names and the order of rows, of blocks and of both ends."""
    compress(tiny, tmp_path / "out.gguf", recipe=recipe)
    file = GgufCheckpoint.open(tmp_path / "out.gguf", torch.float32)
    source = load_file(tiny / "model.safetensors")
    kind = TYPES[recipe.removeprefix("rtn-").upper()]
    for name, values in source.items():
        wanted = kind if "layers" in name or name == "model.embed_tokens.weight" else TYPES["Q8_0"]
        if values.ndim == 1:
            assert torch.equal(file.tensor(name), values.float())
            continue
        assert file.kind_of(name.removesuffix(".weight")) is wanted
        encode = ggml_round if wanted.name in ggml_round.ROUNDED else ggml_search
        assert torch.equal(file.tensor(name), ggml_blocks.decode(wanted, encode.encode(wanted, values)))
    verdict = verify(tmp_path / "out.gguf")
    assert verdict.ok, verdict.sentence


def test_the_embedded_model_becomes_a_mix_that_runs(demo: Path, tmp_path: Path) -> None:
    """Tied, with a tokenizer: what the receipt's probes, the loader and the tokenizer say of one file."""
    done = compress(demo, tmp_path / "out.gguf", recipe="Q3_K_M")
    assert done.recipe == "q3_k_m"
    file = GgufFile(tmp_path / "out.gguf")
    assert "output.weight" not in file
    kinds = {name: file.info(f"blk.0.{name}.weight").kind.name for name in ("attn_q", "attn_v", "ffn_down")}
    assert kinds == {"attn_q": "Q3_K", "attn_v": "Q5_K", "ffn_down": "Q4_K"}
    assert file.info("token_embd.weight").kind.name == "Q6_K"
    assert file.metadata["general.file_type"] == 12
    assert verify(tmp_path / "out.gguf").ok
    stored = json.loads((tmp_path / "out.gguf.receipt.json").read_text())
    assert stored["files"].keys() == {"out.gguf"}
    assert {layer["scheme"] for layer in stored["layers"]} == {"q3_k", "q4_k", "q5_k", "q6_k"}
    bits = {each["name"]: TYPES[each["scheme"].upper()].bits_per_weight for each in stored["layers"]}
    checkpoint = hf.Checkpoint.open(demo)
    weights = {name: math.prod(checkpoint.linear_shape(name)) for name in bits if name != "lm_head"}
    weights["lm_head"] = 4096 * 256
    assert done.bits_per_weight == pytest.approx(sum(bits[n] * w for n, w in weights.items()) / sum(weights.values()))
    from attar.checkpoints.vocabulary import tokenizer

    text = "Once upon a time, there were 12 of them."
    assert tokenizer(tmp_path / "out.gguf").encode(text) == Tokenizer.load(demo).encode(text)


@pytest.mark.parametrize("recipe", ["q4_0", "gptq-q8_0"])
def test_a_stopped_run_resumes_to_the_same_bytes(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "whole" / "out.gguf", recipe=recipe, calibration=calibration)
    out = tmp_path / "out.gguf"
    for blocks in (0, 1, 3):
        with pytest.raises(Stop):
            compress(tiny, out, recipe=recipe, calibration=calibration, progress=stop_after(blocks))
        assert not out.exists()
    seen: list[int] = []
    compress(
        tiny, out, recipe=recipe, calibration=calibration,
        progress=lambda stage, done, total: seen.append(done) if stage == "blocks" else None,
    )  # fmt: skip
    assert seen == [3], "all blocks were done already"
    assert digest(out) == digest(tmp_path / "whole" / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "out.gguf.receipt.json", "whole"]


def test_importances_weigh_errors_whether_given_or_measured(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    importance.make(tiny, tmp_path / "m.gguf", calibration=calibration)
    compress_request(CompressionRequest(tiny, tmp_path / "given.gguf", recipe="iq4_nl", imatrix=tmp_path / "m.gguf"))
    compress(tiny, tmp_path / "measured.gguf", recipe="iq4_nl", calibration=calibration)
    compress(tiny, tmp_path / "plain.gguf", recipe="iq4_nl")
    assert digest(tmp_path / "given.gguf") == digest(tmp_path / "measured.gguf") != digest(tmp_path / "plain.gguf")
    weighs = importance.known(tmp_path / "m.gguf", hf.Checkpoint.open(tiny))["model.layers.1.mlp.down_proj"]
    weight = load_file(tiny / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float()

    def damage(name: str) -> float:
        found = GgufCheckpoint.open(tmp_path / name, torch.float32).tensor("model.layers.1.mlp.down_proj.weight")
        return float(((found - weight).square() * weighs).sum())

    assert damage("given.gguf") < damage("plain.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gptq-iq4_nl", "guided-iq4_nl"])
def test_solvers_search_scales_by_the_matrix_that_is_given(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """Columns count by the matrix, whatever the calibration text says; one of that very text changes nothing."""
    importance.make(tiny, tmp_path / "m.gguf", calibration=calibration[:4])
    found = imatrix.read(tmp_path / "m.gguf")
    numbers = torch.Generator().manual_seed(0)
    means = {name: torch.rand(len(mean), generator=numbers) ** 4 + 1e-6 for name, mean in found.means.items()}
    imatrix.write(tmp_path / "other.gguf", replace(found, means=means))
    for name, matrix in (("measured", None), ("given", "m.gguf"), ("other", "other.gguf")):
        compress_request(
            CompressionRequest(
                tiny,
                tmp_path / f"{name}.out.gguf",
                recipe=recipe,
                calibration=calibration[:4],
                imatrix=None if matrix is None else tmp_path / matrix,
            )
        )
    assert digest(tmp_path / "given.out.gguf") == digest(tmp_path / "measured.out.gguf")
    given, other = (GgufFile(tmp_path / f"{name}.out.gguf") for name in ("given", "other"))
    blocks = [name for name in given.names() if name.startswith("blk.") and "norm" not in name]
    assert len(blocks) == 21
    assert not any(torch.equal(given.read(name), other.read(name)) for name in blocks)
    if recipe == "gptq-iq4_nl":  # of others the weights to round are not those of the model
        weight = load_file(tiny / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float()
        mean = means["blk.1.ffn_down.weight"]
        kind, raw = TYPES["IQ4_NL"], other.read("blk.1.ffn_down.weight").view(-1, TYPES["IQ4_NL"].block_bytes)
        searched = ggml_search.encode(kind, weight, mean).view(-1, kind.block_bytes)
        assert torch.equal(ggml_blocks.unpack(kind, raw).d, ggml_blocks.unpack(kind, searched).d)


def test_overrides_and_kept_matrices(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: q4_0\nhead: bf16\noverrides:\n"
        "  - {match: '*.v_proj', scheme: q8_0}\n  - {match: 'model.layers.2.*', scheme: keep}\n"
    )
    compress(tiny, tmp_path / "out.gguf", recipe=recipe)
    file = GgufFile(tmp_path / "out.gguf")
    kinds = {name: file.info(f"{name}.weight").kind.name for name in ("blk.0.attn_v", "blk.0.attn_q", "output")}
    assert kinds == {"blk.0.attn_v": "Q8_0", "blk.0.attn_q": "Q4_0", "output": "BF16"}
    assert file.info("blk.2.ffn_up.weight").kind.name == "BF16"
    assert verify(tmp_path / "out.gguf").ok


@pytest.mark.parametrize(
    "text, head, output, file_type",
    [
        ("recipe: iq4_xs", "iq4_xs", "Q8_0", 30),
        ("recipe: iq4_xs\noverrides: [{match: lm_head, scheme: keep}]", "keep", "BF16", 25),
        ("recipe: iq4_xs\noverrides: [{match: 'model.layers.*', scheme: keep}]", "iq4_xs", "Q8_0", 32),
        ("recipe: q4_0\nhead: int8", "q8_0", "Q8_0", 2),
        ("recipe: q4_0\nhead: int4", "q4_0", "Q4_0", 2),
        ("recipe: q4_0\noverrides: [{match: '*.mlp.*', scheme: q5_0}, {match: '*.q_proj', scheme: q5_0}]", "q4_0",
         "Q8_0", 8),
    ],
)  # fmt: skip
def test_what_is_said_of_a_file_is_what_it_holds(
    text: str, head: str, output: str, file_type: int, tiny: Path, tmp_path: Path
) -> None:
    """Of the output matrix, and of the most matrices, where they are not all as the mix would have them."""
    (tmp_path / "recipe.yaml").write_text(text)
    done = compress(tiny, tmp_path / "out.gguf", recipe=tmp_path / "recipe.yaml")
    file = GgufFile(tmp_path / "out.gguf")
    assert file.info("output.weight").kind.name == output
    assert file.metadata["general.file_type"] == file_type
    stored = json.loads((tmp_path / "out.gguf.receipt.json").read_text())
    assert done.head == done.to_dict()["head"] == stored["recipe"]["head"] == head


def test_a_mix_with_another_output_matrix_is_still_that_mix(demo: Path, tmp_path: Path) -> None:
    for recipe, file_type in (("rtn-q4_k_s", 14), ("rtn-q3_k_l", 13)):
        compress(demo, tmp_path / f"{recipe}.gguf", recipe=recipe, head="int8")
        assert GgufFile(tmp_path / f"{recipe}.gguf").metadata["general.file_type"] == file_type


@pytest.mark.parametrize("word", ["bf16", "int8", "int4"])
def test_a_word_for_the_head_means_the_same_in_a_recipe_and_beside_it(word: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"recipe: q5_0\nhead: {word}")
    compress(tiny, tmp_path / "one.gguf", recipe=tmp_path / "recipe.yaml")
    compress(tiny, tmp_path / "two.gguf", recipe="q5_0", head=word)
    files = [GgufFile(tmp_path / name) for name in ("one.gguf", "two.gguf")]
    assert all(torch.equal(*(file.read(name) for file in files)) for name in files[0].names())
    receipts = [json.loads((tmp_path / f"{name}.gguf.receipt.json").read_text()) for name in ("one", "two")]
    assert receipts[0]["recipe"] == receipts[1]["recipe"]


def test_a_file_in_which_nothing_is_compressed_is_refused_unless_it_is_rotated(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for name, kept in (("out", "rtn-w4g32"), ("out.gguf", "q4_0")):
        recipe.write_text(f"recipe: {kept}\noverrides: [{{match: '*', scheme: keep}}]")
        with user_error("recipe_without_effect"):
            compress(tiny, tmp_path / name, recipe=recipe)
    recipe.write_text("recipe: rotate-q4_0\noverrides: [{match: '*', scheme: keep}]")
    assert compress(tiny, tmp_path / "out.gguf", recipe=recipe).bits_per_weight == 16
    recipe.write_text("recipe: q4_0\nhead: keep\noverrides: [{match: 'model.layers.*', scheme: keep}]")
    assert compress(tiny, tmp_path / "ends.gguf", recipe=recipe).bits_per_weight == 16  # the embedding is compressed


def test_rows_that_blocks_do_not_divide_are_told(tiny: Path, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out.gguf", recipe="q4_k_m")
    assert GgufFile(tmp_path / "out.gguf").info("blk.0.attn_q.weight").kind.name == "Q5_0"
    assert GgufFile(tmp_path / "out.gguf").info("blk.0.ffn_down.weight").kind.name == "Q4_K"
    told = next(note for note in done.notes if "Q5_0" in note)
    assert "blk.0.attn_q, " in told
    assert told.endswith("rows of 128 columns are not whole blocks of Q4_K, so they are Q5_0.")
    assert any("no tokenizer" in note for note in done.notes)


def test_biases_and_ropes_of_other_families(tmp_path: Path) -> None:
    """A Qwen2 with biases, and a Llama with the rope of Llama 3 and biases whose rows stand in another order."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    models = (
        Qwen2ForCausalLM(Qwen2Config(**shape)),
        LlamaForCausalLM(LlamaConfig(**shape, attention_bias=True, mlp_bias=True, rope_scaling=scaling)),
    )
    ids = torch.randint(0, 64, (24,)).tolist()
    for model in models:
        folder = tmp_path / type(model).__name__
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1.0)
        model.save_pretrained(folder)
        compress(folder, folder.with_suffix(".gguf"), recipe="f32")
        torch.testing.assert_close(logits(folder.with_suffix(".gguf"), ids), logits(folder, ids), rtol=1e-5, atol=1e-5)


REFUSED = {
    "a mix for a folder": ("q4_k_m", "out", "q4_k_m is a mix of GGUF files: give an output that ends in .gguf, not "),
    "a scheme for a file": ("rtn-w4g32", "out.gguf", "rtn-w4g32 has no place in a GGUF file, which holds types and"),
    "a method for plain numbers": (
        "gptq-f16",
        "out.gguf",
        "f16 holds plain numbers, which leave gptq nothing",
    ),
    "pruning for a file": ("prune-2:4", "out.gguf", "writes a folder, not a GGUF file"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_recipes_go_where_they_belong(kind: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe, out, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        compress(tiny, tmp_path / out, recipe=recipe, calibration=calibration)
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    with user_error("option_conflict"):
        compress_request(CompressionRequest(tiny, tmp_path / "out", recipe="rtn-w4g32", imatrix=tmp_path / "m.gguf"))
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["GPTNeoForCausalLM"]}))
    with user_error("architecture_unsupported"):
        compress(other, tmp_path / "out.gguf", recipe="q4_0")
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with user_error("gguf_inexpressible"):
        compress(other, tmp_path / "out.gguf", recipe="q4_0")
    (tmp_path / "out.gguf").write_bytes(b"mine")
    with user_error("output_exists"):
        compress(tiny, tmp_path / "out.gguf", recipe="q4_0")
    assert (tmp_path / "out.gguf").read_bytes() == b"mine"


def test_a_weight_that_is_not_a_number_names_its_matrix(tiny: Path, tmp_path: Path) -> None:
    source = load_file(tiny / "model.safetensors")
    source["lm_head.weight"][3, 5] = torch.inf
    shutil.copytree(tiny, tmp_path / "bad")
    save_file(source, tmp_path / "bad" / "model.safetensors")
    with user_error("not_finite", "lm_head"):
        compress(tmp_path / "bad", tmp_path / "out.gguf", recipe="q4_0")


def test_as_read_is_what_the_reader_gives() -> None:
    from attar.compression.outputs.gguf import GgufOutput
    from attar.formats.codecs import ggml_codec
    from attar.formats.scheme import Scheme

    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    for name in ("q4_0", "q8_0", "q6_k"):
        packed = ggml_codec.quantize(weight, Scheme.parse(name))
        found = GgufOutput.as_read(packed)
        assert (found is packed) == (name.upper() not in gguf_checkpoint.SCHEMES)
        assert torch.equal(found.dequantize(), packed.dequantize())


LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
text = sys.argv[2]
model = Llama(sys.argv[1], n_ctx=512, n_threads=1, logits_all=True, verbose=False)
ids = model.tokenize(text.encode(), add_bos=True, special=False)
model.eval(ids)
np.save(sys.argv[3], np.array(model.scores[: len(ids)], np.float32))
print(json.dumps(ids))
"""

KL_TO_LLAMA_CPP = {"f32": 1e-6, "q4_k_m": 1e-3}  # nats; beside quantized weights it rounds activations, here they stay

PASSAGE = """\
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it \
was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of \
Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing \
before us, we were all going direct to Heaven, we were all going direct the other way.

There were a king with a large jaw and a queen with a plain face, on the throne of England; there were a king \
with a large jaw and a queen with a fair face, on the throne of France. In both countries it was clearer than \
crystal to the lords of the State preserves of loaves and fishes, that things in general were settled for ever.

It was the year of Our Lord 1775. "I'll go," said a man; and he went."""


@pytest.mark.parametrize("recipe", KL_TO_LLAMA_CPP)
def test_llama_cpp_reads_the_words_and_computes_the_same(recipe: str, demo: Path, tmp_path: Path) -> None:
    python = ROOT / ".venv-llamacpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    path = compress(demo, tmp_path / "out.gguf", recipe=recipe).path
    done = subprocess.run(
        [python, "-c", LLAMA_CPP, str(path), PASSAGE, str(tmp_path / "logits.npy")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ids = Tokenizer.load(demo).encode(PASSAGE)
    assert json.loads(done.stdout) == ids
    assert len(ids) > 200
    ours, theirs = logits(path, ids).log_softmax(1), torch.from_numpy(np.load(tmp_path / "logits.npy")).log_softmax(1)
    assert float((ours.exp() * (ours - theirs)).sum(1).mean()) < KL_TO_LLAMA_CPP[recipe]
    if recipe == "f32":
        assert torch.equal(ours.argmax(1), theirs.argmax(1))
