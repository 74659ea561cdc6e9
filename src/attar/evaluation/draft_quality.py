"""How good a draft model is for its target: distances, rejections, tokens a step and speed.

The target continues prompts of a text, with a seed. At each of its tokens the distributions p of the target and q of
the draft model are compared, both as sampled from. A position's chance of a rejection is TV(p, q) by the ratio test;
Yin et al. (arXiv 2411.00841) show that a text's expected rejections are the sum over its positions. By the match rule
with shared noise they are between the sum of TV and that of 2 TV / (1 + TV) (Daliri et al., arXiv 2408.07978). Whether
the draft model draws the target's token is seen at each position. From it follows how many tokens a step of K drafts
brings. One half of the texts predicts the other's. Costs of steps are measured, and predict the speed;
then the texts are generated with K drafts a step.

Distances by depth are those of the positions that drafts of this depth reach, all before them being right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.engine.llm.llm import LLM
from attar.errors import UserError
from attar.evaluation import row_costs
from attar.metrics import accept_rules, greedy
from attar.progress import Progress
from attar.protocol.request import SamplingParams
from attar.protocol.speculation import DRAFTERS, MAX_DRAFT_TOKENS
from attar.sampling.sampler import SampledToken, Sampler, distribution, sample
from attar.text.files import read_text

PROMPTS = 16
TOKENS = 64  # of each continuation
DEPTHS = 8
COUNTS = (0, 1, 2, 3, 4, 6, 8)  # drafts in a step


@dataclass(frozen=True, slots=True)
class Positions:
    """A continuation's tokens: the distance of p and q at each, and whether its draft was right by either rule."""

    tv: Tensor
    ratio: Tensor
    match: Tensor
    typical: float  # mean distance of typical acceptance from p


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens of a step with `drafts` drafts, and how many times as fast as without."""

    drafts: int
    predicted_tokens: float  # from the other half of the texts
    tokens: float
    predicted: float
    measured: float


def speed_lines(speeds: Sequence[Speed]) -> list[str]:
    """Return the lines of a report's table with tokens a step and speeds."""
    return [
        "drafts  tokens a step  predicted  times as fast  predicted",
        *(
            f"{each.drafts:6}  {each.tokens:13.2f}  {each.predicted_tokens:9.2f}  {each.measured:13.2f}  "
            f"{each.predicted:9.2f}"
            for each in speeds
        ),
    ]


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """What was measured, over `tokens` tokens at a temperature."""

    tokens: int
    temperature: float
    tv_by_depth: tuple[float, ...]
    typical_tv: float
    ratio_expected: float
    ratio_rejections: int
    match_least: float
    match_rejections: int
    match_most: float
    draft_cost: float  # seconds of a draft, over those of the target's step of one row
    speeds: tuple[Speed, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return the figures as text."""
        between = f"{self.match_least:.1f} to {self.match_most:.1f}"
        lines = [
            f"{self.tokens:,} tokens at temperature {self.temperature:g}; a draft costs {self.draft_cost:.2f} steps",
            f"ratio test      {self.ratio_rejections} rejections, {self.ratio_expected:.1f} expected",
            f"match rule      {self.match_rejections} rejections, {between} expected",
            f"typical         would change the distribution by {self.typical_tv:.3f} (mean TV)",
            "",
            "depth  mean TV",
            *(f"{depth:5}  {tv:7.3f}" for depth, tv in enumerate(self.tv_by_depth, 1)),
            "",
            *speed_lines(self.speeds),
        ]
        return "\n".join(lines)


def measure(
    model: str | Path, draft: str, text: Path, *, temperature: float = 1.0, progress: Progress | None = None
) -> DraftQuality:
    """Measure the draft model `draft` for `model`, on continuations of prompts of a text. Raises ValueError where one
    cannot be loaded, they do not fit together, or the text is too short."""
    if draft in DRAFTERS:
        raise UserError("option_conflict", f"{draft} has no distribution to compare: name a draft model")
    told = progress or (lambda stage, done, total: None)
    target = LLM(model, draft=draft, draft_tokens=MAX_DRAFT_TOKENS, verify=False, progress=progress)
    small = LLM(draft, verify=False, progress=progress)
    tokens = target.tokenizer.encode(read_text(text), add_special_tokens=False)
    started = greedy.prompts([tokens], PROMPTS, target.tokenizer.added_bos, target.context).tolist()
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, ignore_eos=True, draft_tokens=0)
    found = []
    for number, prompt in enumerate(started):
        found.append(_compare(target, small, prompt, replace(params, seed=number)))
        told("texts", number + 1, PROMPTS)
    half = [found[: PROMPTS // 2], found[PROMPTS // 2 :]]
    rows = row_costs.measure(target.decoder, target.decoder.lossless, greedy.PROMPT, range(1, max(COUNTS) + 2))
    (drafting,) = row_costs.measure(small.decoder, small.decoder.lossless, greedy.PROMPT, (1,))
    seconds = [seconds_of(target, started[PROMPTS // 2 :], replace(params, draft_tokens=count)) for count in COUNTS]
    speeds = []
    for count, took in zip(COUNTS, seconds, strict=True):
        guess = _tokens(half[0], count)
        faster = guess * rows[0] / (rows[count] + count * drafting)
        speeds.append(Speed(count, guess, _tokens(half[1], count), faster, seconds[0] / took))
    tv, match = torch.cat([each.tv for each in found]), torch.cat([each.match for each in found])
    return DraftQuality(
        len(tv), temperature, _by_depth(found), sum(each.typical for each in found) / len(found),
        tv.sum().item(), int((~torch.cat([each.ratio for each in found])).sum()), tv.sum().item(), int((~match).sum()),
        (2 * tv / (1 + tv)).sum().item(), drafting / rows[0], tuple(speeds),
    )  # fmt: skip


def _compare(target: LLM, small: LLM, prompt: Sequence[int], params: SamplingParams) -> Positions:
    """Continue a prompt, and compare the models at each token of the output."""
    (answer,) = target.generate([prompt], params)
    ids, output, vocab = [*prompt, *answer.token_ids], list(answer.token_ids), target.decoder.config.vocab_size
    rows = slice(len(prompt) - 1, len(ids) - 1)
    ours, theirs = target.logits(ids)[rows], small.logits(ids)[rows, :vocab]
    p, q = distribution(ours, params), distribution(theirs, params)
    states = Sampler(params, prompt, vocab).along(output)[:-1]
    drawn = [draw.token_id if isinstance(draw, SampledToken) else -1 for draw in sample(theirs, states)]
    assert params.seed is not None
    uniforms = torch.rand(3, len(p), generator=torch.Generator().manual_seed(params.seed), dtype=torch.float64)
    drafts = accept_rules.draw(q, uniforms[0])[:, None]
    both = torch.stack([p, p], 1)
    count, _ = accept_rules.ratio(both, q[:, None], drafts, uniforms[1:].T)
    match = torch.tensor(drawn) == torch.tensor(output)
    return Positions(accept_rules.total_variation(p, q), count > 0, match, accept_rules.typical_tv(p, q).mean().item())


def _by_depth(found: Sequence[Positions]) -> tuple[float, ...]:
    """Return the mean distance at each depth, of the positions that drafts reach from anywhere in a text."""
    means = []
    for depth in range(DEPTHS):
        reached = [
            each.tv[at + depth]
            for each in found
            for at in range(len(each.tv) - depth)
            if bool(each.match[at : at + depth].all())
        ]
        if not reached:
            break
        means.append(torch.stack(reached).mean().item())
    return tuple(means)


def _tokens(found: Sequence[Positions], count: int) -> float:
    """Return the mean tokens of a step with `count` drafts, walking along the texts."""
    steps = tokens = 0
    for each in found:
        right, at = each.match.tolist(), 0
        while at < len(right):
            kept = next((n for n, ok in enumerate(right[at : at + count]) if not ok), min(count, len(right) - at - 1))
            at += kept + 1
            steps += 1
        tokens += len(right)
    return tokens / steps


def seconds_of(target: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Return the seconds of continuing the prompts one by one, after a step or two that record."""
    target.generate([prompts[0]], replace(params, seed=0))
    since = time.perf_counter()
    for number, prompt in enumerate(prompts, PROMPTS // 2):
        target.generate([prompt], replace(params, seed=number))
    return time.perf_counter() - since
