"""A file of each architecture, written by the `gguf` package under llama.cpp's rules, beside the folder it was made of.

The names of tensors are those of that package's own table. The orders of rows, the shift of norms and the metadata are
written here from what llama.cpp's converter does, and not by attar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from dense import dense
from reals.configs import CONFIGS, LONGROPE
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from attar.checkpoints.convert.run import convert
from attar.checkpoints.convert.source import values_of
from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.values import Typed
from attar.checkpoints.gguf.writer import atomic_gguf
from attar.checkpoints.sources import hf, imatrix
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.calibration import importance
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.formats.codecs import ggml_blocks
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.rope import frequencies
from tests.errors import user_error
from tests.model.random_model import write as random_model

SAME = 2e-5  # relative to the largest logit: float32 norms of 1 + w are rounded once more in a file
NEAR = 0.5 / 127 + 2**-10  # relative to the largest: rounding to 8 bits, and of the scale to fp16
LENGTH = 24


def permuted(weight: Tensor, heads: int) -> Tensor:
    """The rows of q or k in the order of llama.cpp's converter."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def described(writer: gguf.GGUFWriter, at: str, config: Mapping[str, Any], model: ModelConfig) -> None:
    """Add the metadata that llama.cpp's converter writes for a config.json."""
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    if at == "gpt2":
        writer.add_layer_norm_eps(model.norm_eps)
        return
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    rope = (
        model.ropes[-1]
        if at != "gemma3"
        else next(r for r, w in zip(model.ropes, model.windows, strict=True) if w is None)
    )
    assert rope is not None
    if at != "gemma2":  # whose files have none, and 10000
        writer.add_rope_freq_base(rope.theta)
    if "head_dim" in config:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if at == "llama":
        writer.add_vocab_size(model.vocab_size)
        writer.add_rope_dimension_count(model.head_dim)
    if model.experts is not None:
        writer.add_expert_count(model.experts.count)
        writer.add_expert_used_count(model.experts.top_k)
        if at != "llama":
            writer.add_expert_feed_forward_length(model.experts.intermediate)
        if at == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(model.experts.shared_intermediate)
    if at.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if at == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if at == "phi3":
        original = config.get("original_max_position_embeddings", 4096)
        writer.add_sliding_window(config.get("sliding_window") or 0)
        writer.add_rope_dimension_count(rope.dims)
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.kind == "longrope":
            grown = model.context / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(grown) / math.log(original)))


def converted(at: str, stored: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder in the names and the forms of llama.cpp's converter."""
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == at), model.layers)
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}

    def add(name: str, value: Tensor) -> None:
        new = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        found[new] = value.squeeze()

    for name in sorted(stored, key=lambda n: [int(p) if p.isdigit() else -1 for p in n.split(".")]):
        value = stored[name]
        if at == "llama" and ".q_proj." in name:
            value = permuted(value, model.heads)
        if at == "llama" and ".k_proj." in name:
            value = permuted(value, model.kv_heads)
        if at.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if at == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            value = value.T.contiguous()
        if ".experts." in name:
            before, _, behind = name.partition(".experts.")
            merged = f"{before}.experts.{behind.partition('.')[2]}"
            merged = merged.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward") if (
                at == "llama"
            ) else merged  # fmt: skip
            stacks.setdefault(merged, []).append(value)
            continue
        add(name, value)
    for name, values in stacks.items():
        add(name, torch.stack(values))
    return found


def write_gguf(
    path: Path,
    kind: str,
    source: Path,
    skipped: tuple[str, ...] = (),
    window: int | None = None,
    experts: int | None = None,
    sliding: list[bool] | None = None,
) -> Path:
    """Write the folder `source` of `CONFIGS[kind]` as a file, with further keys where they are given."""
    at = {"mistral": "llama", "mixtral": "llama"}.get(kind.split()[0], kind.split()[0])
    config, model = CONFIGS[kind], hf.Checkpoint.open(source).config
    writer = gguf.GGUFWriter(path, at)
    described(writer, at, config, model)
    writer.add_tokenizer_model("no_vocab")
    if window is not None:
        writer.add_sliding_window(window)
    if experts is not None:
        writer.add_expert_count(experts)
    if sliding is not None:
        writer.add_array(f"{at}.attention.sliding_window_pattern", sliding)
    tensors = converted(at, load_file(source / "model.safetensors"), model)
    if model.ropes[0] is not None and model.ropes[0].kind == "longrope":
        for name in ("long", "short"):
            tensors[f"rope_factors_{name}.weight"] = torch.tensor(LONGROPE[f"{name}_factor"])
    for name, value in tensors.items():
        if name not in skipped:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Made = Callable[..., tuple[Path, Path]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """`made(kind, skipped=())`: (a random folder, the same model as a file)."""

    def make(kind: str, skipped: tuple[str, ...] = ()) -> tuple[Path, Path]:
        source = random_model(tmp_path / "source", CONFIGS[kind])
        return source, write_gguf(tmp_path / "model.gguf", kind, source, skipped)

    return make


def logits(decoder: Decoder) -> Tensor:
    ids = torch.arange(LENGTH) * 11 % 96
    with torch.inference_mode():
        return decoder.forward(ids, ForwardBatch((LENGTH,), LENGTH, decoder.cache(LENGTH)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_of_each_family_computes_what_its_folder_does(kind: str, made: Made) -> None:
    source, path = made(kind)
    ours, theirs = gguf_checkpoint.load(path, torch.float32), hf.load(source, torch.float32)
    expected = logits(theirs)
    found = logits(ours)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME * expected.abs().max().item())
    assert ours.config.architecture in (theirs.config.architecture, "LlamaForCausalLM")
    assert ours.config.windows == theirs.config.windows
    assert ours.config.tied == theirs.config.tied


def test_experts_are_read_one_by_one(made: Made) -> None:
    source, path = made("qwen2moe")
    checkpoint = GgufCheckpoint.open(path, torch.float32)
    for module in ("mlp.experts.3.down_proj", "mlp.shared_expert.up_proj", "mlp.gate", "mlp.shared_expert_gate"):
        name = f"model.layers.1.{module}"
        weight = load_file(source / "model.safetensors")[f"{name}.weight"]
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), weight)
        assert checkpoint.linear_shape(name) == tuple(weight.shape)


@pytest.mark.parametrize(
    ("kind", "skipped", "code"),
    [
        ("mixtral", "blk.1.ffn_up_exps.weight", "checkpoint_incomplete"),
        ("gemma3", "blk.0.post_ffw_norm.weight", "checkpoint_incomplete"),
        ("phi3 long", "rope_factors_short.weight", "checkpoint_incomplete"),
        ("gpt2", "position_embd.weight", "checkpoint_incomplete"),
        ("gpt2", "blk.0.attn_qkv.bias", "checkpoint_incomplete"),
    ],
)
def test_a_missing_tensor_is_named(kind: str, skipped: str, code: Any, made: Made) -> None:
    with user_error(code) as caught:
        GgufCheckpoint.open(made(kind, (skipped,))[1])
    assert isinstance(caught.value, CheckpointError)


def test_a_window_of_a_llama_file_is_its_context(made: Made, tmp_path: Path) -> None:
    """llama.cpp attends to everything there: up to the window's length the two agree."""
    source, _ = made("mistral")
    path = write_gguf(tmp_path / "window.gguf", "mistral", source, window=16)
    assert GgufCheckpoint.open(path).config.context == 16
    path = write_gguf(tmp_path / "wide.gguf", "mistral", source, window=4096)
    assert GgufCheckpoint.open(path).config.context == 64


def test_experts_of_other_architectures_are_refused(made: Made, tmp_path: Path) -> None:
    source, _ = made("qwen3")
    with user_error("feature_unsupported", "qwen3.expert_count", "qwen3moe"):
        GgufCheckpoint.open(write_gguf(tmp_path / "experts.gguf", "qwen3", source, experts=4))


def test_a_list_says_which_layers_slide(made: Made, tmp_path: Path) -> None:
    source, _ = made("gemma2")
    path = write_gguf(tmp_path / "listed.gguf", "gemma2", source, sliding=[False, True, True])
    assert GgufCheckpoint.open(path).config.windows == (None, 8, 8)
    with user_error("config_invalid", "sliding_window_pattern"):
        GgufCheckpoint.open(write_gguf(tmp_path / "short.gguf", "gemma2", source, sliding=[True]))


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "mixtral"])
def test_files_that_do_not_become_folders_say_which_do(kind: str, made: Made, tmp_path: Path) -> None:
    with user_error("architecture_unsupported", "LlamaForCausalLM"):
        convert(made(kind)[1], tmp_path / "out", to="compressed-tensors")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_of_each_written_family_becomes_the_file_that_llama_cpp_makes(
    kind: str, made: Made, tmp_path: Path
) -> None:
    source, path = made(kind)
    ours, theirs = GgufFile(convert(source, tmp_path / "ours.gguf", to="gguf").path), GgufFile(path)
    assert set(ours.names()) == set(theirs.names())
    for name in theirs.names():
        assert ours.info(name).shape == theirs.info(name).shape
        assert ours.info(name).kind == theirs.info(name).kind
        assert torch.equal(ours.read(name), theirs.read(name)), name
    for key, value in theirs.metadata.items():
        if key.startswith(theirs.metadata["general.architecture"]) and not key.endswith("original_context_length"):
            assert ours.metadata[key] == value, key


@pytest.mark.parametrize("kind", ["gemma3", "phi3 long", "gpt2", "mixtral", "qwen2moe", "qwen3moe"])
def test_a_compressed_file_is_what_its_converted_values_are(kind: str, made: Made, tmp_path: Path) -> None:
    """All but the matrices has the values of the folder, in the form of files; the matrices are near."""
    source, path = made(kind)
    file = compress(source, tmp_path / "out.gguf", recipe="q8_0").path
    ours, theirs = GgufFile(file), GgufFile(path)
    assert set(ours.names()) == set(theirs.names())
    for name in theirs.names():
        found = ggml_blocks.decode(ours.info(name).kind, ours.read(name))
        expected = ggml_blocks.decode(theirs.info(name).kind, theirs.read(name))
        assert (found - expected).abs().max() <= (
            0 if ours.info(name).kind.name == "F32" else NEAR * expected.abs().max()
        )
    up = "blk.0.ffn_up_exps.weight" if kind in EXPERTS_OF else "blk.0.ffn_up.weight"
    assert ours.info(up).kind.name == "Q8_0"
    assert logits(gguf_checkpoint.load(file, torch.float32)).isfinite().all()


EXPERTS_OF = ("mixtral", "qwen2moe", "qwen3moe")


@pytest.mark.parametrize("kind", EXPERTS_OF)
def test_importances_of_each_expert_weigh_its_own_errors(kind: str, made: Made, tmp_path: Path) -> None:
    """A matrix kept in a file, with a row for each expert, is that which the run measures."""
    source, _ = made(kind)
    ids = [(torch.arange(LENGTH) * (7 + i) % 96).tolist() for i in range(24)]
    own = compress(source, tmp_path / "own.gguf", recipe="q4_0", calibration=ids).path
    matrix = tmp_path / "m.gguf"
    importance.make(source, matrix, calibration=ids)
    stored = imatrix.read(matrix).means["blk.1.ffn_down_exps.weight"]
    assert stored.shape[0] == CONFIGS[kind].get("num_local_experts", CONFIGS[kind].get("num_experts"))
    assert not torch.equal(stored[0], stored[1])
    request = CompressionRequest(source, tmp_path / "given.gguf", recipe="q4_0", imatrix=matrix)
    given, plain = compress_request(request).path, compress(source, tmp_path / "plain.gguf", recipe="q4_0").path
    files = [GgufFile(path) for path in (own, given, plain)]
    same = [torch.equal(files[0].read(name), files[1].read(name)) for name in files[0].names()]
    assert all(same)
    assert not torch.equal(*(file.read("blk.1.ffn_down_exps.weight") for file in files[1:]))


def test_experts_of_two_types_have_no_stack(made: Made, tmp_path: Path) -> None:
    recipe = tmp_path / "two.yaml"
    recipe.write_text("recipe: rtn-q8_0\noverrides:\n  - match: '*.experts.1.down_proj'\n    scheme: q4_0\n")
    with user_error("gguf_inexpressible", "blk.0.ffn_down_exps.weight", "experts.1"):
        compress(made("qwen3moe")[0], tmp_path / "out.gguf", recipe=recipe)


@pytest.mark.parametrize("scheme", ["rtn-q5_1", "rtn-q8_0"])
def test_a_compressed_mixture_is_converted_bit_for_bit(scheme: str, made: Made, tmp_path: Path) -> None:
    source, _ = made("qwen3moe")
    folder = compress(source, tmp_path / "folder", recipe=scheme).path
    done = convert(folder, tmp_path / "out.gguf", to="gguf")
    checkpoint = GgufCheckpoint.open(done.path, torch.float32)
    name = "model.layers.2.mlp.experts.3.up_proj"
    expected = values_of(hf.Checkpoint.open(folder, as_stored=True).linear(name))
    assert torch.equal(checkpoint.tensor(f"{name}.weight"), expected.float())


def test_a_tensor_for_each_expert_is_read_as_their_stack(made: Made, tmp_path: Path) -> None:
    """As Mixtral's files of before April 2024 have them."""
    _, path = made("mixtral")
    file = GgufFile(path)
    layout: dict[str, Any] = {}
    data: dict[str, Tensor] = {}
    for name in file.names():
        info, raw = file.info(name), file.read(name)
        if "_exps" not in name:
            layout[name], data[name] = (info.kind, info.shape), raw
            continue
        for expert in range(info.shape[0]):
            alone = name.replace("_exps", f".{expert}")
            layout[alone], data[alone] = (info.kind, info.shape[1:]), raw[expert]
    head = {key: Typed(file.metadata.type_of(key), file.metadata[key]) for key in file.metadata}
    with atomic_gguf(tmp_path / "old.gguf", head, layout) as writer:
        for name, raw in data.items():
            writer.write(name, raw)
    old = tmp_path / "old.gguf"
    assert "blk.0.ffn_gate.3.weight" in GgufFile(old)
    found, expected = (logits(gguf_checkpoint.load(each, torch.float32)) for each in (old, path))
    assert torch.equal(found, expected)


DENSE_NORM = 1e-6  # absolute: Gemma's norms lose one and get it back


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_of_each_family_becomes_a_dense_folder_in_its_form(kind: str, made: Made, tmp_path: Path) -> None:
    source, path = made(kind)
    out = convert(path, tmp_path / "dense", to="dense").path
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=DENSE_NORM if "norm" in name else 0)
    ours, theirs = hf.Checkpoint.open(out).config, hf.Checkpoint.open(source).config
    assert (ours.windows, ours.scale) == (theirs.windows, theirs.scale)
    for rope, other in zip(ours.ropes, theirs.ropes, strict=True):
        assert (rope is None) == (other is None)
        if rope is not None and other is not None:
            torch.testing.assert_close(frequencies(rope, 64), frequencies(other, 64))
    expected_logits = logits(gguf_checkpoint.load(path, torch.float32))
    limit = SAME * expected_logits.abs().max().item()
    torch.testing.assert_close(logits(hf.load(out, torch.float32)), expected_logits, rtol=0, atol=limit)
    peer, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs_logits = peer.eval()((torch.arange(LENGTH) * 11 % 96)[None]).logits[0]
    torch.testing.assert_close(theirs_logits, expected_logits, rtol=0, atol=2 * limit)


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "qwen2moe"])
def test_quantized_files_are_bfloat16_unless_something_else_is_asked_for(kind: str, made: Made, tmp_path: Path) -> None:
    path = requantized(made(kind)[1], tmp_path / "q8_0.gguf")
    exact = convert(path, tmp_path / "exact", to="dense", dtype="float32")
    assert exact.packed > 0
    expected = logits(gguf_checkpoint.load(path, torch.float32))
    limit = SAME * expected.abs().max().item()
    torch.testing.assert_close(logits(hf.load(exact.path, torch.float32)), expected, rtol=0, atol=limit)
    out = convert(path, tmp_path / "out", to="dense")
    assert (out.dtype, out.packed) == ("bfloat16", exact.packed)
    ours, theirs = (load_file(made.path / "model.safetensors") for made in (out, exact))
    assert all(torch.equal(ours[name], values.bfloat16()) for name, values in theirs.items())
    assert dense(path, tmp_path / "bench") == tmp_path / "bench"
    assert (tmp_path / "bench" / "model.safetensors").read_bytes() == (out.path / "model.safetensors").read_bytes()


def requantized(path: Path, out: Path) -> Path:
    """The file with every matrix in Q8_0 whose rows are whole blocks, by the `gguf` package."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        matrix = tensor.data.ndim > 1 and tensor.data.shape[-1] % 32 == 0 and "position" not in tensor.name
        if matrix:
            kind8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(tensor.data, kind8), raw_dtype=kind8)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
