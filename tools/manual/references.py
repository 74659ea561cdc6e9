"""References of the documentation site, as Markdown generated from code: what a page says is what the code reads.

Each function returns one page. `PAGES` names them. The builder's own plug-ins are not used, because the pages must be
the same under any builder.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import typer.main

import attar
from attar import env, errors
from attar.checkpoints.gguf.families import ARCHITECTURES as GGUF
from attar.checkpoints.receipts import place, receipt
from attar.cli.commands import GROUPS, _meaning, _name
from attar.cli.main import app as cli
from attar.compression.recipe import methods
from attar.formats.weight_formats import WEIGHT_FORMATS
from attar.kv import schemes as kv
from attar.model.families import ARCHITECTURES
from attar.model.vision.wrappers import WRAPPERS
from attar.plan.gpus import GPUS
from attar.protocol.messages import Stats
from attar.server.api.app import make_app
from attar.server.api.openapi.document import Served, document
from attar.server.errors import CATALOGUE
from attar.server.metrics import EngineMetrics, HttpMetrics, Metrics
from attar.server.models.pool import PoolMetrics
from attar.server.replicas.metrics import ReplicaMetrics

BLOCK = 32  # slots of a block in the table of KV formats
SHAPE = (256, 4096)  # a weight whose bits the table of formats shows; all formats divide it


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; bars in cells are escaped, and line breaks become spaces."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) + "\n"


def prose(text: str | None) -> str:
    """Return a docstring as Markdown: indented examples become code, and angle brackets stay text."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if re.match(r"\s{4}", paragraph):
            paragraphs.append(f"```text\n{inspect.cleandoc(paragraph)}\n```")
        elif re.search(r"\n {2,}\S", paragraph):
            paragraphs.append(f"```text\n{paragraph}\n```")
        else:
            paragraphs.append(paragraph.replace("<", "&lt;"))
    return "\n\n".join(paragraphs)


def command_line() -> str:
    """Describe every command: purpose, usage, arguments and options in the order of its help."""
    top: Any = typer.main.get_command(cli)
    parts = ["# Command line\n", "Every command prints this with `--help`.\n"]
    with top.make_context("attar", [], resilient_parsing=True) as context:
        for path, command in commands(top):
            with command.make_context(path, [], parent=context, resilient_parsing=True) as inner:
                help_, _, examples = (command.help or "").partition("Examples:\n")
                usage = " ".join(command.collect_usage_pieces(inner))
                parts += [f"## attar {path}\n", prose(help_) + "\n"]
                parts.append(f"```text\nattar {path} {usage}\n```\n")
                if examples:
                    parts.append(f"```console\n{inspect.cleandoc(examples)}\n```\n")
                groups: dict[str, list[tuple[str, str]]] = {each: [] for each in ("Arguments", *GROUPS)}
                for each in command.get_params(inner):
                    argument = each.param_type_name == "argument"
                    group = "Arguments" if argument else getattr(each, "rich_help_panel", None) or GROUPS[-1]
                    groups[group].append((f"`{_name(each)}`", _meaning(each).replace("<", "&lt;")))
                for group, rows in groups.items():
                    parts += [f"**{group}**\n", table(("option", "meaning"), rows)] if rows else []
    return "\n".join(parts)


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and object of every command below `group`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def python_api() -> str:
    """Describe what `import attar` offers: signatures, docstrings, public methods and fields."""
    parts = ["# Python API\n", prose(attar.__doc__) + "\n"]
    for name in sorted(each for each in attar.__all__ if each != "__version__"):
        found = getattr(attar, name)
        parts += [f"## attar.{name}\n", signature(name, found), prose(found.__doc__) + "\n"]
        if dataclasses.is_dataclass(found):
            fields = dataclasses.fields(found)
            parts.append(table(("field", "type", "default"), [
                (f"`{each.name}`", f"`{each.type}`", default(each)) for each in fields
            ]))  # fmt: skip
        if inspect.isclass(found):
            for member, value in vars(found).items():
                documented = isinstance(value, property) or inspect.isfunction(value)
                if not member.startswith("_") and documented and value.__doc__:
                    shown = "" if isinstance(value, property) else signature(member, value)
                    parts += [f"### {name}.{member}\n", shown, prose(value.__doc__) + "\n"]
    return "\n".join(parts)


def default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as code; a computed one as its value."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def signature(name: str, found: Any) -> str:
    """Return a call's signature in a code block, one parameter a line where it is long."""
    shown = name + re.sub(r"(?<=: |> )'([^']*)'", r"\1", str(inspect.signature(found)))
    if len(shown) > 100:
        shown = re.sub(r"(?<=[\(,]) ?(?=\w+: |\*\w*|\w+=)", "\n    ", shown)
    return f"```text\n{shown}\n```\n"


def http_api() -> str:
    """Describe routes and the fields of their bodies, from the OpenAPI document of a server without a model."""
    engine = SimpleNamespace(ready=None, places=SimpleNamespace(most=1))
    nothing: Any = SimpleNamespace(engine=engine, aliases=(), shortest=0, infill=True, reranker=True)
    found = document(make_app(nothing, nothing, nothing, nothing), Served(infill=True))
    rows, bodies = [], []
    for path, operations in sorted(found["paths"].items()):
        for method, operation in operations.items():
            if method == "head":
                continue
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            bodies += [name] if name and name not in bodies else []
            link = f"[{name}](#{name.lower()})" if name else ""
            about = operation.get("description") or operation.get("summary", "")
            rows.append((f"`{method.upper()} {path}`", " ".join(about.split()), link))
    parts = ["# HTTP API\n", "A server answers `GET /openapi.json` with the exact document. This page is made of it.\n"]
    parts += ["## Routes\n", table(("route", "purpose", "body"), rows), "## Bodies\n"]
    for name in bodies:
        schema = found["components"]["schemas"][name]
        needed, kinds = schema.get("required", []), {field: kind(each) for field, each in schema["properties"].items()}
        parts += [f"### {name}\n", prose(schema.get("description")) + "\n"]
        parts.append(table(("field", "type", "needed"), [
            (f"`{field}`", f"`{shown}`", "yes" if field in needed else "")
            for field, shown in sorted(kinds.items()) if shown != "any"
        ]))  # fmt: skip
        ignored = ", ".join(f"`{field}`" for field, shown in sorted(kinds.items()) if shown == "any")
        parts += [f"Accepted with any value, and without effect: {ignored}.\n"] if ignored else []
    return "\n".join(parts)


def kind(schema: Mapping[str, Any] | bool, depth: int = 0) -> str:
    """Return a JSON schema's type in a few words, with its bounds."""
    if isinstance(schema, bool):
        return "any" if schema else "nothing"
    if "prefixItems" in schema:
        return f"list of {', '.join(kind(each, depth + 1) for each in schema['prefixItems'])}"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        found = list(dict.fromkeys(kind(each, depth) for each in schema["anyOf"]))
        return " or ".join(found) if depth < 3 else "any"
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join("null" if each is None else repr(each) for each in values[:8])
    name = schema.get("type", "any")
    if name == "array":
        return f"list of {kind(schema.get('items', {}), depth + 1)}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = f" {'' if low is None else low}..{'' if high is None else high}" if (low, high) != (None, None) else ""
    return f"{name}{bounds}"


def recipes() -> str:
    """Describe every method and its options, and every weight format with its bits."""
    passes: dict[str, Any] = {**methods.ROTATIONS, **methods.METHODS, **methods.TUNINGS}
    parts = ["# Methods and weight formats\n", "A recipe is `method[+method]-scheme`. A recipe file sets options.\n"]
    parts.append("## Methods\n")
    for name, found in passes.items():
        parts += [f"### {name}\n", prose(found.__doc__) + "\n"]
        hints = typing.get_type_hints(found)
        rows = [(f"`{f.name}`", f"`{plain(hints[f.name])}`", default(f)) for f in dataclasses.fields(found)]
        parts += [table(("option", "type", "default"), rows)] if rows else []
    rows, columns = SHAPE
    formats = [
        (f"`{name}`", f"{sum(8 * part.bytes for part in form.parts(SHAPE, 'float16').values()) / (rows * columns):.4f}")
        for name, form in WEIGHT_FORMATS.items()
    ]
    parts += ["## Weight formats\n", f"Bits per weight of a {rows} x {columns} matrix, scales included.\n"]
    parts.append(table(("format", "bits/weight"), formats))
    parts.append("Integer grids (`w4g128`, `w8a8`, ...) and float8 have names built of their parts.\n")
    return "\n".join(parts)


def plain(hint: Any) -> str:
    """Return a type as Python spells it, without module names."""
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    return shown.replace("typing.", "").replace("collections.abc.", "")


def kv_formats() -> str:
    """Describe every format of the KV cache with its bits for two sizes of heads."""
    rows = [
        (
            f"`{name}`", *(f"{each.bits_per_value(width, BLOCK):.4g}" for width in (64, 128)),
            "yes" if each.calibrated else "", "yes" if each.recent else "",
        )
        for name, each in kv.SCHEMES.items()
    ]  # fmt: skip
    head = ("format", "bits, heads of 64", "bits, heads of 128", "calibrated", "current block in 16 bits")
    about = "`--kv NAME` chooses one. Bits are per stored number, with scales."
    return f"# KV cache formats\n\n{about}\n\n{table(head, rows)}"


def metrics() -> str:
    """Describe every metric of `/metrics`: of one engine, of several models, and of several engines of a model."""
    http, stats = HttpMetrics(), Stats(*[0] * 10, step_seconds=0.0, sliding_blocks=(0, 0, 0))
    engine: Any = SimpleNamespace(ready=None, stats=stats, held=0, heartbeat=SimpleNamespace(trouble=None))
    pool: Any = SimpleNamespace(scheduler=SimpleNamespace(models={}))
    group: Any = SimpleNamespace(replicas=[], held=0, replays=Counter())
    found = [
        *http.registry.collect(), *Metrics(EngineMetrics(engine), http).registry.collect(),
        *PoolMetrics(pool).collect(), *ReplicaMetrics(group).collect(),
    ]  # fmt: skip
    rows = {}
    for each in found:
        suffix = "_total" if each.type == "counter" else ""
        rows[each.name + suffix] = (f"`{each.name}{suffix}`", each.type, each.documentation)
    head = ("metric", "type", "meaning")
    listed = table(head, [rows[name] for name in sorted(rows)])
    return f"# Metrics\n\n`/metrics` serves these to Prometheus.\n\n{listed}"


def environment() -> str:
    """Describe every environment flag."""
    rows = []
    for field in dataclasses.fields(env.Env):
        rows.append((f"`{env.flag_name(field.name)}`", field.metadata["doc"]))
    return f"# Environment variables\n\nAn unknown `ATTAR_` name is an error.\n\n{table(('variable', 'meaning'), rows)}"


def error_codes() -> str:
    """List the codes of both catalogues: of the command line and Python, and of HTTP."""
    here = ", ".join(f"`{code}`" for code in errors.CODES)
    rows = [(f"`{code}`", each.status, each.openai, each.anthropic) for code, each in CATALOGUE.items()]
    return (
        "# Error codes\n\n## Command line and Python\n\n[Errors](errors.md) says what helps against each.\n\n"
        f"{here}\n\n## HTTP\n\n{table(('code', 'status', 'OpenAI type', 'Anthropic type'), rows)}"
    )


def receipts() -> str:
    """Describe the keys of a receipt."""
    rows = [(f"`{key}`", "yes" if key in receipt.REQUIRED else "", about) for key, about in receipt.KEYS.items()]
    figures = ", ".join(f"`{each}`" for each in receipt.FIGURES)
    about = f"`{place.NAME}`, format {receipt.FORMAT}. [Formats](formats.md#the-receipt) explains it."
    return (
        f"# Receipt schema\n\n{about}\n\n"
        f"{table(('key', 'always', 'meaning'), rows)}\n`evaluation` has {figures}, null where not measured.\n"
    )


def models() -> str:
    """List the architectures of folders and GGUF files, and the GPUs that `attar plan` knows."""
    in_files: dict[str, list[str]] = {}
    for name, each in GGUF.items():
        for architecture in filter(None, (each.name, each.experts)):
            in_files.setdefault(architecture, []).append(f"`{name}`")
    rows = [(f"`{name}`", ", ".join(dict.fromkeys(in_files.get(name, [])))) for name in (*ARCHITECTURES, *WRAPPERS)]
    cards = [
        (f"`{each.name}`", each.memory / 10**9, each.bandwidth / 1e9,
         ", ".join(f"{kind} {rate / 1e12:g}" for kind, rate in each.operations.items()))
        for each in GPUS.values()
    ]  # fmt: skip
    head = ("GPU", "memory, GB", "bandwidth, GB/s", "10^12 operations a second")
    return (
        f"# Supported models\n\n{table(('architecture of config.json', 'in GGUF files'), rows)}\n"
        f"## GPUs of the planner\n\n`attar plan --gpu NAME` takes these data sheets.\n\n{table(head, cards)}"
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/command_line.md": command_line,
    "reference/python.md": python_api,
    "reference/http.md": http_api,
    "reference/methods.md": recipes,
    "reference/kv_formats.md": kv_formats,
    "reference/metrics.md": metrics,
    "reference/environment.md": environment,
    "reference/error_codes.md": error_codes,
    "reference/receipt.md": receipts,
    "reference/models.md": models,
}
"""Every generated page, by its path in the site."""
