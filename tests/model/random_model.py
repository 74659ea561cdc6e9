"""Checkpoints of random weights for any config.json, dense or quantized, and models in several threads."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.layouts import export_layouts
from attar.checkpoints.sources import shards
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels.group import Group
from attar.model.families import read_config
from attar.model.parallel import Groups, SplitDecoder
from attar.model.split import Share
from attar.plan.costs import matrices

T = TypeVar("T")

SIZES = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES, **HEADS}


def write(folder: Path, config: Mapping[str, Any], scheme: str | None = None, seed: int = 0) -> Path:
    """A model folder; with a `scheme`, whose linears are quantized to it."""
    folder.mkdir()
    model, numbers = read_config(config), torch.Generator().manual_seed(seed)
    names, tensors, settings = model.names, dict[str, Tensor](), dict[str, Any]()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    tensors[f"{names.embed}.weight"] = random(model.vocab_size, model.hidden)
    if names.positions is not None:
        tensors[f"{names.positions}.weight"] = random(model.learned_positions + model.position_offset, model.hidden)
    packed, shapes = {}, {}
    for each in matrices(model):
        if each.name == names.head and model.tied:
            continue
        weight = random(each.rows, each.columns) / each.columns**0.5
        if each.bias:
            tensors[f"{each.name}.bias"] = random(each.rows)
        if scheme is None or not each.compressible:
            tensors[f"{each.name}.weight"] = weight.T.contiguous() if names.is_transposed(each.name) else weight
            continue
        chosen = Scheme.parse(scheme)
        library = export_layouts.library_for([chosen])
        value = codec(chosen.weight.kind).quantize(weight, chosen)
        fixed = torch.tensor([0.02]) if chosen.static else None
        tensors |= export_layouts.parts_of(library, each.name, value, fixed)
        packed[each.name], shapes[each.name] = chosen, (each.rows, each.columns)
        settings = {"quantization_config": library.quantization_config(packed, [], (), shapes)}
    norms = [names.attention_norm, names.feed_forward_norm, names.attention_post_norm, names.feed_forward_post_norm]
    for name in [
        names.final_norm, *(f"{names.layer.format(i=i)}.{n}" for i in range(model.layers) for n in norms if n),
    ]:  # fmt: skip
        tensors[f"{name}.weight"] = 1 + 0.2 * random(model.hidden)
        if model.norm == "layer":
            tensors[f"{name}.bias"] = random(model.hidden)
    for i in range(model.layers if model.qk_norm else 0):
        for name in (names.q_norm, names.k_norm):
            tensors[f"{names.layer.format(i=i)}.{name}.weight"] = 1 + 0.2 * random(model.head_dim)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def together(path: Path, tp: int, pp: int, call: Callable[[SplitDecoder], T]) -> list[T]:
    """What `call` gives in each of the processes that share a model, which are threads here: collectives do not care.

    For models of the reference, which torch computes: native kernels are one thread's.
    """
    found: dict[int, T] = {}
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory() as folder:

        def run(share: Share) -> None:
            try:
                here = torch.device("cpu")
                layers = stages = None
                if tp > 1:
                    layers = Group(Path(folder) / f"layers{share.stage}", share.place, tp, here)
                if pp > 1:
                    stages = Group(Path(folder) / f"stages{share.place}", share.stage, pp, here)
                found[share.rank] = call(shards.load(path, share, Groups(layers, stages), torch.float32))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(share,), daemon=True) for share in Share(0, tp, pp).every()]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failed:  # the others wait for one that failed
                thread.join(0.1)
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(tp * pp)]
