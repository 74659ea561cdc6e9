"""Fields of vLLM's server that OpenAI's API lacks, and the times of an answer as it tells them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from attar.protocol.messages import Report
from attar.server.api.body import MAX_TOKENS, Token
from attar.server.errors import APIError
from attar.server.prompts import MOST_CUT, Cut

FITTING = -1

_KEPT = "Most tokens of a prompt; the others are dropped. -1: as many as leave room for the answer."
Kept = Annotated[int, Meta(ge=FITTING, le=MAX_TOKENS, description=_KEPT, extra_json_schema={"not": {"const": 0}})]
_SIDE = "Where tokens are dropped: the beginning of a prompt (left, the default), or its end."
Side = Annotated[Literal["left", "right"], Meta(description=_SIDE)]


class Transfer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What another server has made of the conversation: the tokens of its prompt, which are taken as they are."""

    prompt_token_ids: Annotated[list[Token], Meta(min_length=1, max_length=MOST_CUT)]


def check_kept(kept: int | None) -> None:
    """Raise APIError for a prompt that is to be cut to nothing."""
    if kept == 0:
        name = "truncate_prompt_tokens"
        raise APIError("out_of_range", f"{name}: at least 1, or -1 for as many as fit", name)


def cut(kept: int | None, side: str | None, room: int) -> Cut | None:
    """Return what cuts a prompt to `kept` tokens, or to the `room` that there is for it; None where nothing does."""
    if kept is None:
        return None
    most = max(1, room) if kept == FITTING else kept

    def cut_one(prompt: tuple[int, ...]) -> tuple[int, ...]:
        return prompt[:most] if side == "right" else prompt[-most:]

    return cut_one


def times(reports: Iterable[Report | None], generated: int) -> dict[str, float]:
    """Return vLLM's `metrics` of a request, in milliseconds; of several prompts those that took longest. The first
    token is timed from the prompt's first step. `mean_itl_ms` is between tokens, of an answer that has two."""
    known = [report for report in reports if report is not None]
    queued, prefill, decode = (
        max((getattr(each, name) for each in known), default=0.0) for name in ("queued", "prefill", "decode")
    )
    told = {
        "time_to_first_token_ms": 1000 * prefill, "generation_time_ms": 1000 * decode, "queue_time_ms": 1000 * queued,
        "tokens_per_second": generated / (prefill + decode) if prefill + decode else 0.0,
    }  # fmt: skip
    if len(known) == 1 and generated > 1:
        told["mean_itl_ms"] = 1000 * decode / (generated - 1)
    return told
