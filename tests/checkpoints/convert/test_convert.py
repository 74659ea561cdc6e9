"""One format made of another: the same values by each format's own reader, there and back, or a reason."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as oracle
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.convert.grids import GGML
from attar.checkpoints.convert.proof import Digest, proof
from attar.checkpoints.convert.run import convert
from attar.checkpoints.convert.source import packed_linears, values_of
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.export import FILE_TYPES, file_type
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.receipt import combined_hash, known, read_receipt
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.vocabulary import tokenizer
from attar.checkpoints.writer import ShardWriter
from attar.compression.runs.pipeline import compress
from attar.formats.packed import PackedTensor
from attar.model.cache import ForwardBatch
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

LAYERS = 2
IDS = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(3))

Folders = dict[str, Path]


def logits(path: Path) -> torch.Tensor:
    return opening.load(path, torch.float32).forward(IDS, ForwardBatch((len(IDS),), len(IDS)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models") / "small", 64, LAYERS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block, of rows that are whole blocks of k-quants."""
    return random_llama(tmp_path_factory.mktemp("models") / "wide", 256, 1)


def random_llama(folder: Path, width: int, layers: int) -> Path:
    """In bfloat16, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.ndim == 2 else 1.0)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """`small` rounded to several schemes, as compressed-tensors."""
    at = tmp_path_factory.mktemp("folders")
    recipes = ("rtn-w4g32", "rtn-w4g64-asym", "rtn-w8", "rtn-w3g32", "rtn-w8a8")
    return {recipe: compress(small, at / recipe, recipe=recipe).path for recipe in recipes}


WAYS = {
    "awq": ("rtn-w4g32", "rtn-w4g64-asym"),
    "gptq": ("rtn-w4g32", "rtn-w4g64-asym", "rtn-w8", "rtn-w3g32"),
}


@pytest.mark.parametrize(("to", "recipe"), [(to, recipe) for to, recipes in WAYS.items() for recipe in recipes])
def test_folders_there_and_back(to: str, recipe: str, folders: Folders, tmp_path: Path) -> None:
    source = folders[recipe]
    there = convert(source, tmp_path / "there", to=to)
    assert (there.packed, there.tensors) == (7 * LAYERS, 9 * LAYERS + 3)
    assert there.bytes == (tmp_path / "there" / "model.safetensors").stat().st_size
    assert torch.equal(logits(tmp_path / "there"), logits(source))
    back = convert(tmp_path / "there", tmp_path / "back", to="compressed-tensors")
    assert back.sha256 == there.sha256 in next(proof(back))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "back", source))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name  # scales may have become float16, exactly
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == to


AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # the nibble of each of a word's eight columns


def as_others_read(
    stored: dict[str, torch.Tensor], module: str, said: dict[str, Any], dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """The weight [O, I] by the arithmetic of AutoGPTQ's and AutoAWQ's own kernels, which is float16 throughout."""
    bits, mask = said["bits"], (1 << said["bits"]) - 1
    words, zeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    assert scales.dtype == torch.float16
    shifts = torch.arange(0, 32, bits)

    def across(packed: torch.Tensor) -> torch.Tensor:
        return packed[:, :, None] >> (shifts[AWQ_ORDER] if said["quant_method"] == "awq" else shifts) & mask

    zero = across(zeros).flatten(1)
    if said["quant_method"] == "awq":
        codes = across(words).flatten(1)
        groups = torch.arange(len(codes)) // said["group_size"]
    else:
        codes = (words[:, None, :] >> shifts[None, :, None] & mask).flatten(0, 1)
        zero = (zero + (said["checkpoint_format"] == "gptq")) & mask
        groups = stored[f"{module}.g_idx"].long()
    return (scales[groups].to(dtype) * (codes - zero[groups]).to(dtype)).t()


@pytest.mark.parametrize(("to", "recipe"), [(to, each) for to in WAYS for each in WAYS[to] if each != "rtn-w3g32"])
def test_others_read_the_same_numbers(to: str, recipe: str, folders: Folders, tmp_path: Path) -> None:
    """Of a model in bfloat16, whose scales become float16."""
    convert(folders[recipe], tmp_path / "out", to=to)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    source = hf.Checkpoint.open(folders[recipe])
    for module in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = source.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert torch.equal(as_others_read(stored, module, said), weight.dequantize().half())


@pytest.mark.parametrize("to", WAYS)
def test_a_scale_that_is_no_half_is_refused(to: str, folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders["rtn-w4g32"], tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    stored["model.layers.1.self_attn.o_proj.weight_scale"][3, 1] = 1e-9
    save_file(stored, tmp_path / "in" / "model.safetensors")
    words = r"model.layers.1.self_attn.o_proj cannot be .*: a scale of bfloat16 is no number of float16, .*: 9.968"
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "in", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_linears_that_stay_dense_are_named(small: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: rtn-w4g32\nkeep: ['*.1.mlp.down_proj', lm_head]\n")
    source = compress(small, tmp_path / "in", recipe=recipe).path
    said = {}
    for to in WAYS:
        convert(source, tmp_path / to, to=to)
        said[to] = json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
        assert torch.equal(logits(tmp_path / to), logits(source))
    dense = "model.layers.1.mlp.down_proj"
    assert said["awq"]["modules_to_not_convert"] == ["lm_head", dense]
    (pattern,) = said["gptq"]["dynamic"]
    assert re.match(pattern.removeprefix("-:"), dense)
    assert not re.match(pattern.removeprefix("-:"), dense.replace(".1.", ".0."))


def test_gptq_and_awq_meet(folders: Folders, tmp_path: Path) -> None:
    first = convert(folders["rtn-w4g64-asym"], tmp_path / "gptq", to="gptq")
    second = convert(tmp_path / "gptq", tmp_path / "awq", to="awq")
    assert second.sha256 == first.sha256
    said = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert (said["checkpoint_format"], said["sym"]) == ("gptq_v2", False)


@pytest.mark.parametrize("recipe", ["rtn-w4g32", "rtn-w8", "rtn-w3g32"])
def test_symmetric_grids_become_blocks(recipe: str, folders: Folders, tmp_path: Path) -> None:
    """Also where a type's grid has more codes, and where a scale is that of several blocks."""
    done = convert(folders[recipe], tmp_path / "out.gguf", to="gguf")
    kinds = {"rtn-w4g32": "Q4_0", "rtn-w8": "Q8_0", "rtn-w3g32": "Q4_0"}
    assert GgufFile(tmp_path / "out.gguf").info("blk.1.attn_q.weight").kind.name == kinds[recipe]
    assert torch.equal(logits(tmp_path / "out.gguf"), logits(folders[recipe]))
    assert "no tokenizer" in done.notes[0]


def test_a_dense_folder_becomes_a_file_of_its_dtype(small: Path, tmp_path: Path) -> None:
    done = convert(small, tmp_path / "out.gguf", to="gguf")
    assert (done.packed, done.format) == (0, "gguf")
    file = GgufFile(tmp_path / "out.gguf")
    assert {file.info(name).kind.name for name in ("output.weight", "blk.0.ffn_up.weight")} == {"BF16"}
    assert torch.equal(logits(tmp_path / "out.gguf"), logits(small))


@pytest.mark.parametrize(("recipe", "kind"), [("rtn-q4_k", "Q4_K"), ("rtn-iq4_nl", "IQ4_NL"), ("rtn-q5_1", "Q5_1")])
def test_blocks_of_a_folder_are_copied_byte_for_byte(recipe: str, kind: str, wide: Path, tmp_path: Path) -> None:
    folder = compress(wide, tmp_path / "folder", recipe=recipe).path
    done = convert(folder, tmp_path / "out.gguf", to="gguf")
    assert (done.packed, done.sha256 in next(proof(done))) == (7, True)
    file, stored = GgufFile(tmp_path / "out.gguf"), load_file(folder / "model.safetensors")
    for module, name in (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        assert file.info(f"blk.0.{name}.weight").kind.name == kind
        ours = stored[f"model.layers.0.{module}.weight.blocks"]
        assert torch.equal(file.read(f"blk.0.{name}.weight").view(ours.shape), ours)
    assert torch.equal(logits(tmp_path / "out.gguf"), logits(folder))  # also q and k, whose rows change places


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_offsets_that_are_zero_points_become_these(kind: str, small: Path, tmp_path: Path) -> None:
    """There and back: scales that are powers of two, of which every zero point's product is a float16."""
    scheme = GGML[kind]
    folder = compress(small, tmp_path / "folder", recipe=f"rtn-{scheme.name}").path
    stored = load_file(folder / "model.safetensors")
    scales = {name: each.float().log2().round().exp2().half() for name, each in stored.items() if "scale" in name}
    save_file(stored | scales, folder / "model.safetensors")
    there = convert(folder, tmp_path / "there.gguf", to="gguf")
    assert GgufFile(there.path).info("blk.1.attn_q.weight").kind.name == kind
    back = convert(there.path, tmp_path / "back", to="compressed-tensors")
    assert (back.packed, back.sha256) == (7 * LAYERS, there.sha256)
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in (stored | scales).items() if "_proj" in name)


def test_offsets_that_are_none_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    compress(small, tmp_path / "in.gguf", recipe="q4_1")
    words = r"blk.0.attn_q.weight cannot .* Q4_1 has an offset that is no whole number of its scales"
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "in.gguf", tmp_path / "out", to="compressed-tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("recipe", "to"), [("q4_0", "compressed-tensors"), ("q8_0", "gptq"), ("q4_0", "awq")])
def test_a_file_becomes_a_folder(recipe: str, to: str, small: Path, tmp_path: Path) -> None:
    compress(small, tmp_path / "in.gguf", recipe=recipe)
    done = convert(tmp_path / "in.gguf", tmp_path / "out", to=to)
    ours, theirs = hf.Checkpoint.open(tmp_path / "out", torch.float32), GgufCheckpoint.open(tmp_path / "in.gguf")
    assert ours.config.ropes == theirs.config.ropes
    name = "model.layers.1.self_attn.k_proj"
    weight = ours.linear(name).weight
    assert not isinstance(weight, torch.Tensor)
    assert torch.equal(weight.dequantize(), theirs.tensor(f"{name}.weight"))  # type: ignore[attr-defined]
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "in.gguf"))
    assert done.notes[0].startswith("token_embd.weight is Q")
    back = convert(tmp_path / "out", tmp_path / "back.gguf", to="gguf")
    assert back.sha256 == done.sha256


@pytest.mark.parametrize("recipe", ["q4_0", "q6_k"])
def test_transformers_loads_what_a_file_became(recipe: str, tmp_path: Path, demo: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    compress(demo, tmp_path / "in.gguf", recipe=recipe)
    convert(tmp_path / "in.gguf", tmp_path / "out", to="compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = theirs(IDS[None]).logits[0]
    ours = logits(tmp_path / "in.gguf")
    divergence = (ours.log_softmax(1).exp() * (ours.log_softmax(1) - found.log_softmax(1))).sum(1).mean()
    assert float(divergence) < 1e-4
    text = "It was the best of times, 12 of them."
    ids = Tokenizer.load(demo).encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids
    again = Tokenizer.load(tmp_path / "out")
    assert again.encode(text) == tokenizer(tmp_path / "in.gguf").encode(text) == ids
    assert again.chat_templates == Tokenizer.load(demo).chat_templates


def test_columns_out_of_their_order_are_kept_so_where_there_is_a_field(folders: Folders, tmp_path: Path) -> None:
    """A GPTQ checkpoint whose groups lie scattered, as desc_act makes them."""
    convert(folders["rtn-w4g32"], tmp_path / "gptq", to="gptq")
    stored = load_file(tmp_path / "gptq" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in list(stored):
        if name.endswith("g_idx"):
            stored[name] = stored[name][torch.randperm(len(stored[name]), generator=generator)]
    save_file(stored, tmp_path / "gptq" / "model.safetensors")
    done = convert(tmp_path / "gptq", tmp_path / "ct", to="compressed-tensors")
    torch.testing.assert_close(logits(tmp_path / "ct"), logits(tmp_path / "gptq"), rtol=0, atol=0)
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    back = convert(tmp_path / "ct", tmp_path / "back", to="gptq")
    assert back.sha256 == done.sha256
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"],
                       stored["model.layers.0.mlp.down_proj.g_idx"])  # fmt: skip
    for to, out in (("awq", "awq"), ("gguf", "out.gguf")):
        with user_error("conversion_inexact"):
            convert(tmp_path / "gptq", tmp_path / out, to=to)


REFUSED = {
    "activations": ("rtn-w8a8", "gptq", "q_proj cannot be .* GPTQ has no field for activations that are rounded"),
    "activations, AWQ": ("rtn-w8a8", "awq", "AWQ has no field for activations that are rounded, as those of w8a8 are"),
    "activations, GGUF": ("rtn-w8a8", "gguf", "attar writes GGUF files whose activations are not rounded"),
    "8 bits": ("rtn-w8", "awq", "AWQ holds integers of 4 bits, not w8, which takes 8"),
    "5 bits": ("rtn-mxfp4-weight", "awq", "AWQ holds integers of 4 bits, not mxfp4-weight, which takes 5"),
    "no integers": ("rtn-nf4", "awq", "AWQ holds integers times scales, which nf4 is not"),
    "no integers, GPTQ": ("rtn-lut4", "gptq", "GPTQ holds integers times scales, which lut4 is not"),
    "no place": ("rtn-lut4", "compressed-tensors", "compressed-tensors has no place for lut4"),
    "a number for the tensor": ("rtn-nvfp4-weight", "gguf", "divided by a number for the whole tensor"),
    "scales": ("rtn-nvfp4-weight", "gptq", "a scale of float32 is no number of float16"),
    "offsets": ("rtn-q4_1", "compressed-tensors", "Q4_1 has an offset that is no whole number of its scales, 0 to 15"),
    "the same format": ("rtn-w8", "compressed-tensors", "is stored as compressed-tensors already"),
}


@pytest.fixture(scope="module")
def folder_of(small: Path, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`small` rounded to a scheme, once."""
    at = tmp_path_factory.mktemp("more")

    def made(recipe: str) -> Path:
        if recipe not in folders:
            folders[recipe] = compress(small, at / recipe, recipe=recipe).path
        return folders[recipe]

    return made


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_exact_is_refused_and_leaves_nothing(
    kind: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe, to, words = REFUSED[kind]
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    with pytest.raises(ValueError, match=words):
        convert(folder_of(recipe), out, to=to)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["q2_k", "q4_k_s", "q5_k_s"])
def test_minima_of_k_quants_are_no_zero_points(kind: str, wide: Path, tmp_path: Path) -> None:
    compress(wide, tmp_path / "in.gguf", recipe=kind)
    with user_error("conversion_inexact"):
        convert(tmp_path / "in.gguf", tmp_path / "out", to="compressed-tensors")


# Exact, though no format's own words say it


def oracle_values(path: Path) -> dict[str, torch.Tensor]:
    """Matrices of blocks of a GGUF file by gguf's own reader, rows of q and k as they lie."""
    tensors = {str(each.name): each for each in oracle.GGUFReader(path).tensors}
    return {
        name: torch.from_numpy(oracle.dequantize(each.data, each.tensor_type))
        for name, each in tensors.items()
        if name.startswith("blk.") and len(each.shape) == 2
    }


OURS = {
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}


def check_file(path: Path, folder: Path) -> None:
    """That the gguf package finds the numbers of a folder in a file, to the bit."""
    values, source = oracle_values(path), hf.Checkpoint.open(folder, torch.float32)
    for theirs, ours in OURS.items():
        expected = values_of(source.linear(f"model.layers.0.{ours}"))
        assert torch.equal(values[f"blk.0.{theirs}.weight"].view(torch.int32), expected.view(torch.int32)), ours


TO_FILES = {
    "rtn-mxfp4-weight": "MXFP4", "rtn-w4g64-asym": "Q5_0", "rtn-w5g64-asym": "Q8_0", "rtn-w4-tensor": "Q4_0",
    "rtn-w6g32": "Q8_0", "magnitude-2:4-sparse24-w4g32": "Q4_0",
}  # fmt: skip


@pytest.mark.parametrize("recipe", TO_FILES)
def test_a_folders_numbers_in_blocks(recipe: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, file = folder_of(recipe), tmp_path / "out.gguf"
    there = convert(folder, file, to="gguf")
    assert GgufFile(file).info("blk.1.attn_q.weight").kind.name == TO_FILES[recipe]
    check_file(file, folder)
    assert torch.equal(logits(file), logits(folder))
    back = convert(file, tmp_path / "back", to="compressed-tensors")
    assert back.sha256 == there.sha256
    assert back.bits_per_weight == pytest.approx(inspect(tmp_path / "back").bits_per_weight, rel=1e-12)
    if recipe == "rtn-mxfp4-weight":
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "back", folder))
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if "_proj" in name)


def test_nvfp4_in_blocks_where_its_number_for_the_tensor_is_one(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Or another by which the scales are divided without a rest; and always on the way back."""
    shutil.copytree(folder_of("rtn-nvfp4-weight"), tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for i, name in enumerate(name for name in stored if "global" in name):
        stored[name] = torch.tensor([(1.0, 2.0, 0.5)[i % 3]])
        scale = name.replace("global_", "")
        stored[scale] = stored[scale].float().clamp(1, 128).to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "in" / "model.safetensors")
    there = convert(tmp_path / "in", tmp_path / "there.gguf", to="gguf")
    assert GgufFile(tmp_path / "there.gguf").info("blk.1.attn_q.weight").kind.name == "NVFP4"
    check_file(tmp_path / "there.gguf", tmp_path / "in")
    back = convert(tmp_path / "there.gguf", tmp_path / "back", to="compressed-tensors")
    assert back.sha256 == there.sha256
    scheme = hf.Checkpoint.open(tmp_path / "back").scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert scheme.name == "nvfp4-weight"


K_QUANTS = {"q6_k": ("w6g16", 8.0), "q3_k_s": ("w3g16", 5.0), "iq4_xs": ("w8g32", 9.0), "iq4_nl": ("w8g32", 8.5)}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_without_offsets_become_integers(kind: str, wide: Path, tmp_path: Path) -> None:
    """There by gguf's decoder, to the bit, and back; of a folder that holds blocks as well."""
    file = compress(wide, tmp_path / "in.gguf", recipe=kind).path
    there = convert(file, tmp_path / "out", to="compressed-tensors")
    source = hf.Checkpoint.open(tmp_path / "out")
    name, bits = K_QUANTS[kind]
    assert {each.scheme.name for each in packed_linears(source).values()} == {name}
    assert there.bits_per_weight == pytest.approx(bits, abs=0.01)
    assert list(proof(there))[1] == (
        f"stored bits of a re-packed weight: {there.source_bits:.3f} before, {there.bits_per_weight:.3f} now"
    )
    check_file(file, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(file))
    back = convert(tmp_path / "out", tmp_path / "back.gguf", to="gguf")
    assert back.sha256 == there.sha256
    assert back.bits_per_weight == (8.5 if kind == "iq4_nl" else there.source_bits)
    check_file(tmp_path / "back.gguf", tmp_path / "out")
    if kind == "q6_k":
        folder = compress(wide, tmp_path / "folder", recipe="rtn-q6_k").path
        again = convert(folder, tmp_path / "again", to="compressed-tensors")
        assert again.source_bits == 6.5625
        check_file(file, tmp_path / "again")


GROWN = {
    ("rtn-w3g64", "awq"): 4, ("rtn-w2g32", "awq"): 4, ("rtn-w3g32-asym", "awq"): 4, ("rtn-w5g32", "gptq"): 8,
    ("rtn-w6g64-asym", "gptq"): 8, ("rtn-w7", "gptq"): 8, ("rtn-mxfp4-weight", "gptq"): 8, ("rtn-iq4_nl", "gptq"): 8,
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "to"), GROWN)
def test_a_grid_of_fewer_bits_is_part_of_one_of_more(
    recipe: str, to: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of(recipe)
    there = convert(folder, tmp_path / "there", to=to)
    stored = load_file(tmp_path / "there" / "model.safetensors")
    said = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert said["bits"] == GROWN[recipe, to]
    source = hf.Checkpoint.open(folder)
    for module in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = source.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert torch.equal(as_others_read(stored, module, said, torch.float32), weight.dequantize())
        assert torch.equal(as_others_read(stored, module, said), weight.dequantize().half())
    assert there.bits_per_weight is not None
    assert there.source_bits is not None
    assert there.bits_per_weight > there.source_bits
    back = convert(tmp_path / "there", tmp_path / "back", to="compressed-tensors")
    assert back.sha256 == there.sha256


@pytest.mark.parametrize(("to", "mixed"), [("gptq", "w8"), ("awq", "w3g64-asym")])
def test_what_holds_for_a_whole_folder_is_chosen_for_all(to: str, mixed: str, small: Path, tmp_path: Path) -> None:
    """Bits that all fit, groups that divide all, zero points where one has them."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"recipe: rtn-w4g32\noverrides:\n  - {{match: '*.down_proj', scheme: {mixed}}}\n")
    folder = compress(small, tmp_path / "mixed", recipe=recipe).path
    convert(folder, tmp_path / "out", to=to)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (said["bits"], said["group_size"]) == (8 if to == "gptq" else 4, 32)
    stored, source = load_file(tmp_path / "out" / "model.safetensors"), hf.Checkpoint.open(folder)
    for module in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = source.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert torch.equal(as_others_read(stored, module, said, torch.float32), weight.dequantize())


def test_two_levels_are_int8_with_the_same_activations(wide: Path, tmp_path: Path) -> None:
    folder = compress(wide, tmp_path / "in", recipe="rtn-qserve-g64").path
    convert(folder, tmp_path / "out", to="compressed-tensors")
    scheme = hf.Checkpoint.open(tmp_path / "out").scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert scheme.name == "w8a8"
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_wrong_names_and_sources_are_refused(small: Path, folders: Folders, tmp_path: Path) -> None:
    with user_error("name_unknown"):
        convert(small, tmp_path / "out", to="ggml")
    with user_error("output_invalid"):
        convert(small, tmp_path / "out", to="gguf")
    with user_error("output_invalid"):
        convert(small, tmp_path / "out.gguf", to="gptq")
    with user_error("source_not_compressed"):
        convert(small, tmp_path / "out", to="gptq")
    compress(small, tmp_path / "k.gguf", recipe="iq4_nl")
    with user_error("conversion_inexact"):
        convert(tmp_path / "k.gguf", tmp_path / "out", to="awq")
    with user_error("source_is_gguf"):
        convert(tmp_path / "k.gguf", tmp_path / "out.gguf", to="gguf")
    shutil.copytree(folders["rtn-w8"], tmp_path / "there")
    with user_error("output_exists"):
        convert(folders["rtn-w4g32"], tmp_path / "there", to="gptq")
    assert not (tmp_path / "out").exists()


def test_an_output_that_reads_back_otherwise_is_not_put_in_place(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardWriter.write

    def wrong(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        write(self, name, tensor + 1 if name == "model.layers.1.mlp.up_proj.qweight" else tensor)

    monkeypatch.setattr(ShardWriter, "write", wrong)
    with user_error("conversion_inexact", "model.layers.1.mlp.up_proj"):
        convert(folders["rtn-w4g32"], tmp_path / "out", to="gptq")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    left = tmp_path / ".out.attar-partial" / "out" / "of another run"
    left.parent.mkdir(parents=True)
    left.touch()
    convert(folders["rtn-w4g32"], tmp_path / "out", to="gptq")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "receipt.json",
    ]  # fmt: skip


def test_an_interrupted_conversion_leaves_nothing(folders: Folders, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    file, out = tmp_path / "file.gguf", tmp_path / "out"
    convert(folders["rtn-w4g32"], file, to="gguf")
    there = set(tmp_path.iterdir())
    for src, dst, to in (
        (folders["rtn-w4g32"], out, "gptq"), (folders["rtn-w4g32"], tmp_path / "out.gguf", "gguf"), (file, out, "gptq")
    ):  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            convert(src, dst, to=to, progress=interrupt)
        assert set(tmp_path.iterdir()) == there


def test_a_digest_does_not_depend_on_the_order() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(2)}
    found = []
    for names in ("abc", "cab"):
        digest = Digest()
        for name in names:
            digest.add(name, tensors[name])
        found.append(digest.whole)
    assert found[0] == found[1]
    digest.add("c", torch.zeros(2))
    assert digest.whole != found[0]


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q6_K", "Q4_K"), ("Q8_0", "Q4_0"), ("Q4_0", "Q8_0")])
def test_a_files_type_does_not_depend_on_the_order_of_a_set(names: tuple[str, str]) -> None:
    """Of equally many matrices: otherwise the file's bytes would change from process to process."""
    assert file_type(names) == FILE_TYPES[names[0]]


@pytest.mark.parametrize(
    ("recipe", "to"), [("rtn-w4g32", "gptq"), ("rtn-w4g32", "gguf"), ("rtn-w4g64-asym", "awq"), ("rtn-w8", "gptq")]
)
def test_the_receipt_goes_along_and_holds(recipe: str, to: str, folders: Folders, tmp_path: Path) -> None:
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    done = convert(folders[recipe], out, to=to)
    before, after = read_receipt(folders[recipe]), read_receipt(out)
    assert before is not None
    assert after is not None
    assert after.files != before.files
    assert after.value["converted"] == {
        "files": combined_hash(before.files), "values": done.sha256, "receipts": known(folders[recipe]),
    }  # fmt: skip
    assert after.value["bits_per_weight"] == done.bits_per_weight
    assert done.bits_per_weight == pytest.approx(inspect(out).bits_per_weight, rel=1e-12)
    changed = ("files", "converted", "bits_per_weight")
    assert {k: v for k, v in after.value.items() if k not in changed} == {
        k: v for k, v in before.value.items() if k not in changed
    }
    verdict = verify(out)
    assert verdict.ok, verdict.detail
    if to == "gguf":
        return
    with (out / "model.safetensors").open("r+b") as file:  # a flipped scale or code is seen by hash, and by probe
        file.seek(-3, 2)
        file.write(b"\x7f")
    assert not verify(out).ok


def test_what_was_made_for_a_folder_is_known_by_all_that_it_was_converted_to(
    folders: Folders, tmp_path: Path, demo: Path
) -> None:
    """An adapter, say, that was trained on it."""
    first = folders["rtn-w4g64-asym"]
    convert(first, tmp_path / "second", to="awq")
    convert(tmp_path / "second", tmp_path / "third", to="gptq")
    one, two, three = map(known, (first, tmp_path / "second", tmp_path / "third"))
    assert [len(each) for each in (one, two, three)] == [1, 2, 3]
    assert three[1:] == two
    assert two[1:] == one
    shutil.copytree(demo, tmp_path / "none", ignore=shutil.ignore_patterns("receipt.json"))
    assert known(tmp_path / "none") == []


def test_each_file_is_hashed_once_with_progress_and_the_sources_receipt_is_read_once(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = folders["rtn-w4g32"], tmp_path / "out"
    hashed: list[Path] = []
    read: list[Path] = []
    told: list[tuple[str, int, int]] = []
    sha256, read_bytes = receipt.sha256, receipt.read_bytes

    def noted(path: Path, advance: receipt.Advance | None = None) -> str:
        hashed.append(path)
        return sha256(path, advance)

    def noted_too(path: Path, limit: int) -> bytes:
        read.append(path)
        return read_bytes(path, limit)

    monkeypatch.setattr(receipt, "sha256", noted)
    monkeypatch.setattr(receipt, "read_bytes", noted_too)
    convert(source, out, to="gptq", progress=lambda *each: told.append(each))
    files = [path for folder in (source, out) for path in folder.iterdir() if path.name != "receipt.json"]
    assert sorted(hashed) == sorted(files)
    assert read == [source / "receipt.json"]
    assert list(dict.fromkeys(stage for stage, *_ in told)) == ["converting", "comparing", "hashing"]
    (_, done, total), size = told[-1], sum(path.stat().st_size for path in files)
    assert done == total == size
    convert(source, tmp_path / "file.gguf", to="gguf", progress=lambda *each: told.append(each))
    told.clear()
    convert(tmp_path / "file.gguf", tmp_path / "again", to="gptq", progress=lambda *each: told.append(each))
    assert list(dict.fromkeys(stage for stage, *_ in told)) == ["converting", "comparing", "hashing"]
    assert told[-1][1] == told[-1][2]


def test_what_a_stranger_put_into_a_receipt_is_not_carried_over(folders: Folders, tmp_path: Path) -> None:
    """Indented, a list that lies deep is hundreds of times as long."""
    source, known_, deep = tmp_path / "source", tmp_path / "known", "[" * 200 + "1," * 50_000 + "1" + "]" * 200
    shutil.copytree(folders["rtn-w4g32"], source)
    plain = json.loads((source / "receipt.json").read_text())
    (source / "receipt.json").write_text(json.dumps(plain)[:-1] + f', "strange": {deep}}}')
    done = convert(source, tmp_path / "out", to="gptq")
    after = read_receipt(tmp_path / "out")
    assert after is not None
    assert set(after.value) == {*plain, "converted"}
    assert done.notes == ()
    shutil.copytree(source, known_)
    (known_ / "receipt.json").write_text(json.dumps({**plain, "texts": None})[:-1] + f', "tune": {deep}}}')
    done = convert(known_, tmp_path / "other", to="gptq")
    assert done.notes == ("the output has no receipt: that of the source is nested more than 32 deep",)
    assert not list(tmp_path.glob("other/receipt.json*"))


@pytest.mark.parametrize(
    ("limit", "says"), [("MAX_BYTES", "longer than"), ("MAX_MARKS", "braces, brackets and commas")]
)
def test_a_receipt_that_could_not_be_read_back_is_not_written(
    limit: str, says: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a little longer than the source's, which is as long as one may be."""
    source = tmp_path / "source"
    shutil.copytree(folders["rtn-w4g32"], source)
    text = (source / "receipt.json").read_bytes()
    marks = sum(map(text.count, (b"{", b"[", b",")))
    if limit == "MAX_BYTES":
        monkeypatch.setattr(receipt, "MAX_BYTES", len(text))
    else:
        monkeypatch.setattr(receipt.json_object, "__defaults__", (marks,))
    done = convert(source, tmp_path / "out", to="gptq")
    (note,) = done.notes
    assert note.startswith("the output has no receipt: ")
    assert says in note
    assert sorted(path.name for path in (tmp_path / "out").glob("*receipt*")) == []
    monkeypatch.setattr(receipt, "MAX_BYTES", 10)
    with user_error("file_too_large"):
        receipt._text({"a": list(range(10))})


def test_a_link_has_the_receipt_where_its_file_is(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "out.gguf"
    link.symlink_to(tmp_path / "there" / "file.gguf")
    convert(folders["rtn-w4g32"], link, to="gguf")
    assert read_receipt(tmp_path / "there" / "file.gguf") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "there"]


def test_a_receipt_that_does_not_hold_is_not_passed_on(folders: Folders, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folders["rtn-w4g32"], changed)
    with (changed / "config.json").open("a") as file:
        file.write("\n")
    done = convert(changed, tmp_path / "out", to="gptq")
    assert read_receipt(tmp_path / "out") is None
    assert done.notes == (
        "the output gets no receipt, because the source's does not hold: config.json is not the file that was written: "
        "its SHA-256 is not the receipt's",
    )
    (changed / "receipt.json").write_text("{}")
    with user_error("receipt_invalid"):
        convert(changed, tmp_path / "other", to="gptq")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("strange", [{"converted": 7}, {"converted": {"receipts": 7}}, {"seed": "\ud800"}])
def test_a_strange_receipt_costs_no_more_than_itself(strange: dict[str, Any], folders: Folders, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(folders["rtn-w4g32"], source)
    path = source / "receipt.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | strange))
    done = convert(source, out, to="gptq")
    assert len(known(out)) == (0 if "seed" in strange else 2)
    assert len(done.notes) == ("seed" in strange)
    assert not list(out.glob("*.tmp"))
