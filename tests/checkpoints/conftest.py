"""A tiny random Llama, and ways to store it and to run it, by transformers and by us."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.receipts import probes
from attar.model.decoder import Decoder
from tests.checkpoints.sources.loopback_hub import Hub


@torch.inference_mode()
def make_probes(decoder: Decoder, seed: int) -> dict[str, Any]:
    """Probes of a whole decoder of the reference that computes in float32. Reads its blocks once, in order."""
    assert decoder.dtype == torch.float32
    assert decoder.store is None
    run = probes.ProbeRun(decoder.config, seed)
    rows = decoder.embedding.forward(run.ids.flatten(), torch.arange(probes.LENGTH).repeat(len(run.ids)))
    observed = []
    for layer, block in enumerate(decoder.blocks):
        rows, seen = run.run(layer, copy.deepcopy(block), rows)
        observed.append(seen)
    return run.finish(
        observed, run.logits(decoder.final_norm, replace(decoder.head), rows[probes.LENGTH - 1 :: probes.LENGTH])
    )


class Tiny:
    """Two layers, grouped queries, an output matrix of its own, random norms; logits of std about 1."""

    ids = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(7))

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
        generator = torch.Generator().manual_seed(0)
        self.model = LlamaForCausalLM(config).eval()
        for name, parameter in self.model.named_parameters():
            offset, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
            parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)

    @property
    def config(self) -> dict[str, Any]:
        return {**self.model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @property
    def linears(self) -> dict[str, torch.nn.Linear]:
        """Those of the blocks, by name."""
        modules = {name: m for name, m in self.model.named_modules() if isinstance(m, torch.nn.Linear)}
        modules.pop("lm_head")
        return modules

    def write(self, folder: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
        """A checkpoint of one file: this model's, but for what is given; a key of None is left out."""
        folder.mkdir(exist_ok=True)
        merged = {key: value for key, value in {**self.config, **config}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(merged))
        kept = self.tensors if tensors is None else tensors
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")
        return folder

    def their_logits(self, model: Any = None) -> Tensor:
        with torch.no_grad():
            logits: Tensor = (model or self.model)(self.ids[None]).logits[0].float()
        return logits

    def our_logits(self, folder: Path) -> Tensor:
        from attar.checkpoints.sources import hf
        from attar.model.cache import ForwardBatch

        return hf.load(folder, torch.float32).forward(self.ids, ForwardBatch((len(self.ids),), len(self.ids)))

    @staticmethod
    def difference(ours: Tensor, theirs: Tensor) -> float:
        """The largest difference, over the range of the logits."""
        assert ours.shape == theirs.shape
        assert theirs.std() > 0.5
        return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A server of the Hub on this machine, whose files are downloaded to a folder of the test."""
    server = Hub()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
