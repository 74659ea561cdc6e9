"""The kind of texts: whether calibration text is like the model's own, and whether the evaluation text is separate.

A model that has seen text of some kind is about as surprised by more of it as it expects to be. The surprise is the
mean of -log p(next token) on a few calibration sequences, with the original model. The expectation is the mean entropy
of its predictions at the same positions: the mean surprise of text that the model itself would write there. So nothing
need be sampled, and much of the noise of the text is in both. The excess is what text of another kind adds: nothing,
but for noise, on the model's own samples. The table gives the excess in nats a token, over 2,044 tokens (± one standard
error). Beside it is the cost of the kind: the KL on a novel of `gptq-w3g128`, over that with a novel to calibrate on,
for the embedded model, which knows novels only.

    its own samples   0.03 ± 0.05            Wikipedia              1.40 ± 0.09   1.6
    a new novel       0.17 ± 0.05   1.0      WikiText-2             2.47 ± 0.12   1.7
    short stories     0.64 ± 0.07   1.3      source code            3.32 ± 0.10   1.8
    web pages (C4)    1.36 ± 0.07   1.5      random characters      6.03 ± 0.12   2.7
                                             random bytes           7.27 ± 0.14   2.7

A model of short stories gives 0.26 on such, and from 1.39 (novels) to 14.6 (random bytes) on all others. `LIMIT` is in
the gap, where calibration begins to cost half as much again. It is one-sided: text that repeats itself surprises less
than expected, which unseen channels and idle experts (`coverage`) show. The receipt always has the figure.

Texts that share whole runs of tokens are not separate, and measurements on the second say little. Runs are compared,
not files: the same passage may be in both. Two parts of novels share no runs of `RUN` tokens; two of WikiText-2 share
0.3 %, and two of source code, whose files begin alike, 3.7 %. Runs half as long are shared by 0.4, 9 and 9 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.calibration import gradients, hidden_states
from attar.compression.calibration.hidden_states import HiddenStates
from attar.model import assembly, decoder

TOKENS = 2048  # of calibration text that are measured: one sequence at least
LIMIT = 1.0  # nats a token above what the model expects
DIGITS = 4  # decimals of figures in nats: more are noise
ROWS = 256  # states that are multiplied with the LM head at once

RUN = 16  # tokens
SHARED = 0.01  # fraction of the evaluation text


@dataclass(frozen=True, slots=True)
class DomainCheck:
    """Surprise of the original model by calibration text, in nats a token: measured and expected, over so many
    tokens."""

    tokens: int
    nats: float
    expected: float


@torch.inference_mode()
def surprise(source: Checkpoint, ids: Tensor, folder: Path, device: torch.device | str = "cpu") -> DomainCheck | None:
    """Measure the surprise on some of the sequences ids [S, L], evenly spread, with one block in memory. Returns None
    where sequences have one token, or where predictions are not finite. Hidden states are in a file of `folder`
    meanwhile; blocks run on `device`."""
    length, config = ids.shape[1], source.config
    if length < 2:
        return None
    count = min(len(ids), max(1, TOKENS // length))
    ids = ids[[i * len(ids) // count for i in range(count)]]
    path, shape = folder / "surprise.f32", (*ids.shape, config.hidden)
    memory, rows = 4 * ids.numel() * config.hidden, hidden_states.rows_at_once(config)
    try:
        with closing(HiddenStates(path, shape, memory, rows, device)) as last:
            gradients.through(source, ids, [last] * (config.layers + 1))
            states = last.read(range(count)).cpu().view(*shape)[:, :-1].flatten(0, 1)
    finally:
        path.unlink(missing_ok=True)
    nats, entropy = (float(each.mean()) for each in _at_head(source, states, ids[:, 1:].flatten()))
    if not (math.isfinite(nats) and math.isfinite(entropy)):
        return None
    return DomainCheck(len(states), round(nats, DIGITS), round(entropy, DIGITS))


def _at_head(source: Checkpoint, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of the tokens `wanted` [N] and the entropy of p, both [N], given the last states [N, I]. With
    logits x and Z = sum e^x, the entropy is log Z - sum x e^x / Z: both sums grow with the rows of the LM head, taken
    relative to the largest logit so far."""
    config, norm = source.config, assembly.build_final_norm(source.config, source)
    largest = torch.full((len(states),), -torch.inf, dtype=torch.float64)
    total, weighted, found = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
    for rows, head in hidden_states.head_rows(source):
        for at in torch.arange(len(states)).split(ROWS):
            logits = decoder.logits(config, norm, head, states[at]).double()
            peak = torch.maximum(largest[at], logits.amax(1))
            shrunk, each = (largest[at] - peak).exp(), (logits - peak[:, None]).exp()
            total[at] = total[at] * shrunk + each.sum(1)
            weighted[at] = weighted[at] * shrunk + (logits * each).sum(1)
            largest[at] = peak
            here = (wanted[at] >= rows[0]) & (wanted[at] <= rows[-1])
            found[at[here]] = logits[here, wanted[at][here] - rows[0]]
    log_z = largest + total.log()
    return log_z - found, log_z - weighted / total


def shared(evaluation: Sequence[int], read: Tensor) -> float:
    """Return the fraction of an evaluation text's tokens in runs of `RUN` that sequences [S, L] contain too. The
    sequences count from their second token on, since the first may be an added BOS."""
    runs = {tuple(row[at : at + RUN]) for row in read[:, 1:].tolist() for at in range(0, len(row) - RUN + 1, RUN)}
    covered = end = 0  # tokens in a run, and the end of the last run
    for at in range(len(evaluation) - RUN + 1):
        if tuple(evaluation[at : at + RUN]) in runs:
            covered += at + RUN - max(at, end)
            end = at + RUN
    return covered / len(evaluation)


def to_dict(found: DomainCheck | None, share: float | None) -> dict[str, Any] | None:
    """Return both figures JSON-ready for the receipt, or None where there is neither."""
    if found is None and share is None:
        return None
    return {"calibration": None if found is None else asdict(found), "shared": share}


def warnings(found: DomainCheck | None, share: float | None) -> Iterator[str]:
    """Yield warnings about the surprise of the calibration text and the share of the evaluation text in it."""
    if found is not None and found.nats - found.expected > LIMIT:
        yield (
            f"the calibration text surprises the model by {found.nats:.2f} nats a token, and its own would by "
            f"{found.expected:.2f}: it is of a kind that the model hardly knows; give text of the kind it is for"
        )
    if share is not None and share > SHARED:
        yield (
            f"{share:.1%} of the evaluation text is in the calibration text too, in runs of {RUN} tokens and more: "
            "figures on it are better than on text that is new; give one that calibration has not read"
        )
