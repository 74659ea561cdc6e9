"""Proofs of the constraints of requests, outside the event loop: by one child process, with fair turns by key.

A verdict that is remembered takes no turn. The others wait in a queue of bounded length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from attar.protocol.grammar import Grammar
from attar.server.errors import APIError
from attar.server.fair_thread_pool import FairThreadPool
from attar.text.grammar_proof import Prover, Unproven
from attar.text.grammars import Vocabulary
from attar.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_PROOFS = 32  # that wait, of all keys


class Grammars:
    """Proves constraints for the served model, whose tokens `tokenizer` has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = FairThreadPool("grammars", 1, 1)
        self._waiting = 0
        self._prover: Prover | None = None

    def close(self) -> None:
        """Release the thread and the child process."""
        self._threads.close()
        if self._prover is not None:
            self._prover.close()

    async def prove(self, key: bytes, grammar: Grammar, vocab: int) -> None:
        """Prove a grammar for a request of `key`, for logits of `vocab` columns. Raises GrammarError where it cannot be
        kept, APIError where too many others wait, or there is no verdict."""
        if self._prover is not None and self._prover.knows(grammar, key):
            self._prover.prove(grammar, key)
            return
        await self.work(key, lambda prove: prove(grammar), vocab)

    async def work(self, key: bytes, work: Callable[[Callable[[Grammar], None]], T], vocab: int) -> T:
        """Return what `work` returns in the thread of proofs; it gets a function that proves a grammar. Raises what
        `work` raises, and APIError where too many others wait, or a proof has no verdict."""
        if self._waiting >= MAX_PROOFS:
            raise APIError("busy", f"{MAX_PROOFS} constraints wait to be compiled: try again later")
        self._waiting += 1
        try:
            return await self._threads.run(key, lambda: work(partial(self._prove, key, vocab)))
        finally:
            self._waiting -= 1

    def _prove(self, key: bytes, vocab: int, grammar: Grammar) -> None:
        if self._prover is None:
            self._prover = Prover(Vocabulary.of(self._tokenizer, vocab, self._tokenizer.eos_ids))
        try:
            self._prover.prove(grammar, key)
        except Unproven as error:  # nothing is known about the grammar: no refusal, and no reason to loosen tools
            raise APIError("busy", f"{error}: try again later") from error
