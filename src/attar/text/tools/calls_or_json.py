"""The grammar of an answer that calls tools, or else is JSON: requests may have both tools and a format of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attar.protocol.grammar import Grammar
from attar.text.grammars import GrammarError, json_rule, schema_of
from attar.text.tools.constraints import Prove, ToolConstraint, constraint
from attar.text.tools.formats import ToolFormat
from attar.text.tools.tool import Tool, ToolChoice, ToolError


def calls_or_json(
    form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, prove: Prove, final: Grammar, field: str
) -> ToolConstraint | None:
    """Return the constraint of an answer that is calls or, where it may have none, JSON by the schema of `final`, which
    is the request's `field`.

    The other arguments are as for `constraint`. Raises ToolError as it does, and one of `field` where both are too much
    for one grammar.
    """
    if choice.mode != "auto":
        return constraint(form, tools, choice, prove)
    calls = constraint(form, tools, replace(choice, mode="required"), prove)
    if calls is None:
        return None
    rules = ["calls: " + rule.removeprefix("start: ") if rule.startswith("start: ") else rule
             for rule in calls.grammar.text.splitlines()]  # fmt: skip
    schema = {"type": "object"} if final.kind == "json_object" else schema_of(final)
    both = Grammar("lark", "\n".join([*rules, "start: calls | final", f"final: {json_rule(schema)}", ""]))
    try:
        prove(both)
    except GrammarError as error:
        raise ToolError(f"not with these tools: {error}", field) from error
    return replace(calls, grammar=both)
