"""What other servers add to OpenAI's answers on request: token ids and log probabilities of prompts as in vLLM, and
llama.cpp's timings.

A completion has the prompt's part in each of its choices, a chat in the answer itself, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from attar.protocol.messages import Report
from attar.server.api.logprobs import LEAST, Turns, rows, token_text
from attar.server.api.schemas import Sampling
from attar.server.engine_client.connection import PromptScores
from attar.server.errors import APIError
from attar.text.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 64 << 20  # of the prompts' log probabilities, in one answer

encode = msgspec.json.encode


class Extras:
    """Additions to the answer of `body`, whose prompts are `prompts`. Each method returns fields of a JSON object, each
    behind a comma; nothing where none were asked for."""

    def __init__(self, body: Sampling, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> None:
        self.token_ids, self.timings = bool(body.return_token_ids), bool(body.timings_per_token)
        self.as_ids, self.named = bool(body.return_tokens_as_token_ids), bool(body.logprob_token_ids)
        self._scored, self._tokenizer, self._prompts = body.prompt_logprobs is not None, tokenizer, prompts
        self._tokens: dict[int, list[int]] = {}
        self._scores: dict[int, bytearray] = {}
        self._bytes = 0  # of all of them

    @property
    def opens(self) -> bool:
        """Return whether a stream begins with something about its prompt."""
        return self.token_ids or self._scored

    def take(self, number: int, tokens: Iterable[int]) -> None:
        """Keep more tokens of a choice of a whole answer."""
        if self.token_ids:
            self._tokens.setdefault(number, []).extend(tokens)

    async def add_prompt(self, at: int, event: PromptScores, turns: Turns) -> None:
        """Write the log probabilities of prompt `at`. Raises APIError where they grow past MAX_PROMPT_BYTES."""
        if not self._scored:
            return
        items = self._scores[at] = bytearray(b"null")
        for each in rows(event.logprobs):
            ranks = {token: rank for rank, (token, _) in enumerate(each.top, 1)}
            found = {each.token_id: each.logprob, **dict(each.top)}
            told = {str(token): self._told(token, value, ranks.get(token)) for token, value in found.items()}
            items += b"," + (written := encode(told))
            self._bytes += 1 + len(written)
            if self._bytes > MAX_PROMPT_BYTES:
                message = f"prompt_logprobs: more than {MAX_PROMPT_BYTES} bytes: ask for fewer, or for fewer prompts"
                raise APIError("out_of_range", message, "prompt_logprobs")
            await turns.after(len(told))

    def of_choice(self, number: int) -> bytes:
        """Return a whole choice's tokens; null where they were not asked for, as vLLM's clients read them."""
        return b',"token_ids":%b' % (encode(self._tokens.get(number, [])) if self.token_ids else b"null")

    def of_delta(self, tokens: Sequence[int]) -> bytes:
        """Return the tokens of a chunk."""
        return b',"token_ids":%b' % encode(tokens) if self.token_ids else b""

    def of_whole(self, at: int) -> bytes:
        """Return the tokens of prompt `at` of a whole answer, and its log probabilities, null where not asked for."""
        found = b"" if self.token_ids else b',"prompt_token_ids":null'
        return found + (b"" if self._scored else b',"prompt_logprobs":null') + self.of_prompt(at)

    def of_prompt(self, at: int) -> bytes:
        """Return the tokens of prompt `at`, and its log probabilities."""
        found = b',"prompt_token_ids":%b' % encode(self._prompts[at]) if self.token_ids else b""
        if self._scored:
            found += b',"prompt_logprobs":[%b]' % bytes(self._scores.get(at, b"null"))
        return found

    def of_end(self, reports: Iterable[Report | None], generated: int) -> bytes:
        """Return the timings of a request that has generated so many tokens, by the reports of its prompts."""
        return b',"timings":%b' % encode(timings(reports, generated)) if self.timings else b""

    def _told(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = token_text(self._tokenizer, token)
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}


def timings(reports: Iterable[Report | None], generated: int) -> dict[str, Any]:
    """Return llama.cpp's timings of a request: summed over its prompts, where there are several."""
    known = [report for report in reports if report is not None]
    cached = sum(report.reused_tokens for report in known)
    read = sum(report.prompt_tokens for report in known) - cached
    prefill, decode = sum(report.prefill for report in known), sum(report.decode for report in known)
    return {
        "cache_n": cached, **_speed("prompt", read, read, prefill),
        **_speed("predicted", generated, max(0, generated - len(known)), decode),
        "draft_n": sum(report.drafted_tokens for report in known),
        "draft_n_accepted": sum(report.accepted_tokens for report in known),
    }  # fmt: skip


def _speed(name: str, tokens: int, steps: int, seconds: float) -> dict[str, Any]:
    """Return a count of tokens, and the speed of the `steps` that took so many seconds. A prompt's own step makes the
    first token of an answer."""
    return {
        f"{name}_n": tokens, f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / steps if steps else 0.0,
        f"{name}_per_second": steps / seconds if seconds else 0.0,
    }  # fmt: skip
