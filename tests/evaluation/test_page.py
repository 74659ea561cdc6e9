"""The page: each drawn number is the receipt's, nothing is loaded, nothing of a file is more than text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from outliers import inject
from typer.testing import CliRunner

from attar.checkpoints.receipts.recorded import record_tasks
from attar.cli.main import app
from attar.compression.request.request import Target, parse_candidates
from attar.compression.runs.pipeline import compress
from attar.evaluation import page
from attar.evaluation.outputs import Speed, read
from tests.errors import user_error
from tests.lab.browser import Browser, need_chromium

HOSTILE = '<img src=x onerror="alert(1)">{{ 1009 * 1013 }}</script>\u202e&amp;'
BENCH = {"decode_tok_s": 31.25, "prefill_tok_s": 700.0, "batch": 1, "threads": 2, "isa": "amx"}
LOADS = {
    "script",
    "link",
    "img",
    "iframe",
    "object",
    "embed",
    "video",
    "audio",
    "source",
    "base",
    "form",
    "use",
    "image",
}
VOID = {"meta", "br"}
LOOK = (Path(__file__).parents[1] / "lab" / "look.js").read_text()
LEAST_TEXT = 9  # CSS pixels of a line of a chart's text


class Seen(HTMLParser):
    """What a browser would make of it: elements, attributes, all text, and the marks of each figure by its title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str | None] = []
        self.links: list[str | None] = []
        self.text = ""
        self.marks: dict[str, dict[str, list[tuple[float, float]]]] = {}
        self._open: list[str] = []
        self._title = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.attributes |= given.keys()
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        if tag == "figure":
            self._title = ""
        if "data-x" in given:
            figure = self.marks.setdefault(self._title, {})
            point = float(str(given["data-x"])), float(str(given["data-y"]))
            figure.setdefault(str(given["data-series"]), []).append(point)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open[-2:] == ["figcaption", "b"]:
            self._title += data


def change(folder: Path, **evaluation: Any) -> dict[str, Any]:
    path = folder / "receipt.json"
    value: dict[str, Any] = json.loads(path.read_text())
    value["evaluation"] |= evaluation
    path.write_text(json.dumps(value))
    return value


@pytest.fixture(scope="module")
def outputs(tiny: Path, calibration: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three outputs, two of which were measured on the same text."""
    folder = tmp_path_factory.mktemp("report")
    made = {}
    for recipe, kl in (("rtn-w4g32", 0.3), ("gptq-w4g32", 0.2), ("rtn-w8", 0.01)):
        made[recipe] = compress(tiny, folder / recipe, recipe=recipe, calibration=calibration).path
        text = 7.0 if recipe != "rtn-w8" else 8.0
        change(
            made[recipe], kl_mean=kl, ppl=9.0, ppl_base=text, tokens=64, top1=0.9,
            intervals={"kl_mean": [kl / 2, kl * 2]}, protocol={"context": 32, "stride": 32, "bos": None},
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_every_number_drawn_is_the_receipts(outputs: dict[str, Path]) -> None:
    found = [read(outputs[name]) for name in ("rtn-w4g32", "gptq-w4g32")]
    seen = Seen(page.html(page.Contents(found)))
    values = {each.recipe: each for each in found}
    for title, x in (("KL against size", "bytes"), ("KL against bits", "bits_per_weight")):
        scale = 1e6 if x == "bytes" else 1
        assert seen.marks[title] == {
            "rtn": [(getattr(values["rtn-w4g32"], x) / scale, 0.3)],
            "gptq": [(getattr(values["gptq-w4g32"], x) / scale, 0.2)],
        }
    assert "KL against speed" not in seen.marks
    layers = json.loads((outputs["gptq-w4g32"] / "receipt.json").read_text())["layers"]
    drawn = seen.marks["mlp.down_proj"]
    down = [each for each in layers if each["name"].endswith("down_proj")]
    for series, key in (("as stored", "error"), ("rounded to nearest", "rtn_error")):
        ours = [(float(i), each[key]) for i, each in enumerate(down)]
        assert all(point in drawn[series] for point in ours)
        assert len(drawn[series]) == 2 * len(ours)  # those of the other output, too


def test_what_a_method_gained_is_unfolded_and_a_phone_shows_the_cost(outputs: dict[str, Path]) -> None:
    """Not the errors of an output that was stored the plain way; and the mean KL among the first three columns."""
    text = page.html(page.Contents([read(outputs[name]) for name in ("rtn-w4g32", "gptq-w4g32")]))
    assert re.findall(r"<details open>\s*<summary>(\S+)", text) == ["gptq-w4g32"]
    assert re.findall('<th scope="col">([^<]*)</th>', text)[:3] == ["model", "size", "KL mean"]
    plain = page.html(page.Contents([read(outputs["rtn-w4g32"])]))
    assert re.findall(r"<details open>\s*<summary>(\S+)", plain) == ["rtn-w4g32"]


def test_recorded_tasks_have_a_table(outputs: dict[str, Path], tmp_path: Path) -> None:
    recorded = Path(shutil.copytree(outputs["rtn-w4g32"], tmp_path / "out"))
    record_tasks(recorded, {"piqa": {"items": 9, "acc": 0.625, "intervals": {"acc": [0.5, 0.75]}}})
    text = page.html(page.Contents([read(recorded), read(outputs["gptq-w4g32"])]))
    table = text.partition('<table class="tasks">')[2].partition("</table>")[0]
    assert re.findall('<th scope="col">([^<]*)</th>', table) == ["model", "piqa acc"]
    assert re.findall("<td>([^<]*)", table) == ["rtn-w4g32", "0.625"]
    assert '<table class="tasks">' not in page.html(page.Contents([read(outputs["gptq-w4g32"])]))


def test_models_that_do_not_compare_get_charts_of_their_own(outputs: dict[str, Path]) -> None:
    text = page.html(page.Contents([read(path) for path in outputs.values()]))
    assert "figures compare within a chart" in text
    assert len(re.findall("<b>KL against size</b>", text)) == 2
    titles = re.findall("<h2>(KL against size and bits[^<]*)</h2>", text)
    assert len(titles) == len(set(titles)) == 2
    one = page.html(page.Contents([read(outputs["gptq-w4g32"])]))
    assert "<h2>KL against size and bits</h2>" in one


def test_allocation_is_shown_as_measured(tiny: Path, calibration: list[list[int]], tmp_path: Path) -> None:
    candidates = parse_candidates("w2g32,w4g64,w8g64")
    made = compress(
        tiny,
        tmp_path / "out",
        recipe="rtn-w4g64",
        target=Target(bits=4.0, candidates=candidates),
        calibration=calibration,
    ).path
    value = json.loads((made / "receipt.json").read_text())["allocation"]
    text = page.html(page.Contents([read(made)]))
    seen = Seen(text)
    down = [group for group in value["groups"] if group["linears"][0].endswith("down_proj")]
    picked = [(float(g["layer"]), g["kl"][value["ladder"].index(g["chosen"])]) for g in down]
    assert seen.marks["down_proj alone"] == {"chosen": picked}
    assert seen.marks["the whole model"] == {
        "one scheme for all": [(each["bits"], each["kl"]) for each in value["uniform"]],
        "chosen": [(value["bits"], value["kl"])],
    }
    cells = re.findall(r'<td style="--share: \d+%" title="[^"]*">([^<]*)</td>', text)
    assert sorted(cells) == sorted(group["chosen"] for group in value["groups"])
    assert read(made).label == f"rtn, {value['bits']:.2f} bits chosen"
    for damage in ({"ladder": ["w4g64"]}, {"groups": [{}]}, {"uniform": [{"bits": "4", "kl": 1}]}, {"kl": None}):
        receipt = json.loads((made / "receipt.json").read_text())
        (made / "receipt.json").write_text(json.dumps(receipt | {"allocation": value | damage}))
        with user_error("receipt_invalid"):
            read(made)


def test_what_each_step_gained_is_shown(tiny: Path, calibration: list[list[int]], tmp_path: Path) -> None:
    made = compress(tiny, tmp_path / "out", recipe="rtn-w2g32,rtn+tune-w2g32", calibration=calibration).path
    value = json.loads((made / "receipt.json").read_text())
    value["selection"]["left_out"] = [{"recipe": "guided-w2g32", "why": HOSTILE}]
    (made / "receipt.json").write_text(json.dumps(value | {"warnings": [HOSTILE]}))
    text = page.html(page.Contents([read(made)]))
    begin = text.index('<table class="gains">')
    table = Seen(text[begin : text.index("</table>", begin) + len("</table>")])
    first, second = value["selection"]["tried"]
    assert value["selection"]["kept"] == second["recipe"] == "rtn+tune-w2g32"
    for each in (first, second):
        assert f"{each['kl']:.3g}" in table.text
    assert f"{second['kl'] / first['kl']:.3f}" in table.text
    assert '<td class="best">rtn+tune-w2g32<small>kept</small></td>' in text
    seen = Seen(text)
    assert "img" not in seen.tags
    assert f"Not tried: guided-w2g32: {HOSTILE}." in seen.text
    assert f"{read(made).label}: {HOSTILE}." in seen.text
    tuned = value["tune"]
    assert f"mean KL {tuned['kl_before']:.3g} before and {tuned['kl_after']:.3g} after" in seen.text
    selection = value["selection"]
    alone = json.dumps(value | {"selection": selection | {"tried": [], "tokens": 0}})
    (made / "receipt.json").write_text(alone)  # one candidate of several was left, and not tried
    text = page.html(page.Contents([read(made)]))
    assert '<table class="gains">' not in text
    assert f"Not tried: guided-w2g32: {HOSTILE}." in Seen(text).text
    for damage in (
        {"selection": []}, {"selection": selection | {"tried": [], "left_out": []}},
        {"selection": selection | {"tokens": "9"}},
        {"selection": selection | {"tried": [first | {"kl": None}]}}, {"selection": selection | {"left_out": [1]}},
        {"tune": {}}, {"tune": tuned | {"kl_after": "0"}}, {"warnings": "few"}, {"warnings": [1]},
    ):  # fmt: skip
        (made / "receipt.json").write_text(json.dumps(value | damage))
        with user_error("receipt_invalid"):
            read(made)


def test_an_output_that_was_never_measured(tiny: Path, tmp_path: Path) -> None:
    made = compress(tiny, tmp_path / "out", recipe="rtn-w4g32").path
    text = page.html(page.Contents([read(made)]))
    assert "Not measured against the original: rtn-w4g32" in text
    assert "KL against size" not in text


def test_the_page_loads_nothing(outputs: dict[str, Path]) -> None:
    text = page.html(page.Contents([read(path) for path in outputs.values()]))
    seen = Seen(text)
    assert not seen.tags & LOADS
    assert seen.links
    assert set(seen.links) <= {f"#{each}" for each in seen.ids}, "only places of the page itself"
    assert not seen.attributes & {"src", "srcset", "action", "onload", "onerror", "onclick"}
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_what_is_pruned_is_compared_with_leaving_out_the_smallest(
    tiny: Path, calibration: list[list[int]], tmp_path: Path
) -> None:
    made = compress(tiny, tmp_path / "out", recipe="wanda-s50", calibration=calibration).path
    text = page.html(page.Contents([read(made)]))
    assert set(Seen(text).marks["mlp.down_proj"]) == {"as stored", "smallest left out"}
    assert "rounded to nearest" not in text
    assert "rounding to nearest" not in text


def test_hostile_figures_are_drawn_or_left_out(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Whatever a number of a receipt may be and is not refused for, and names with more digits than an int takes."""
    folder = tmp_path / "out"
    shutil.copytree(outputs["rtn-w4g32"], folder)
    path = folder / "receipt.json"
    value = json.loads(path.read_text())
    names = [f"model.layers.{'9' * digits}.mlp.down_proj" for digits in (1, 9, 5000)]
    for errors in ((5e-324, 1e100), (1e100, 5e-324), (0, 1), (1e-90, 1e90)):
        layers = [dict(zip(("error", "rtn_error"), errors, strict=True), name=name, scheme="w4") for name in names]
        for ends in ([-1, 1e99], [1e-320, 1], [2, -2], [None, []]):
            evaluation = value["evaluation"] | {"kl_mean": 1e-310, "intervals": {"kl_mean": ends}, "ppl_base": 1e100}
            path.write_text(json.dumps(value | {"layers": layers, "evaluation": evaluation, "bits_per_weight": -1e100}))
            page.html(page.Contents([read(folder), read(outputs["gptq-w4g32"])]))


def test_hostile_names_stay_text(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Everything in a receipt that is a string, keys too, turned into an attack."""
    folder = tmp_path / "<b onmouseover=alert(1)>"
    shutil.copytree(outputs["rtn-w4g32"], folder)

    def poison(value: Any, key: str = "") -> Any:
        if key in ("probes", "format", "file"):
            return value
        if isinstance(value, dict):
            return {name: poison(each, name) for name, each in value.items()} | (
                {} if key in ("probes", "evaluation") else {HOSTILE: "00" if key == "files" else HOSTILE}
            )
        if isinstance(value, list):
            return [poison(each) for each in value]
        return value + HOSTILE if isinstance(value, str) else value

    path = folder / "receipt.json"
    value = json.loads(path.read_text())
    probes = value.pop("probes")
    layers = [each | {"name": each["name"] + HOSTILE, "scheme": HOSTILE} for each in value.pop("layers")]
    value = poison(value) | {"probes": probes, "layers": layers, "format": 1}
    value["files"] = {name.replace("\u202e", "").replace("</", "<"): "00" for name in value["files"]}
    path.write_text(json.dumps(value))
    text = page.html(page.Contents([read(folder)]))
    seen = Seen(text)
    assert not seen.tags & (LOADS | {"b onmouseover"})
    assert not any(name.startswith("on") for name in seen.attributes)
    assert "<img" not in text
    assert "1022117" not in seen.text, "a product that no path or figure has by chance"
    assert HOSTILE in seen.text


def test_the_command(demo: Path, tmp_path: Path) -> None:
    """Outlier channels before and after smoothing, speeds from a file, JSON; and each mistake in a sentence."""
    source = inject(demo, tmp_path / "source")
    ids = [list(range(10, 42))] * 2
    made = compress(source, tmp_path / "smooth", recipe="smoothquant-w8a8", calibration=ids).path
    change(made, kl_mean=0.5, ppl_base=7.0)
    text, bench, out = (tmp_path / name for name in ("text.txt", "bench.json", "page.html"))
    text.write_text("It was a dark and stormy night, and the rain fell in torrents. " * 4)
    bench.write_text("prefill 700\n" + json.dumps(BENCH) + "\n")

    def report(*more: str) -> Any:
        return CliRunner().invoke(app, ["report", str(made), "-o", str(out), "--json", "-q", *more])

    options = ["--profile", str(text), "--source", str(source), "--profile-tokens", "48"]
    done = report(*options, "--speed", f"{made}={bench}")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-2] == f"{out}: 1 output, {out.stat().st_size:,} bytes"
    value = json.loads(done.stdout.splitlines()[-1])
    seen = Seen(out.read_text(encoding="utf-8"))
    assert seen.marks["KL against speed"] == {"smoothquant": [(31.25, 0.5)]}
    assert value["outputs"][0]["decode_tok_s"] == 31.25
    peaks = seen.marks["input of q_proj, k_proj, v_proj"]
    assert peaks["smoothquant-w8a8"] == [
        (place["layer"], place["peak"])
        for place in value["outliers"]["smoothquant-w8a8"]
        if "q_proj" in place["linears"][0]
    ]
    for (_, before), (_, after) in zip(peaks["original"], peaks["smoothquant-w8a8"], strict=True):
        assert before > 10 > after
    foreign = tmp_path / "foreign.html"
    foreign.write_text("<!doctype html><title>Somebody's</title>")
    for wrong, sentence in (
        (["-o", str(foreign)], "is no report of attar's"),
        (["--speed", f"other={bench}"], "with OUT among the outputs"),
        (["--speed", f"{made}={text}"], "is not what `attar bench --json` prints"),
        (["--source", str(source)], "give the text to profile on"),
        (["-o", str(tmp_path / "page.pdf")], "is a .html file"),
        (["-o", str(tmp_path / "none" / "page.html")], "name a file in a folder that exists"),
    ):
        refused = report(*wrong)
        assert refused.exit_code == 2
        assert sentence in json.loads(refused.stdout.splitlines()[-1])["error"]
    assert foreign.read_text().endswith("Somebody's</title>")
    assert report().exit_code == 0, "its own is replaced"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 700, 1280])
def test_the_look(browser: Browser, outputs: dict[str, Path], tmp_path: Path, width: int, dark: bool) -> None:
    """It asks for nothing, complains of nothing, and a phone is wide enough for texts that can be read."""
    found = [read(path, Speed(31.25, 700.0, 1, 2, "amx")) for path in outputs.values()]
    out = tmp_path / "page.html"
    out.write_text(page.html(page.Contents(found)), encoding="utf-8")
    browser.open("about:blank")
    browser.errors.clear()
    browser.requests.clear()
    browser.show(width, dark=dark)
    browser.open(out.as_uri())
    seen = browser.run(LOOK)
    assert (browser.errors, browser.requests) == ([], [out.as_uri()])
    assert seen["wide"] <= 0
    assert [seen[each] for each in ("pale", "faint", "twice")] == [[], [], []]
    texts = (
        "[...document.querySelectorAll('figure > svg text:not([transform])')].filter(e => e.getClientRects().length)"
    )
    assert browser.run(f"Math.min(...{texts}.map(e => e.getBoundingClientRect().height))") >= LEAST_TEXT
    table = "document.getElementById('summary').parentElement"
    assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth") or width < 1280
    assert "gradient" in browser.run(f"getComputedStyle({table}).backgroundImage"), "which shows that it scrolls"
