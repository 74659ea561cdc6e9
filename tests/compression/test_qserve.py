"""W4A8KV4 through the whole of `compress`: what SmoothAttention leaves as it was, what is stored, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import attar
from attar.checkpoints.convert import run as convert
from attar.checkpoints.sources import hf
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.evaluation.report import evaluate
from attar.formats.codecs import progressive
from attar.formats.packed import PackedTensor
from attar.formats.weight_formats import Progressive
from attar.model.cache import ForwardBatch
from tests.errors import user_error

HIDDEN, VOCAB, LENGTH = 128, 64, 24
SAME = 1e-5  # of float32, over the largest output
FAMILIES = {  # grouped queries; with a norm of each head; q, k and v in one, half of whose channels turn
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Phi3": {"pad_token_id": 0, "partial_rotary_factor": 0.5},
}


def write(folder: Path, family: str) -> Path:
    """One layer of a random model, in float32, with outlier channels in its keys."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = getattr(transformers, f"{family}ForCausalLM")(config).state_dict()
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor[3::32] *= 30
        elif name.endswith("k_norm.weight"):
            tensor[3] *= 30
        elif name.endswith("qkv_proj.weight"):
            tensor[HIDDEN + 3 : HIDDEN + 64 : 32] *= 30
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "dtype": "float32"})
    )
    return folder


def calibration() -> list[list[int]]:
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


def attention(folder: Path, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, outputs, keys) of the first layer for rows x that its attention reads."""
    one = hf.load(folder, torch.float32).blocks[0].attention
    step = ForwardBatch((len(x),), len(x))
    q, k, _ = one.heads(x, None if one.rope is None else step.rotation(one.rope))
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    return scores, one.forward(x, step), k


@pytest.mark.parametrize(("family", "alpha"), [("Llama", 0.5), ("Llama", None), ("Qwen3", None), ("Phi3", 0.5)])
def test_keys_are_smoothed_and_what_attention_gives_stays(family: str, alpha: float | None, tmp_path: Path) -> None:
    source = write(tmp_path / "source", family)
    recipe = recipe_from_dict(
        {
            "recipe": "smoothattention+rtn-qserve-g32",
            "key_alpha": alpha,
            "overrides": [{"match": "*.down_proj", "scheme": "qserve-g32"}, {"match": "*", "scheme": "keep"}],
        }
    )
    attar.compress(source, tmp_path / "out", recipe=recipe, calibration=calibration())
    x = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    (*before, rough), (*after, smooth) = (attention(folder, x) for folder in (source, tmp_path / "out"))
    for was, found in zip(before, after, strict=True):
        assert float((found - was).abs().max() / was.abs().max()) < SAME
    spread = [float((k.abs().amax((0, 1)) / k.abs().amax((0, 1)).median()).max()) for k in (rough, smooth)]
    assert spread[1] < 0.6 * spread[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qserve") / "source", "Llama")


def test_stored_read_back_tuned_and_run_with_a_cache_of_four_bits(source: Path, tmp_path: Path) -> None:
    def made(methods: str) -> tuple[Path, PackedTensor]:
        out = tmp_path / methods
        attar.compress(source, out, recipe=f"{methods}-qserve-g32", calibration=calibration())
        weight = hf.Checkpoint.open(out).linear("model.layers.0.mlp.down_proj").weight
        assert isinstance(weight, PackedTensor)
        return out, weight

    out, weight = made("rtn")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "attar"
    assert weight.scheme.weight == Progressive(32)
    assert weight.scheme.name == "qserve-g32"
    progressive.decode(weight)
    tuned, other = made("tune")
    assert all(other.parts[name].equal(part) for name, part in weight.parts.items() if name != "scale")
    assert not other.parts["scale"].equal(weight.parts["scale"])
    for folder in (out, tuned, made("smoothattention+guided+tune")[0]):
        report = evaluate(folder, against=source, tokens=calibration(), kv="int4")
        assert report.figures["kl_mean"].value < 0.1


def test_what_has_no_place_for_it_says_so(source: Path, tmp_path: Path) -> None:
    with user_error("gguf_inexpressible"):
        attar.compress(source, tmp_path / "out.gguf", recipe="rtn-qserve-g32")
    with user_error("scheme_unsupported"):
        attar.compress(source, tmp_path / "out", recipe="autoround-qserve-g32", calibration=calibration())
    dynamic = recipe_from_dict({"recipe": "gptq-qserve-g32", "order": "natural", "static_groups": False})
    with user_error("recipe_conflict"):
        attar.compress(source, tmp_path / "out", recipe=dynamic, calibration=calibration())
    with user_error("group_size_indivisible"):
        load_recipe("rtn-qserve-g128").schemes({"model.layers.0.mlp.down_proj": (8, 96)})
    attar.compress(source, tmp_path / "out", recipe="rtn-qserve-g32")
    for target in ("awq", "gptq", "gguf"):  # compressed-tensors holds its 8-bit level
        with user_error("conversion_inexact"):
            convert.convert(tmp_path / "out", tmp_path / ("a.gguf" if target == "gguf" else target), to=target)
