"""How good a draft head is for its target: right drafts by depth, tokens a step and speed, as the engine drafts.

A head's drafts follow from the target's hidden states, so there is no second model to compare distributions with
(`draft_quality.py`). The target continues prompts of a text with a fixed number of drafts in every step, and the
engine counts. One half of the texts predicts the other's tokens a step, and with measured costs of steps and drafts
its speed. Draft models can be measured in the same way, so that all kinds of drafts stand in one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attar.engine.llm.llm import LLM
from attar.engine.speculation import Speculation
from attar.evaluation import row_costs
from attar.evaluation.draft_quality import PROMPTS, TOKENS, Speed, seconds_of, speed_lines
from attar.metrics import greedy
from attar.progress import Progress
from attar.protocol.request import SamplingParams
from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.text.files import read_text

COUNTS = (0, 1, 2, 3, 4)  # drafts in a step
DEPTHS = max(COUNTS)


@dataclass(frozen=True, slots=True)
class Steps:
    """Counts over decode steps: by depth, the drafts that follow right ones (`tried`), and how many were `right`."""

    steps: int
    tried: tuple[int, ...]
    right: tuple[int, ...]

    def tokens(self, count: int) -> float:
        """Return the mean tokens of a step with `count` drafts."""
        return 1 + sum(self.right[:count]) / max(1, self.steps)

    def combined(self, other: Steps, sign: int = 1) -> Steps:
        """Return the sums of both, or with -1 the differences."""
        return Steps(
            self.steps + sign * other.steps,
            tuple(a + sign * b for a, b in zip(self.tried, other.tried, strict=True)),
            tuple(a + sign * b for a, b in zip(self.right, other.right, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class HeadQuality:
    """What was measured of a drafter, over `tokens` tokens at a temperature."""

    drafter: str
    tokens: int
    temperature: float
    acceptance: tuple[float, ...]  # share of right drafts at each depth, behind right ones
    tried: tuple[int, ...]  # drafts at each depth behind right ones
    draft_cost: float  # seconds of a draft, over those of the target's step of one row
    speeds: tuple[Speed, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return the figures as text."""
        lines = [
            f"{self.drafter}: {self.tokens:,} tokens at temperature {self.temperature:g}; a draft costs "
            f"{self.draft_cost:.2f} steps",
            "",
            "depth  right drafts  of",
            *(
                f"{depth:5}  {share:12.3f}  {of}"
                for depth, (share, of) in enumerate(zip(self.acceptance, self.tried, strict=True), 1)
            ),
            "",
            *speed_lines(self.speeds),
        ]
        return "\n".join(lines)


def measure(
    model: str | Path,
    draft: str,
    text: Path,
    *,
    temperature: float = 0.0,
    progress: Progress | None = None,
    texts: int | None = None,
    length: int | None = None,
) -> HeadQuality:
    """Measure the drafts of a head, or of any drafter, for `model`, on `texts` continuations of `length` tokens behind
    prompts of a text. Raises ValueError where one cannot be loaded, they do not fit together, or the text is too
    short."""
    texts, length = texts or PROMPTS, length or TOKENS
    told = progress or (lambda stage, done, total: None)
    target = LLM(model, draft=draft, draft_tokens=MAX_DRAFT_TOKENS, verify=False, progress=progress)
    tokens = target.tokenizer.encode(read_text(text), add_special_tokens=False)
    prompts = greedy.prompts([tokens], texts, target.tokenizer.added_bos, target.context).tolist()
    params = SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True, draft_tokens=DEPTHS)
    first = _counted(target, prompts[: texts // 2], params, 0)
    told("texts", 1, 2 + len(COUNTS))
    second = _counted(target, prompts[texts // 2 :], params, texts // 2)
    both = first.combined(second)
    rows = row_costs.measure(target.decoder, target.decoder.lossless, greedy.PROMPT, range(1, DEPTHS + 2))
    drafting = _speculation(target).draft_cost
    speeds, alone = [], 0.0
    for place, count in enumerate(COUNTS):
        took = seconds_of(target, prompts[texts // 2 :], replace(params, draft_tokens=count))
        alone = took if count == 0 else alone
        guess = first.tokens(count)
        faster = guess * rows[0] / (rows[count] + count * drafting)
        speeds.append(Speed(count, guess, second.tokens(count), faster, alone / took))
        told("texts", 3 + place, 2 + len(COUNTS))
    made = _speculation(target).drafter
    assert made is not None
    return HeadQuality(
        made.name, texts * length, temperature,
        tuple(right / tried for right, tried in zip(both.right, both.tried, strict=True) if tried),
        tuple(filter(None, both.tried)), drafting / rows[0], tuple(speeds),
    )  # fmt: skip


def _counted(target: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, number: int) -> Steps:
    """Continue prompts one by one, the first with this number, and return what their steps brought."""
    target.generate([prompts[0]], replace(params, max_tokens=2 * DEPTHS, seed=0))  # steps are recorded
    before = _so_far(target)
    for place, prompt in enumerate(prompts, number):
        target.generate([prompt], replace(params, seed=place))
    return _so_far(target).combined(before, -1)


def _speculation(target: LLM) -> Speculation:
    engine = target.running.engine
    assert engine is not None, "it has generated"
    assert engine.speculation is not None, "it has a drafter"
    return engine.speculation


def _so_far(target: LLM) -> Steps:
    gains = _speculation(target).gains
    right = tuple(gains.accepted[depth] for depth in range(DEPTHS))
    drafted = [gains.drafted[depth] for depth in range(DEPTHS)]
    tried = tuple(min(a, b) for a, b in zip(drafted, (gains.steps, *right[:-1]), strict=True))
    return Steps(gains.steps, tried, right)
