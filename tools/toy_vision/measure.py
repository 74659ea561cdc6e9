"""Count the right answers of the toy that sees: in 16 bits, compressed, and with the pictures shuffled.

    PYTHONPATH=src:tools python -m toy_vision.measure WORK --pictures 5000

The pictures are held out: each question is about an object whose combination of shape, colour and cell no picture of
training has. Every answer goes the way of a user: a PNG file to `LLM.generate`, greedy. The compressed model is
calibrated on pictures of training with their questions and answers. The interval of its loss is over pairs: the same
picture, asked of both. Shuffled: each question gets another's picture.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from toy_vision import checkpoint, scenes

import attar
from attar import LLM, SamplingParams

Hits = NDArray[np.bool_]

TOGETHER = 100  # questions that run together
CALIBRATION = 128  # pictures of training
SHUFFLED = 1000  # questions with another's picture, at most
NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution
GREEDY = SamplingParams(max_tokens=8, temperature=0)
CHANCE = {"shape": 1 / 5, "colour": 1 / 6, "count": 1 / 4, "position": 1 / 9}
"""The share of right answers of who draws one of a kind's answers at random."""


def png(scene: scenes.Scene) -> bytes:
    """Return a scene's picture as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(scene.pixels).save(file, "PNG")
    return file.getvalue()


def prompt(one: scenes.Question) -> str:
    """Return a question as the checkpoint's chat template has it, but for BOS."""
    return f"<|endoftext|><image>{one.text}\n"


def right(llm: LLM, questions: Sequence[scenes.Question], pictures: Sequence[scenes.Scene]) -> Hits:
    """Return of each question whether a model's greedy answer, with the picture of the same place, is the right one."""
    hits: list[bool] = []
    for first in range(0, len(questions), TOGETHER):
        part = slice(first, first + TOGETHER)
        asked, images = questions[part], [[png(each)] for each in pictures[part]]
        answers = llm.generate([prompt(one) for one in asked], GREEDY, images=images)
        hits += [answer.text == one.answer for answer, one in zip(answers, asked, strict=True)]
    return np.array(hits)


def interval(values: NDArray[np.float64]) -> str:
    """Return a mean in percent with its 95 % interval."""
    mean, half = 100 * values.mean(), 100 * NORMAL * values.std(ddof=1) / math.sqrt(len(values))
    return f"{mean:.2f} % [{mean - half:.2f}, {mean + half:.2f}]"


def calibration(folder: Path) -> tuple[Path, Path]:
    """Write pictures of training with a question and its answer each; return their folder, and a file of the texts."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, texts = [], []
    for number, scene in enumerate(islice(scenes.scenes("training", seed=0), CALIBRATION)):
        possible = (scenes.question(scene, kind) for kind in scenes.KINDS[number % 4 :] + scenes.KINDS)
        one = next(each for each in possible if each is not None)
        texts.append(f"{one.text}\n{one.answer}")
        (folder / f"{number}.png").write_bytes(png(scene))
        lines.append(json.dumps({"file_name": f"{number}.png", "text": texts[-1]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    text = folder / "calibration.txt"
    text.write_text("\n".join(texts * 8))
    return folder, text


def compressed(work: Path, recipe: str) -> Path:
    """Write the toy in 16 bits, and compressed; return the latter's folder."""
    checkpoint.write(work / "toy")
    images, text = calibration(work / "calibration")
    request = attar.CompressionRequest(
        work / "toy", work / recipe, recipe=recipe, calibration=text, samples=CALIBRATION, length=128,
        calib_images=images, overwrite=True,
    )  # fmt: skip
    attar.compress_request(request)
    return work / recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the models")
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--recipe", default="guided-w4g128")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    items = scenes.held_out(args.pictures, args.seed)
    pictures, questions = [scene for scene, _ in items], [one for _, one in items]
    print(f"{platform.processor() or platform.machine()}, {len(items)} held-out pictures, seed {args.seed}", flush=True)

    def asked(name: str, path: Path, of: Sequence[scenes.Scene]) -> Hits:
        """Ask a model, print its row and return its hits."""
        llm, some = LLM(path), questions[: len(of)]
        hits = right(llm, some, of)
        llm.close()
        kinds = ", ".join(
            f"{kind} {100 * np.mean([hit for hit, one in zip(hits, some, strict=True) if one.kind == kind]):.1f}"
            for kind in scenes.KINDS
        )
        print(f"{name}: {interval(hits.astype(float))} right ({kinds})", flush=True)
        return hits

    small = compressed(args.work, args.recipe)
    first, second = asked("16 bits", args.work / "toy", pictures), asked(args.recipe, small, pictures)
    print(f"loss of {args.recipe}: {interval(first.astype(float) - second)} of the pictures", flush=True)
    order = np.random.default_rng(args.seed).permutation(min(SHUFFLED, len(items)))
    another = dict(zip(order, np.roll(order, 1), strict=True))
    asked("16 bits, pictures shuffled", args.work / "toy", [pictures[another[at]] for at in range(len(order))])
    print(f"chance: {100 * np.mean([CHANCE[one.kind] for one in questions]):.2f} %")


if __name__ == "__main__":
    main()
