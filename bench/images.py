"""A text's pace while a vision tower works, how long an image takes then, and the pace behind an image: ratios to each
alone, in one run.

    PYTHONPATH=src python bench/images.py [MODEL] [--tokens 200] [--threads 1] [--side 512] [--width 768] [--layers 12]

MODEL is any checkpoint, by default the embedded one. Its tower is a SigLIP of random weights: 16-pixel patches of one
tile, shuffled by 4 x 4 into feature rows. TPOT: seconds between tokens of the text. First: seconds from an image's
arrival to its answer's first token. Behind: the median time per token of an answer behind an image over that behind as
many tokens of text, which take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise

import torch

from attar.checkpoints.sources import hub, opening
from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.kernels import dispatch
from attar.kernels.operands import Linear
from attar.model.vision import assembly
from attar.model.vision.config import VisionConfig, VisionNames
from attar.model.vision.model import VisionModel
from attar.model.vision.tensors import tensors
from attar.protocol.images import ImageInput, digest_of
from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig


class RandomWeights:
    """Tensors of any name, of the shapes that a configuration states."""

    def __init__(self, config: VisionConfig) -> None:
        self.shapes = {name: shape for _, name, shape in tensors(config)}

    def _of(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name.removeprefix("t."))

    def has(self, name: str) -> bool:
        return self._of(name) is not None

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        shape = self._of(name)
        assert shape is not None
        return "float32", shape

    def read(self, name: str) -> torch.Tensor:
        shape = self._of(name)
        assert shape is not None
        return torch.randn(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)

    def packed(self, module: str) -> bool:
        return False

    def linear(self, module: str) -> Linear:
        raise AssertionError(f"{module} is dense")


def tower(args: argparse.Namespace, out: int) -> VisionModel:
    config = VisionConfig(
        hidden=args.width, heads=args.width // 64, intermediate=4 * args.width, layers=args.layers, patch=16,
        image_size=args.side, out=out, connector="shuffle", factor=4, image_token=5, projector_bias=False,
        names=VisionNames(("t.",), ("t.",)),
    )  # fmt: skip
    return assembly.build(config, RandomWeights(config), torch.float32, dispatch.store("exact"))


def image(number: int, side: int, rows: int) -> ImageInput:
    tiles = torch.randint(0, 256, (side * side * 3,), dtype=torch.uint8).numpy().tobytes()
    digest = digest_of(number.to_bytes(4, "little"), (1, side, side), (side, side), tiles)
    return ImageInput(digest, tiles, (1, side, side), (0, 0), (side, side), rows)


def text(tokens: int) -> Submit:
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0, ignore_eos=True)
    return Submit("text", tuple(range(10, 74)), params)


def seen(number: int, own: ImageInput, tokens: int = 1) -> Submit:
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0, ignore_eos=True)
    return Submit(f"image {number}", (10, *[5] * own.rows, 11, 12), params, images=(own,))


def first(engine: Engine, ask: Submit) -> float:
    began = time.perf_counter()
    engine.submit(ask)
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def gaps(engine: Engine, tokens: int, ask: Submit | None = None) -> tuple[list[float], float]:
    """Return the seconds between the text's tokens, with an image those while it is encoded, and its seconds."""
    engine.submit(text(tokens))
    found, taken, last, began = list[float](), 0.0, None, 0.0
    made = encoded = 0
    assert engine.images is not None
    while not engine.idle:
        for event in engine.step():
            now = time.perf_counter()
            if isinstance(event, Delta) and event.id == "text":
                made += 1
                if last is not None and (ask is None or (began and encoded == engine.images.encoded)):
                    found.append(now - last)
                last = now
                if made == 8 and ask is not None:
                    began = time.perf_counter()
                    encoded = engine.images.encoded
                    engine.submit(ask)
            elif isinstance(event, Delta):
                taken = now - began
    assert ask is None or taken, "the text was shorter than the image took: raise --tokens"
    return found, taken


def pace(engine: Engine, ask: Submit) -> float:
    """Return the median of the seconds between the tokens of one request alone."""
    engine.submit(ask)
    times = []
    while not engine.idle:
        made = any(isinstance(event, Delta) for event in engine.step())
        times += [time.perf_counter()] * made
    return statistics.median(b - a for a, b in pairwise(times))


def behind(engine: Engine, side: int, rows: int, tokens: int, rounds: int = 5) -> float:
    """Return the median ratio of the pace behind an image to that behind as many tokens of text."""
    found = []
    for number in range(rounds):
        own = image(100 + number, side, rows)
        plain = Submit(f"plain {number}", (10, *range(100, 100 + rows), 11, 12), seen(0, own, tokens).params)
        found.append(pace(engine, seen(100 + number, own, tokens)) / pace(engine, plain))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    for name, number in (("tokens", 200), ("threads", 1), ("side", 512), ("width", 768), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    decoder = opening.load(hub.resolve(args.model), torch.float32, None, dispatch.store("int8g128"))
    vision = tower(args, decoder.config.hidden)
    rows = (args.side // 64) ** 2
    limits = SchedulerConfig(max_running=4, max_step_tokens=256)
    config = EngineConfig(64, 1024, limits, tower=vision)
    engine = Engine(decoder, None, config)
    gaps(engine, 16)
    idle, _ = gaps(engine, 64)
    alone = first(engine, seen(1, image(1, args.side, rows)))
    after = behind(engine, args.side, rows, 64)
    both, taken = gaps(engine, args.tokens, seen(2, image(2, args.side, rows)))
    idle.sort()
    both.sort()

    def p99(values: list[float]) -> float:
        return values[min(len(values) - 1, int(0.99 * len(values)))]

    print(
        json.dumps(
            {
                "idle_tpot_ms": round(1e3 * idle[len(idle) // 2], 2), "idle_p99_ms": round(1e3 * p99(idle), 2),
                "tpot_ms": round(1e3 * both[len(both) // 2], 2), "p99_ms": round(1e3 * p99(both), 2),
                "p99_ratio": round(p99(both) / p99(idle), 3), "tokens": len(both),
                "first_alone_s": round(alone, 3), "first_s": round(taken, 3), "first_ratio": round(taken / alone, 3),
                "behind_ratio": round(after, 3),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
