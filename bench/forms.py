"""What each form of weights costs on the CPU, beside 4 bits in groups of 128: bytes, memory at load, tokens a second.

    python bench/forms.py [--shape llama-3.2-1b] [--schemes w4g128 q4_k_m ...] [--rounds 3] [--prompt 128] [--gen 32]

A scheme is a short name of attar's (`q4_k`, `nf4`, `fp8-weight`, `sparse24` ...) or a mix of GGUF (`q4_k_m`), whose
matrices have different types. Weights are random, in the shape of a published model; what a form costs does not depend
on them. The output matrix of a mix is what the mix says, of any other scheme `--head`. All take turns in every round,
ratios are to the first scheme's in the same round, and the read bandwidth is measured in it. `read` is the bytes of a
token over the time of a step, as a fraction of that bandwidth: what is near 1 can only gain by being smaller. Run it on
a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial

import torch
from torch import Tensor

from attar.evaluation import decode_speed
from attar.formats.codecs import ggml_mix
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.operands import Linear
from attar.model import assembly
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.shapes import shape

SCHEMES = ("w4g128", "q4_k_m", "q4_k", "q6_k", "q8_0", "iq4_xs", "nf4", "nvfp4-weight", "fp8-weight", "sparse24")
FILES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
         "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip


class Mixed(decode_speed.RandomWeights):
    """Weights of the types that a mix of GGUF gives them."""

    def __init__(self, config: ModelConfig, mix: ggml_mix.Mix) -> None:
        super().__init__(config, "w4g128", "int4")
        self._mix, self._name = mix, config.names.head
        self._about = ggml_mix.About(config.layers, config.heads, config.kv_heads, tied=True, calibrated=False)

    def linear(self, name: str) -> Linear:
        self._name = name
        return super().linear(name)

    def _weight(self, size: tuple[int, int], scheme: Scheme | None) -> Tensor | PackedTensor:
        at = self._name.split(".")
        matrix, layer = (ggml_mix.HEAD, 0) if self._name == self.config.names.head else (FILES[at[-1]], int(at[2]))
        kind, _ = ggml_mix.choose(self._mix, matrix, layer, size[1], self._about)
        return super()._weight(size, ggml_mix.scheme(kind))


def make(model: str, scheme: str, head: str, store: dispatch.BackendWeights) -> Decoder:
    mix = ggml_mix.find(scheme) if scheme.endswith(("_m", "_s", "_l")) else None
    if mix is None:
        return decode_speed.build(model, scheme, head, store)
    config = shape(model)
    return assembly.build(config, Mixed(config, mix), None, store)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, metavar="NAME")
    parser.add_argument("--head", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=32)
    options = parser.parse_args()
    load, rounds = decode_speed.Load(options.prompt, options.gen), []
    for _ in range(options.rounds):
        rounds.append(
            {
                scheme: decode_speed.run(partial(make, options.shape, scheme, options.head), load)
                for scheme in options.schemes
            }
        )
    first, report = options.schemes[0], {}
    print(
        f"{'scheme':<14}{'MB/token':>10}{'decode tok/s':>14}{'':>8}{'read':>7}"
        f"{'prefill tok/s':>15}{'':>8}{'refused':>9}"
    )
    for scheme in options.schemes:
        mine = [taken[scheme] for taken in rounds]
        middle = {
            key: statistics.median(each[key] for each in mine)
            for key in ("decode_tok_s", "prefill_tok_s", "read_fraction", "peak_rss_mb", "load_s")
        }
        ratio = {
            key: statistics.median(taken[scheme][key] / taken[first][key] for taken in rounds)
            for key in ("decode_tok_s", "prefill_tok_s")
        }
        size, refused = mine[0]["bytes_per_token"], len(mine[0]["reference_linears"])
        report[scheme] = middle | {"bytes_per_token": size, "over_first": ratio, "reference_linears": refused}
        print(
            f"{scheme:<14}{size / 1e6:>10.0f}{middle['decode_tok_s']:>14.1f}{ratio['decode_tok_s']:>7.2f}x"
            f"{middle['read_fraction']:>7.0%}{middle['prefill_tok_s']:>15.1f}{ratio['prefill_tok_s']:>7.2f}x{refused:>9}"
        )
    print(json.dumps({"bench": "forms", "threads": torch.get_num_threads(), "shape": options.shape, "schemes": report}))


if __name__ == "__main__":
    main()
