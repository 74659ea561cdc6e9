"""Proofs of the server: one without a verdict is answered with a 503 that says when to try again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from attar.protocol.grammar import Grammar
from attar.server.errors import APIError
from attar.server.grammars import Grammars
from attar.text.grammar_proof import Prover, Unproven
from attar.text.tokenizer import Tokenizer


def test_a_proof_without_a_verdict_is_to_be_tried_again(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(prover: Prover, grammar: Grammar) -> NoReturn:
        raise Unproven("the proof of a grammar took longer than 10 s")

    monkeypatch.setattr(Prover, "_verdict", starved)
    tokenizer = Tokenizer.load(demo)
    grammars = Grammars(tokenizer)
    try:
        with pytest.raises(APIError) as caught:
            asyncio.run(grammars.prove(b"", Grammar("regex", "a"), tokenizer.vocab_size))
    finally:
        grammars.close()
    assert (caught.value.code, caught.value.kind.status) == ("busy", 503)
    assert caught.value.retry_after
