"""Completions of the prompts of a Ray dataset, by models in actors (`generate`). It needs `ray[data]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attar.protocol.request import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH = 64  # rows that an actor completes together


def generate(
    rows: Dataset, model: str, *, prompt: str = "prompt", models: int = 1, cpus: int = 1, gpus: int = 0,
    batch: int = BATCH, **sampling: Any,
) -> Dataset:  # fmt: skip
    """Return `rows` with the columns `completion` and `finish_reason`, from the text in the column `prompt`.

    `models` actors load the model, each with so many `cpus` and `gpus`. `sampling` are fields of `SamplingParams`. With
    a `seed`, a row's text does not depend on the rows beside it, on CPUs. Raises TypeError for unknown fields.
    """
    SamplingParams(**sampling)  # wrong values fail here, and not in every actor
    return rows.map_batches(
        Completions, fn_constructor_args=(model, prompt, cpus, gpus, sampling), batch_size=batch, concurrency=models,
        num_cpus=cpus, num_gpus=gpus,
    )  # fmt: skip


class Completions:
    """A model in an actor, which completes batches of rows."""

    def __init__(self, model: str, prompt: str, cpus: int, gpus: int, sampling: dict[str, Any]) -> None:
        import torch

        from attar.engine.llm.llm import LLM

        torch.set_num_threads(cpus)
        self._prompt, self._params = prompt, SamplingParams(**sampling)
        self._llm = LLM(model, device="cuda" if gpus else "cpu")

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Complete rows, given as columns. Raises KeyError where the prompt's column is missing."""
        found = self._llm.generate([str(each) for each in rows[self._prompt]], self._params)
        return {**rows, "completion": [each.text for each in found],
                "finish_reason": [each.finish_reason for each in found]}  # fmt: skip
