"""Which tables there are, in the order in which they are listed.

What today's code cannot measure stands in a table too, with empty cells and the reason. No figure does.
"""

from __future__ import annotations

from reals import arithmetic, qualities, speeds
from reals.framework import Column, Row, Table
from reals.setting import Setting


def tables(setting: Setting) -> dict[str, Table]:
    """Every table by its name."""
    makers = (
        arithmetic.gguf, qualities.dense, arithmetic.activations, arithmetic.front, arithmetic.exact,
        qualities.quality, qualities.tasks, qualities.compression, speeds.speed, speeds.start, chat, speeds.beside,
    )  # fmt: skip
    made = [make(setting) for make in makers]
    return {table.name: table for table in made}


def chat(setting: Setting) -> Table:
    return Table(
        "chat",
        "answers to 200 prompts by attar chat, LLM.chat and the server, and transformers' rendering",
        (Column("equal", ".0%"), Column("prompts equal", ".0%")),
        tuple(Row(model, "", (), "the 200 prompts are not written yet") for model in setting.models),
    )
