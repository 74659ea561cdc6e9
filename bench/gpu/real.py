"""A trained model on the card: how far its logits are from exact ones, its texts, and how fast an engine writes them.

    PYTHONPATH=src:bench python -m gpu.real MODEL OUT --text FILE [--schemes w4g64 ...] [--minutes 3]

`MODEL` is a GGUF file or a folder. The base of every divergence is the same file in float32 by the reference on the
CPU, so nothing but the card's arithmetic differs. Each of `--schemes` is compressed first, by rounding to nearest, and
has a base of its own. Results go to OUT/gpu_real.json as they come.

| row | what it says |
|---|---|
| `kl` | mean and largest KL of 1,024 positions in windows of 512 tokens |
| `kv` | the same with keys and values kept in 8 or 4 bits, all rows decoded from the cache in chunks |
| `texts` | greedy texts judged by the exact model: tokens that are not its best, and the largest loss in logits |
| `speed` | tokens a second of so many greedy texts at a time, by the engine |
| `drafts` | the same with drafts of the text itself, and how many texts stay the same |

Where no card is at hand the CPU stands in for it: a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reals.divergence import compared

from attar import LLM
from attar.checkpoints import vocabulary
from attar.checkpoints.sources import opening
from attar.kernels import dispatch
from attar.kv.schemes import SCHEMES
from attar.metrics.perplexity import Window, plan_windows
from attar.metrics.streaming import Measurement, decoder_logits
from attar.protocol.request import SamplingParams

Row = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV = ("int8", "fp8", "int4")
LENGTH, TOKENS = 512, 1024
WRITTEN = 128  # tokens of a text
TOGETHER = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="text to score and to continue")
    parser.add_argument("--schemes", nargs="*", default=["w4g64", "w8a8", "fp8"])
    parser.add_argument("--minutes", type=float, default=3.0, help="after which nothing further is begun")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    until, rows = time.monotonic() + 60 * args.minutes, []
    parts = (divergences, caches, texts, speeds, compressed)
    for part in parts:
        if time.monotonic() > until:
            rows.append({"work": part.__name__, "left_out": "no time"})
            continue
        try:
            for row in part(args):
                rows.append(row)
                print(json.dumps(row), flush=True)
                (args.out / "gpu_real.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
                if time.monotonic() > until:
                    break
        except Exception as error:
            rows.append({"work": part.__name__, "error": f"{type(error).__name__}: {error}"[:2000]})
            print(json.dumps(rows[-1]), flush=True)
    (args.out / "gpu_real.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.exit(any("error" in row for row in rows))


def divergences(args: argparse.Namespace) -> Iterator[Row]:
    """The file itself in each dtype."""
    models = {
        name: opening.load(args.model, dtype, None, dispatch.store(device=DEVICE, dtype=dtype))
        for name, dtype in DTYPES.items()
        if DEVICE == "cuda" or dtype == torch.float32
    }
    base = decoder_logits(opening.load(args.model, torch.float32))
    found = compared({name: decoder_logits(each) for name, each in models.items()}, base, windows(args))
    for name, each in found.items():
        yield {"work": f"kl of {name}"} | figures(each)


def caches(args: argparse.Namespace) -> Iterator[Row]:
    """Keys and values in fewer bits, beside the same cache of the CPU, so that only the kernels differ."""
    if DEVICE != "cuda":
        return
    card = opening.load(args.model, torch.bfloat16, None, dispatch.store(device=DEVICE, dtype=torch.bfloat16))
    exact = opening.load(args.model, torch.float32)
    for kv in KV:
        made = {"card": decoder_logits(card, partial(card.cache, scheme=SCHEMES[kv]))}
        base = decoder_logits(exact, partial(exact.cache, scheme=SCHEMES[kv]))
        (found,) = compared(made, base, windows(args)).values()
        yield {"work": f"kl of bfloat16 with {kv} pages"} | figures(found)


def texts(args: argparse.Namespace) -> Iterator[Row]:
    """Greedy texts of the card, judged by the exact model: how far below its best token each one is."""
    params, prompts = SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True), beginnings(args, 8)
    exact = opening.load(args.model, torch.float32)
    for dtype in DTYPES if DEVICE == "cuda" else ("float32",):
        below = []
        for prompt, answer in zip(
            prompts, LLM(args.model, device=DEVICE, dtype=dtype).generate(prompts, params), strict=True
        ):
            ids = torch.tensor([*prompt, *answer.token_ids])
            (logits,) = decoder_logits(exact)(ids[:-1], len(prompt) - 1)
            below.append(logits.max(1).values - logits.gather(1, ids[len(prompt) :, None])[:, 0])
        losses = torch.cat(below)
        yield {
            "work": f"texts of {dtype}", "others": int((losses > 0).sum()), "of": losses.numel(),
            "largest": float(losses.max()),
        }  # fmt: skip


def speeds(args: argparse.Namespace) -> Iterator[Row]:
    """Greedy texts by the engine, with and without drafts from the text itself."""
    params = SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True)
    plain: dict[int, list[Sequence[int]]] = {}
    for draft in (None, "suffix"):
        llm = LLM(args.model, device=DEVICE, draft=draft)
        for together in TOGETHER:
            prompts = beginnings(args, together)
            llm.generate(prompts, params)  # compiles, records and fills the prefix cache
            began = time.perf_counter()
            answers: list[Sequence[int]] = [answer.token_ids for answer in llm.generate(prompts, params)]
            took = time.perf_counter() - began
            row: Row = {"work": f"speed of {together} at a time, drafts: {draft}", "tok_s": together * WRITTEN / took}
            if draft is None:
                plain[together] = answers
            else:
                row |= {"same": sum(a == b for a, b in zip(answers, plain[together], strict=True)), "of": together}
                row |= dict(zip(("drafted", "accepted"), llm.drafts, strict=True))
            yield row
        llm.close()


def compressed(args: argparse.Namespace) -> Iterator[Row]:
    """Packed weights of each scheme: compressed on the card, then beside their own reference."""
    for scheme in args.schemes:
        folder = args.out / f"made-{scheme}"
        began = time.perf_counter()
        attar("compress", str(args.model), str(folder), "--requantize", "--recipe", f"rtn-{scheme}",
              "--device", DEVICE, "--quiet")  # fmt: skip
        made = time.perf_counter() - began
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        card = opening.load(folder, dtype, None, dispatch.store(device=DEVICE, dtype=dtype))
        base = decoder_logits(opening.load(folder, torch.float32))
        (found,) = compared({"card": decoder_logits(card)}, base, windows(args, folder)).values()
        yield {"work": f"kl of {scheme}", "made_s": made} | figures(found)


def attar(*command: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "attar", *command], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"attar {' '.join(command)}: {ran.stderr[-1500:]}")


def windows(args: argparse.Namespace, model: Path | None = None) -> list[Window]:
    tokenizer = vocabulary.tokenizer(model or args.model)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    return plan_windows(ids[:TOKENS], LENGTH, bos=tokenizer.added_bos)


def beginnings(args: argparse.Namespace, count: int) -> list[list[int]]:
    """Prompts of 64 tokens from all over the text."""
    ids = vocabulary.tokenizer(args.model).encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    return [ids[at : at + 64] for at in range(0, len(ids) - 64, (len(ids) - 64) // count)][:count]


def figures(found: Measurement) -> Row:
    assert found.kl is not None
    assert found.agree is not None
    return {
        "kl": float(found.kl.mean()), "largest": float(found.kl.max()), "agree": float(found.agree.mean()),
        "tokens": found.tokens,
    }  # fmt: skip


if __name__ == "__main__":
    main()
