"""The lab's page as text: within its size, without loads, and with untrusted names as data only."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attar.cli.main import app
from attar.compression.runs.pipeline import compress
from attar.lab import facts, gather, page
from attar.model import shapes
from attar.plan import costs
from attar.plan.costs import Storage
from attar.plan.described import described
from attar.plan.steps import StepLimits
from attar.protocol.model_shape import MachineRates, ModelShape
from tests.errors import user_error

MOST = 80_000  # bytes of the page without its data
HOSTILE = "</script><!--<script>alert(1)</script>\u202egnp.\u2028\u2029\ud800&amp;"


def shape(name: str = "a model", kind: str = "llama-3.2-1b") -> ModelShape:
    return described(name, shapes.shape(kind), Storage.named("w4g128"), "bfloat16", StepLimits())


def rates() -> MachineRates:
    return MachineRates(20e9, 400e9, None, 8 << 30, "memory", "made up", rows=((1, 0.03), (4, 0.04), (16, 0.08)))


def hostile() -> dict[str, Any]:
    """Data whose every name is an attack."""
    found = facts.facts(shape(HOSTILE), rates(), HOSTILE)
    entry = facts.output(HOSTILE, 700_000_000, 4.1, {"kl_mean": (0.01, 0.009, 0.011), "ear": (0.9, None, None)}, 30.0)
    sequences = [{"id": HOSTILE, "tokens": 100, "max_tokens": 500, "reused": 0, "state": "running"}]
    numbers = base64.b64encode(struct.pack("<4f", 1, 2, 3, 4)).decode()
    group = {"name": HOSTILE, "tokens": 2, "of": 2, "index": [0, 1], "inputs": [3.0, 4.0], "weights": [3.0, 4.0]}
    channels = [{**group, "rows": numbers, "outs": numbers}]
    replay = [{"policy": HOSTILE, "slots": 4, "steps": 9, "rate": 1.0, "waits": [0.0], "preemptions": 0}]
    return {**found, "outputs": [entry], "sequences": sequences, "replay": replay, "channels": channels}


class Seen(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.comments: list[str] = []
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def test_the_page_is_small_without_its_data() -> None:
    assert len(page.html({}).encode()) < MOST


def test_the_page_runs_its_own_script_and_loads_nothing() -> None:
    seen = Seen(page.html(facts.facts(shape(), rates())))
    (policy,) = (each["content"] for tag, each in seen.elements if tag == "meta" and "http-equiv" in each)
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert not [tag for tag, each in seen.elements if {"src", "srcset", "data", "action"} & set(each)]
    assert {tag for tag, _ in seen.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "use"})
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", seen.scripts[1])


def test_untrusted_names_stay_data() -> None:
    text = page.html(hostile())
    seen = Seen(text)
    assert len(seen.scripts) == 2
    assert seen.comments == []
    data = json.loads(seen.scripts[0])
    assert data["model"]["name"] == HOSTILE.replace("\ud800", "?")
    assert data["sequences"][0]["id"] == data["model"]["name"]
    assert not set(seen.scripts[0]) & set("<\u2028\u2029")


@pytest.mark.parametrize("mark", ["@DATA@", "@SCRIPT@", "@STYLE@"])
def test_marks_of_the_template_in_names_are_names(mark: str) -> None:
    seen = Seen(page.html(facts.facts(shape(mark), None)))
    assert json.loads(seen.scripts[0])["model"]["name"] == mark
    assert seen.scripts[1] == page.script()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(value: float) -> None:
    with pytest.raises(ValueError):
        page.embedded({"kl": value})


def test_a_server_lets_the_page_connect_to_itself_alone() -> None:
    assert (
        page.policy(True)
        == page.policy(False).replace("base-uri", "connect-src 'self'; base-uri") + "; frame-ancestors 'none'"
    )
    assert "http-equiv" not in page.html({}, connects=True)


@pytest.mark.parametrize("kind", ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b"])
def test_a_description_is_the_plans(kind: str) -> None:
    config, storage = shapes.shape(kind), Storage.named("w4g128")
    found, weights = described("m", config, storage, "int8", StepLimits()), costs.weight_bytes(config, storage)
    parts = (found.bytes.linears, found.bytes.head, found.bytes.embedding, found.bytes.norms)
    assert parts == (weights.linears, weights.head, weights.embedding, weights.norms)
    assert found.head == config.vocab_size * config.hidden
    assert (found.embedding == 0) == config.tied
    assert "dense" not in {each.name for each in found.storages}
    assert {each.name for each in found.kv_formats} >= {"float32", "bfloat16", "int8"}
    assert found.active == found.head + found.linears  # no experts


def lab(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lab", *arguments])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, rounded, with a receipt."""
    path = tmp_path_factory.mktemp("lab") / "out"
    return compress("demo", path, recipe="rtn-w4g128").path


def test_the_command_writes_a_page_of_a_model_and_an_output(output: Path, tmp_path: Path) -> None:
    written = tmp_path / "lab.html"
    done = lab("demo", str(output), "-o", str(written), "--no-measure", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "page": str(written),
        "bytes": written.stat().st_size,
        "outputs": 1,
        "measured": False,
        "channels": 0,
    }
    data = json.loads(Seen(written.read_text()).scripts[0])
    assert data["machine"] is None  # and not a number that nothing measured
    (entry,) = data["outputs"]
    assert entry["label"] == "rtn-w4g128"
    assert entry["bits"] == pytest.approx(4.1, abs=0.1)
    assert entry["kl"] is None
    assert data["model"]["bytes"]["name"] == "bf16"
    assert lab("demo", "-o", str(written), "--no-measure").exit_code == 0  # an earlier page is replaced


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    other = tmp_path / "notes.html"
    other.write_text("<title>mine</title>")
    with user_error("output_exists"):
        gather.check_page(other)
    for path in (tmp_path / "lab.txt", tmp_path / "nowhere" / "lab.html", tmp_path):
        with user_error("output_invalid"):
            gather.check_page(path)
