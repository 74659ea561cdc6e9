"""Declaration of commands: a frozen dataclass of options, a function of that, and help in plain text.

A command with more than a few options has a config class: a dataclass whose fields are its arguments and options, each
annotated as typer expects. `configured` makes a typer command of a function that takes one such object. Classes share
options by inheritance; the order of fields does not matter, because help sorts options by group (`GROUPS`).

typer draws groups (`rich_help_panel`) by rich alone, whose boxes break in logs and narrow terminals. `Command` writes
them as plain sections. Examples are the paragraph of a docstring that begins with `Examples:`, and are not wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from attar.cli.terminal import emit
from attar.errors import Code, UserError

Config = TypeVar("Config")

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # UsageError, of whichever click this typer is built on

RANGE_ERRORS = ("less_than", "less_than_equal", "greater_than", "greater_than_equal")

GROUPS = (
    "Model", "Recipe", "Mixed precision", "Data", "Task", "Calibration", "Comparison", "Prompt", "Constraint", "Tools",
    "Sampling", "Adapter", "Training", "Server", "Trace", "Synthetic prompts", "Requests", "Load", "Workload", "Goal",
    "Experiments", "Device", "Cache", "KV transfer", "Speculation", "Scheduler", "Ray", "HTTP", "Security", "Limits",
    "Output",
)  # fmt: skip
"""The groups of options, in the order of help; options without a group are the last one's."""


def configured(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Make a typer command of a function that takes one `config`, a dataclass; its fields become the parameters."""
    hints = get_type_hints(config, include_extras=True)
    parameters = [
        Parameter(
            each.name, Parameter.KEYWORD_ONLY, annotation=hints[each.name],
            default=Parameter.empty if each.default is MISSING else each.default,
        )
        for each in fields(config)  # type: ignore[arg-type]  # a dataclass, which no type says
    ]  # fmt: skip

    def decorate(function: Callable[[Config], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            function(config(**values))

        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def option(
    group: str, metavar: str, help: str, *names: str, min: float | None = None, max: float | None = None,
    parser: Callable[[str], Any] | None = None, default: str | None = None,
) -> Any:  # fmt: skip
    """Annotate an option of a group that takes a value; help shows `default` where the value is computed."""

    def parsed(given: Any) -> Any:  # typer hands a default to the parser, too
        return parser(given) if parser is not None and isinstance(given, str) else given

    return typer.Option(
        *names, metavar=metavar, help=help, rich_help_panel=group, min=min, max=max,
        parser=None if parser is None else parsed, show_default=True if default is None else default,
    )  # fmt: skip


def flag(group: str, help: str, *names: str) -> Any:
    """Annotate an option of a group that takes no value."""
    return typer.Option(*names, help=help, rich_help_panel=group)


def _usage_code(error: Any) -> Code:
    """Return the code of an invalid command line: by what was wrong, and for a value by the parser's own error."""
    kind = type(error).__name__
    if kind in ("MissingParameter", "NoArgsIsHelpError") or error.message == "Missing command.":
        return "option_missing"
    if kind == "NoSuchOption" or error.message.startswith("No such command"):
        return "name_unknown"
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()  # those of typer's conversion library
    about: dict[str, Any] = found[0] if found else {"type": ""}
    if about["type"] in RANGE_ERRORS:
        return "option_out_of_range"
    if about["type"] == "value_error":
        inner = about["ctx"]["error"]
        return inner.code if isinstance(inner, UserError) else "name_unknown"  # not one of the choices
    return "option_malformed"


def write_help(command: Any, _: Any, formatter: Any) -> None:
    """Write a command's docstring, purpose and examples, as help: examples as they are, other paragraphs wrapped."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        formatter.write_paragraph()
        with formatter.indentation():
            if paragraph.startswith("Examples:"):
                formatter.write("".join(f"  {line}\n" for line in paragraph.splitlines()))
            else:
                formatter.write_text(paragraph)


class Commands(TyperGroup):
    """A table of commands; an invalid command line with --json prints a JSON object as well."""

    format_help_text: Any = write_help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = error.message.replace("Value error, ", "")  # prefix of typer's conversion library
            if ctx.parent is None:
                emit(ctx.meta["json"], {"error": error.format_message(), "code": _usage_code(error)})
            raise


class Command(TyperCommand):
    """A command whose help shows options in groups, and arguments without typer's brackets."""

    format_help_text: Any = write_help

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """List what follows the command's name: brackets mean optional, dots repeatable."""
        pieces = [self.options_metavar or ""]
        for each in self.params:
            if each.param_type_name == "argument":
                name = _name(each) + ("..." if each.nargs != 1 else "")
                pieces.append(name if each.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments and one for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in GROUPS}}
        for each in self.get_params(ctx):
            group = getattr(each, "rich_help_panel", None) or GROUPS[-1]
            sections["Arguments" if each.param_type_name == "argument" else group].append((_name(each), _meaning(each)))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _name(parameter: Any) -> str:
    """Name an argument by its metavar; an option by its spellings, the short one first, and its metavar."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    spelled = ", ".join(sorted(parameter.opts, key=lambda each: str(each).startswith("--")))
    return spelled if parameter.is_flag else f"{spelled} {parameter.metavar}"


def _meaning(parameter: Any) -> str:
    """Say what a parameter does, and its default."""
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if isinstance(default, Enum):
        default = default.value
    elif isinstance(default, float):
        default = f"{default:g}"
    said = f"{parameter.help} Repeatable." if getattr(parameter, "multiple", False) else str(parameter.help)
    if parameter.required:
        return f"{said}  [required]" if parameter.param_type_name == "option" else said
    return said if default is None or getattr(parameter, "is_flag", False) else f"{said}  [default: {default}]"
