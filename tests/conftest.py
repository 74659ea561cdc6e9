"""Fixtures that several rooms share: the data folder, and small checkpoints to work on."""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import real_models
import torch
from hypothesis import settings

from attar import faults

if TYPE_CHECKING:
    from attar.kernels.dispatch import BackendWeights
    from attar.model.decoder import Decoder

ROOT = Path(__file__).resolve().parent.parent
THREADS = torch.get_num_threads()

# How long an example takes is the machine's affair. Examples are the same in every run, for a check that says whether
# a change is good must not depend on luck: `--hypothesis-profile random` looks for new ones.
settings.register_profile("attar", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("attar")


@pytest.fixture(autouse=True)
def same_in_every_run() -> Iterator[None]:
    """Random numbers, and as many threads as at the beginning, whatever was loaded since: they decide about bits. No
    fault that a test arms is armed in another."""
    torch.manual_seed(0)
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
    yield
    faults.arm()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real texts, tokenizers and models, which is not part of the project."""
    folder = Path(os.environ.get("ATTAR_TEST_DATA", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no test data at {folder}: set ATTAR_TEST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Find the file of a real, trained model by its name in `bench/real_models.py`. Skip where it cannot be used."""
    place, against = real_models.folder(), functools.cache(real_models.against)

    def find(name: str) -> Path:
        if (reason := against(name, place)) is not None:
            pytest.skip(reason)
        assert place is not None
        return place / real_models.MODELS[name].file

    return find


@pytest.fixture(scope="session")
def demo() -> Path:
    """The embedded model."""
    from attar.checkpoints.sources.hub import embedded

    return embedded()


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """TinyStories-656K: trained, grouped queries, tied, and stored with only `lm_head.weight`."""
    return shared / "models" / "TinyStories-656K"


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., Decoder]:
    """Builds a small Llama of random weights:
    `tiny_decoder(seed=0, layers=3, vocab=97, scheme=None, tensors=None, store=None, rope=None)`.

    `scheme` names what its linears are quantized to; `tensors` replaces tensors by name; with a `store` the model is
    laid out for the native kernels.
    """
    from attar.formats.packed import codec
    from attar.formats.scheme import Scheme
    from attar.kernels.operands import Linear
    from attar.model.assembly import build
    from attar.model.config import ModelConfig, Rope

    class Random:
        """Weights made when they are asked for; a name and a seed always give the same."""

        def __init__(
            self, config: ModelConfig, seed: int, scheme: str | None, tensors: dict[str, torch.Tensor]
        ) -> None:
            self.config, self.seed, self.tensors = config, seed, tensors
            self.scheme = None if scheme is None else Scheme.parse(scheme)

        def has(self, name: str) -> bool:
            return name != "lm_head.weight" and not name.endswith(".bias")

        def tensor(self, name: str) -> torch.Tensor:
            if name in self.tensors:
                return self.tensors[name]
            config, numbers = self.config, torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            if "norm" in name:
                return torch.rand(config.hidden, generator=numbers) + 0.5
            query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
            shape = {
                "embed_tokens": (config.vocab_size, config.hidden),
                "q_proj": (query, config.hidden),
                "k_proj": (key, config.hidden),
                "v_proj": (key, config.hidden),
                "o_proj": (config.hidden, query),
                "gate_proj": (config.intermediate, config.hidden),
                "up_proj": (config.intermediate, config.hidden),
                "down_proj": (config.hidden, config.intermediate),
            }[name.split(".")[-2]]
            return torch.randn(shape, generator=numbers) / (1 if "embed" in name else shape[1] ** 0.5)

        dtype = torch.float32
        matrix = tensor

        def linear(self, name: str) -> Linear:
            weight = self.tensor(f"{name}.weight")
            packed = None if self.scheme is None else codec(self.scheme.weight.kind).quantize(weight, self.scheme)
            return Linear(name, weight if packed is None else packed)

    def make(
        seed: int = 0,
        layers: int = 3,
        vocab: int = 97,
        scheme: str | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        store: BackendWeights | None = None,
        rope: Rope | None = None,
        window: int | None = None,
    ) -> Decoder:
        config = ModelConfig(
            "LlamaForCausalLM", vocab_size=vocab, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128,
            context=64, windows=(*(window,) * (layers - 1), None), ropes=(rope or Rope(10000.0, 16),) * layers,
            tied=True,
        )  # fmt: skip
        return build(config, Random(config, seed, scheme, tensors or {}), store=store)

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers without a tokenizer, for whatever does not ask whether a model is any good."""
    from safetensors.torch import save_file

    hidden, heads, kv_heads, wide, layers, vocab = 128, 4, 2, 256, 3, 256
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden) * 8, "lm_head.weight": matrix(vocab, hidden) * 4}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(layers):
        at = f"model.layers.{i}"
        head = hidden // heads
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = (1 + 0.1 * torch.randn(hidden, generator=generator)).bfloat16()
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv_heads * head, hidden),
            ("self_attn.v_proj", kv_heads * head, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            tensors[f"{at}.{name}.weight"] = matrix(rows, columns)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": vocab,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": wide, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def token_ids(rows: int, columns: int, vocab: int = 256, seed: int = 0) -> list[list[int]]:
    """Random token ids for models without a tokenizer."""
    return torch.randint(0, vocab, (rows, columns), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def calibration() -> list[list[int]]:
    """Eight sequences of 32 tokens for `tiny`."""
    return token_ids(8, 32)
