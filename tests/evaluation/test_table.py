"""The cost table, compared with the text it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation.table import Row, cost_table, size


def test_table() -> None:
    figures = {
        "ppl": 12.3456, "kl_mean": 0.01234, "kl_p999": 0.9876, "top1": 0.95, "tokens": 1000,
        "intervals": {"kl_mean": [0.0113, 0.0133], "ppl": None},
    }  # fmt: skip
    rows = [
        Row("fp32", bytes=11_534_336, bits_per_weight=16, figures={"ppl": 12.0, "kl_mean": None}),
        Row("gptq-w4g128", bytes=4_000_000, bits_per_weight=4.2512, figures=figures),
    ]
    assert cost_table(rows).splitlines() == [
        "model           size  bits/weight  perplexity         KL mean  KL 99.9 %   top-1",
        "-----------  -------  -----------  ----------  --------------  ---------  ------",
        "fp32         11.5 MB       16.000      12.000               -          -       -",
        "gptq-w4g128     4 MB        4.251      12.346  0.0123 ± 0.001      0.988  95.00%",
    ]


def test_row_of_a_checkpoint(stories: Path) -> None:
    row = Row.of("bf16", stories)
    assert row.bits_per_weight in (16, 32)
    assert row.bytes == (stories / "model.safetensors").stat().st_size
    assert cost_table([row]).splitlines()[0].split() == ["model", "size", "bits/weight"]
    assert row.to_dict()["figures"] is None


def test_a_column_that_no_row_fills_is_left_out() -> None:
    assert cost_table([Row("a", tokens_per_second=12.34)]).splitlines() == [
        "model  tokens/s",
        "-----  --------",
        "a          12.3",
    ]


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1.6e10, "16 GB"),
        (4e12, "4000 GB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
