"""Plans as text and as JSON."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from attar.cli.main import app
from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.plan import fit, report
from attar.plan.comparison import Hardware, Plan, Precisions, Subject, plan
from attar.plan.costs import USUAL_KV, Storage
from attar.plan.fit import CacheLimits, Demand, Deployment
from attar.plan.steps import StepLimits

CONFIG = shape("llama-3.2-1b")
W4 = Storage.named("w4g128")
SUBJECT = Subject("llama-3.2-1b", CONFIG, W4)
INT8 = Deployment(CONFIG, W4, SCHEMES["int8"])
LARGE = Hardware(64 * 10**9, "--memory")
STORED = Precisions([W4], USUAL_KV)


def make(memory: int, users: int = 8, bandwidth: float | None = 50e9, int8_rate: float | None = None) -> Plan:
    hardware = Hardware(memory, "--memory", bandwidth, int8_rate)
    return plan(SUBJECT, Demand(2048, users), hardware, limits=StepLimits(rows=256, sequences=64))


def test_the_text_has_a_line_for_every_choice_and_an_answer() -> None:
    made = make(4 * 10**9)
    lines = report.to_text(made).splitlines()
    assert lines[0] == "llama-3.2-1b: 8 x 2,048 tokens in 4 GB (--memory)"
    assert len([line for line in lines if line.startswith(("w4g128", "bf16", "w8a8", "w3g128"))]) == 16
    assert lines[-1].startswith("8 users of 2,048 tokens fit with w4g128 weights and the KV cache in float32")
    assert report.FORMULA in lines[-2]


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    made = make(2 * 10**9, users=64)
    assert all(row.short and row.speed is None for row in made.rows)
    least = min(row.short for row in made.rows)
    assert (
        f"do not fit: {fit.size(least)} too little even with w3g128 weights and the KV cache in int4"
        in report.answer(made)
    )


def test_what_a_server_would_say_is_in_the_plan() -> None:
    made = make(4 * 10**9)
    assert f"\n{report.startup(made.rows[0].fit, SCHEMES['float32'])}\n" in report.to_text(made)


def test_the_table_is_of_the_choice_that_fits() -> None:
    made = plan(SUBJECT, Demand(2048, 8), Hardware(3 * 10**9, "--memory"), Precisions([Storage(), W4], USUAL_KV))
    first = next(row for row in made.rows if row.fits)
    assert first.weights == "w4g128"
    text = report.to_text(made)
    assert f"with w4g128 weights and the KV cache in {first.kv.name} a server has:" in text
    assert f"\n{report.startup(first.fit, first.kv)}\n" in text
    assert "-" not in report.startup(made.rows[0].fit, first.kv), "no use of memory is negative"


def test_blocks_that_are_kept_free_are_told_where_more_than_one_may_run() -> None:
    """256 blocks hold 32 requests of 512 tokens, and the scheduler lets 31 in."""
    found = fit.fit(INT8, 16 * 10**9, 512, CacheLimits(32 * 512))
    assert report.startup(found, INT8.kv).endswith(
        "in 256 blocks of 64 (int8): 31 requests of 512, with 6 blocks kept free for those that run"
    )
    alone = fit.fit(INT8, 16 * 10**9, 512, CacheLimits(512))
    assert report.startup(alone, INT8.kv).endswith("1 request of 512")


def test_room_for_all_that_may_run_together_says_what_is_left() -> None:
    made = make(640 * 10**9)
    left = fit.size(made.rows[0].fit.unused)
    assert f"there is room for 256 (64 may run together), and {left} are left" in report.answer(made)
    assert "may run together" not in report.answer(make(4 * 10**9))


def test_a_cache_too_small_for_all_users_is_named() -> None:
    limits = StepLimits(rows=256)
    made = plan(SUBJECT, Demand(2048, 8), LARGE, STORED, limits, CacheLimits(5000))
    kept = "5,056 tokens, as --max-tokens-in-cache keeps it"
    assert report.answer(made) == f"8 users of 2,048 tokens do not fit into a cache of {kept} (2 would fit)"
    assert "no: too few tokens" in report.to_text(made)
    assert not report.to_dict(made)["fits"]


def test_a_single_user_is_one() -> None:
    assert report.answer(make(8 * 10**9, users=1)).startswith("1 user of 2,048 tokens fits with ")
    assert report.answer(make(10**9, users=1)).startswith("1 user of 2,048 tokens does not fit: ")
    limits = StepLimits(rows=256)
    few = plan(SUBJECT, Demand(2048, 1), LARGE, STORED, limits, CacheLimits(1000))
    assert report.answer(few).startswith("1 user of 2,048 tokens does not fit into a cache of 1,024 tokens")


def test_the_dict_is_json_and_says_the_same() -> None:
    made = make(4 * 10**9, int8_rate=900e9)
    found = json.loads(json.dumps(report.to_dict(made), allow_nan=False))
    assert found["fits"]
    assert found["answer"] == report.answer(made)
    for row, plain in zip(made.rows, found["rows"], strict=True):
        assert (plain["weight_scheme"], plain["kv"], plain["tokens"]) == (row.weights, row.kv.name, row.fit.tokens)
        assert plain["weights"] + plain["step"] + plain["processes"] + plain["cache"] + plain["unused"] == 4 * 10**9
        assert sum(plain["weight_parts"].values()) == plain["weights"]
        assert plain["fits"] == (row.speed is not None)


def test_one_way_to_keep_keys_and_values() -> None:
    for kv in (SCHEMES["kivi2"], SCHEMES["nuq4"]):
        made = plan(SUBJECT, Demand(2048, 8), Hardware(4 * 10**9, "--memory"), Precisions([W4], [kv]))
        assert [row.kv for row in made.rows] == [kv]


def test_the_command_asks_for_one_way() -> None:
    found = CliRunner().invoke(
        app, ["plan", "--shape", "llama-3.2-1b", "--kv", "klt2", "--memory", "8GB", "--bandwidth", "20GB", "--json"]
    )
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout.splitlines()[-1])["rows"]
    assert {row["kv"] for row in rows} == {"klt2"}
    unknown = CliRunner().invoke(app, ["plan", "--shape", "tiny", "--kv", "q4_0", "--bandwidth", "20GB", "--json"])
    assert json.loads(unknown.stdout.splitlines()[-1])["code"] == "kv_unknown"
