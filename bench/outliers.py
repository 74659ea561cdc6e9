"""Give a checkpoint the activation outliers of large models without changing what it computes.

    python bench/outliers.py MODEL OUT [--kinds abcd]

Small trained models have no channels that stand out, and without them smoothing, scaling and rotating have nothing to
do. Four kinds, by a letter each, of a Llama checkpoint:

    a    six channels of each norm before q/k/v and before gate/up, times 20 to 100 in the norm's weight, divided in the
         columns that read them. Smoothing takes them back.
    b    six rows of each up, and two of each head of v, times as much, divided in the columns of down and o.
    c    two rotary pairs of each key head times as much, divided in the queries that meet them. Caches of keys see it.
    d    another basis of the residual stream: first the weights of norms go into what reads them, then the stream is
         rotated so that its three largest principal components, measured on text that the model samples, each lie in
         one channel. No scaling of channels takes that back.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.sources import hf, hub
from attar.compression.calibration import texts
from attar.compression.calibration.amount import Amount
from attar.model.cache import ForwardBatch

KINDS = "abcd"
CHANNELS = 6  # of a norm, and of up
VALUES, PAIRS = 2, 2  # of each head
COMPONENTS = 3
SMALLEST, LARGEST = 20.0, 100.0
AMOUNT = Amount(8, 128)  # of text that shows the components
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def inject(source: Path, target: Path, seed: int = 0, kinds: str = "a") -> Path:
    """Copy the Llama checkpoint `source` to `target` in float32, with outliers of some kinds."""
    if not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"kinds of outliers are letters of {KINDS}, not {kinds!r}")
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    tensors = {name: t.double() for name, t in load_file(source / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(seed)
    if "d" in kinds:
        _new_basis(tensors, config, _components(source), generator)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        if "a" in kinds:
            for norm, readers in READERS.items():
                chosen, factors = _drawn(config["hidden_size"], CHANNELS, generator)
                tensors[f"{at}.{norm}.weight"][chosen] *= factors
                for reader in readers:
                    tensors[f"{at}.{reader}.weight"][:, chosen] /= factors
        if "b" in kinds:
            chosen, factors = _drawn(config["intermediate_size"], CHANNELS, generator)
            tensors[f"{at}.mlp.up_proj.weight"][chosen] *= factors[:, None]
            tensors[f"{at}.mlp.down_proj.weight"][:, chosen] /= factors
            _in_heads(tensors, at, config, "v_proj", "o_proj", generator)
        if "c" in kinds:
            _in_heads(tensors, at, config, "k_proj", "q_proj", generator)
    stored = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target


def _drawn(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Channels of `size` with their factors."""
    chosen = torch.randperm(size, generator=generator)[:count]
    return chosen, (SMALLEST * (LARGEST / SMALLEST) ** torch.rand(count, generator=generator)).double()


def _in_heads(
    tensors: dict[str, Tensor], at: str, config: dict[str, int], larger: str, smaller: str, generator: torch.Generator
) -> None:
    """Rows of each key-value head times a factor, by which what meets them is divided."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    for g in range(groups):
        if larger == "v_proj":
            chosen, factors = _drawn(size, VALUES, generator)
        else:  # both halves of a rotary pair
            chosen, factors = _drawn(size // 2, PAIRS, generator)
            chosen, factors = torch.cat([chosen, chosen + size // 2]), factors.repeat(2)
        tensors[f"{at}.self_attn.{larger}.weight"][g * size + chosen] *= factors[:, None]
        for h in range(g * heads // groups, (g + 1) * heads // groups):
            meets = tensors[f"{at}.self_attn.{smaller}.weight"]
            if smaller == "o_proj":
                meets[:, h * size + chosen] /= factors
            else:
                meets[h * size + chosen] /= factors[:, None]


@torch.inference_mode()
def _components(source: Path) -> Tensor:
    """The principal components of the residual stream, in columns, the largest first: [hidden, hidden] float64."""
    decoder = hf.load(source, torch.float32)
    ids = texts.sample_from(decoder, AMOUNT)
    moment = torch.zeros(decoder.config.hidden, decoder.config.hidden, dtype=torch.float64)

    def add(layer: int, hidden: Tensor) -> None:
        directions = hidden.double() / hidden.double().norm(dim=1, keepdim=True)
        moment.add_(directions.T @ directions)

    decoder.forward(ids.flatten(), ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1]), watch=add)
    components: Tensor = torch.linalg.eigh(moment)[1].flip(1)
    return components


def _new_basis(
    tensors: dict[str, Tensor], config: dict[str, object], components: Tensor, generator: torch.Generator
) -> None:
    """Fold norms, untie the output matrix, and rotate the stream: components to channels, the rest at random."""
    hidden = len(components)
    rest = hidden - COMPONENTS
    mixed = torch.linalg.qr(torch.randn(rest, rest, generator=generator, dtype=torch.float64))[0]
    basis = torch.cat([components[:, :COMPONENTS], components[:, COMPONENTS:] @ mixed], 1)
    basis = basis[:, torch.randperm(hidden, generator=generator)]
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors.setdefault(embed, tensors.get(head))  # type: ignore[arg-type]
    tensors[head] = tensors.get(head, tensors[embed]) * tensors["model.norm.weight"] @ basis
    tensors[embed] = tensors[embed] @ basis
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.float64)
    config["tie_word_embeddings"] = False
    for name in list(tensors):
        layer, _, kind = name.removesuffix(".weight").rpartition("layers.")[2].partition(".")
        if kind in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[name] = basis.T @ tensors[name]
        for norm, readers in READERS.items():
            if kind in readers:
                weight = tensors[f"model.layers.{layer}.{norm}.weight"]
                tensors[name] = tensors[name] * weight @ basis
    for name in tensors:
        if name.endswith(tuple(f"{norm}.weight" for norm in READERS)):
            tensors[name] = torch.ones(hidden, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a Hub id or `demo`")
    parser.add_argument("out", type=Path, help="a folder, which is made anew")
    parser.add_argument("--kinds", default=KINDS)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    inject(hub.resolve(args.model), args.out, kinds=args.kinds)


if __name__ == "__main__":
    main()
