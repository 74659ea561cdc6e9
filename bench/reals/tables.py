"""Which tables there are, in the order in which they are listed.

What today's code cannot measure stands in a table too, with empty cells and the reason. No figure does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from reals import arithmetic, qualities, speeds
from reals.framework import Column, Fills, Measurement, Row, Table, python
from reals.setting import Setting, each

ANSWERED = {"smollm2-135m": 200, "qwen2.5-coder-0.5b": 40, "qwen2.5-coder-1.5b": 16}  # prompts
COUNTS = ("spelled", "answered", "typed")
SAME: Fills = {
    "text": "text", "tokens": "ids", "spelled": "spelled", "as text": "literal", "server": "server",
    "answered": "answered", "greedy": "greedy", "seeded": "seeded", "typed": "typed", "greedy, typed": "greedy_typed",
    "seeded, typed": "seeded_typed",
}  # fmt: skip


def tables(setting: Setting) -> dict[str, Table]:
    """Every table by its name."""
    makers = (
        arithmetic.gguf, qualities.dense, arithmetic.activations, arithmetic.front, arithmetic.exact,
        qualities.quality, qualities.tasks, qualities.compression, speeds.speed, speeds.start, chat, speeds.beside,
    )  # fmt: skip
    made = [make(setting) for make in makers]
    return {table.name: table for table in made}


def chat(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if (count := ANSWERED.get(model)) is None:
            yield Row(model, "", (), "the model has no chat template")
        else:
            yield Row(model, "", (Measurement(python("reals.chat", path, "--prompts", count), SAME),))

    return Table(
        "chat",
        "prompts and answers that are equal. Of 200 prompts: text and tokens beside transformers' (but where messages "
        "spell special tokens, which attar reads as text: there only the template's are special) and beside the "
        "server's; of `answered` ones: answers of LLM.chat beside the server's, and beside attar chat's where typed",
        tuple(Column(name, ".0f" if name in COUNTS else ".1%") for name in SAME),
        each(setting, rows),
    )
