"""Proof that a grammar compiles within its limits, before a process that must not die compiles it.

A compiler of grammars recurses: a chain of 3,000 rules overflows its stack, and the process is gone. So each grammar is
compiled first in a child process with a smaller stack, bounded memory and processor time (`_proof_child.py`). The
server, `LLM` and the command line prove alike.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict

from attar.errors import Code, UserError
from attar.protocol.grammar import Grammar
from attar.text.grammars import LIMITS_VERSION, GrammarError, Vocabulary
from attar.text.limited_child import STARVED_SECONDS, LimitedChild

REMEMBERED = 10_000  # verdicts


class Unproven(UserError):
    """No verdict on a grammar: the proving process got too little of a processor, or was ended. Another try may do."""

    def __init__(self, message: str) -> None:
        super().__init__("worker_failed", message)


class Prover:
    """Proves grammars for one vocabulary, and remembers the verdicts. Thread-safe; proofs wait for each other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._verdicts: OrderedDict[bytes, tuple[str | None, str] | None] = OrderedDict()
        self._child = LimitedChild(
            "attar.text._proof_child", ("llguidance",), "proof of a grammar", _error, vocabulary.to_json
        )

    def prove(self, grammar: Grammar, salt: bytes = b"") -> None:
        """Raise GrammarError for a refused grammar, Unproven where there is no verdict. Verdicts are remembered for
        each `salt` apart: their time would tell that another client has this grammar."""
        key = grammar.digest(self.vocabulary.digest, LIMITS_VERSION, salt)
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict(grammar)
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        if (verdict := self._verdicts[key]) is not None:
            raise GrammarError(verdict[1], verdict[0])

    def knows(self, grammar: Grammar, salt: bytes = b"") -> bool:
        """Return whether a verdict is remembered."""
        return grammar.digest(self.vocabulary.digest, LIMITS_VERSION, salt) in self._verdicts

    def close(self) -> None:
        """End the child process, if there is one."""
        self._child.close()

    def _verdict(self, grammar: Grammar) -> tuple[str | None, str] | None:
        # The child ends its work by its own processor time: it needs no deadline but that of a starved machine.
        try:
            self._child.ask(json.dumps(asdict(grammar), ensure_ascii=False).encode(), STARVED_SECONDS)
        except GrammarError as error:
            try:
                pointer, message = json.loads(str(error))
            except ValueError:  # of the process, not of the grammar
                raise Unproven(str(error)) from None
            return pointer, message
        return None


def _error(message: str, code: Code | None) -> UserError:
    return UserError(code, message) if code is not None else GrammarError(message)
