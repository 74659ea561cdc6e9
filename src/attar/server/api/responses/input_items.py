"""The input items of a stored answer: `GET /v1/responses/ID/input_items`, in pages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from starlette.datastructures import QueryParams

from attar.server.api.images.parts import InputImage
from attar.server.api.responses import types
from attar.server.api.responses.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    ItemContent,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
    TextContent,
)
from attar.server.api.responses.schemas import SCORES, Include
from attar.server.errors import APIError

MOST, DEFAULT = 100, 20  # items of a page
ORDERS = ("asc", "desc")

PARAMETERS: list[dict[str, Any]] = [
    {"name": "order", "in": "query", "schema": {"enum": list(ORDERS), "default": "desc"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST, "default": DEFAULT}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "include[]", "in": "query", "schema": {"type": "array", "items": {"enum": list(get_args(Include))}}},
]
"""Parameters of the query, for the OpenAPI document."""

_PREFIXES: dict[type[Item], str] = {
    MessageItem: "msg_", FunctionCall: "fc_", FunctionCallOutput: "fco_",
    CustomToolCall: "ctc_", CustomToolCallOutput: "ctco_", ReasoningItem: "rs_",
}  # fmt: skip


class Page(NamedTuple):
    """A part of a list: at most `limit` items behind the id `after`, the newest first where `order` is `desc`. With
    `scored`, texts of the model have their log probabilities."""

    order: str = "desc"
    limit: int = DEFAULT
    after: str | None = None
    scored: bool = False

    @classmethod
    def read(cls, query: QueryParams) -> Page:
        """Read a query. Raises APIError for a parameter that is refused."""
        scored = False
        for name in ("include", "include[]"):
            for each in query.getlist(name):
                if each not in get_args(Include):
                    raise APIError("unsupported_field", f"{name}: one of {', '.join(get_args(Include))}", name)
                scored |= each == SCORES
        order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT))
        if order not in ORDERS:
            raise APIError("invalid_value", "order: asc or desc", "order")
        if not (limit.isascii() and limit.isdigit()) or len(limit) > len(str(MOST)) or not 1 <= int(limit) <= MOST:
            raise APIError("out_of_range", f"limit: a whole number from 1 to {MOST}", "limit")
        return cls(order, int(limit), query.get("after"), scored)

    def of(self, items: Sequence[Item]) -> types.InputItemList:
        """Return the page of items, of which the oldest is the first. Raises APIError for an unknown `after`."""
        listed = _named(items)
        if self.order == "desc":
            listed.reverse()
        begin = 0
        if self.after is not None:
            begin = next((at for at, (id, _) in enumerate(listed, 1) if id == self.after), 0)
            if not begin:
                raise APIError("invalid_value", "after: no input item of this answer has that id", "after")
        data = [_told(item, id, self.scored) for id, item in listed[begin : begin + self.limit]]
        return types.InputItemList(
            object="list", data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
            has_more=begin + self.limit < len(listed),
        )  # fmt: skip


def identified(items: Iterable[Item]) -> list[Item]:
    """Return items that each have an id: a new one where the client has given none."""
    return [
        item if item.id else msgspec.structs.replace(item, id=_PREFIXES[type(item)] + secrets.token_hex(16))
        for item in items
    ]


def _named(items: Sequence[Item]) -> list[tuple[str, Item]]:
    """Return items with their ids. One that a client has given to several items is numbered: pages would not get past
    it otherwise."""
    taken: dict[str, int] = {}
    found = []
    for item in items:
        id = own = item.id or ""
        while id in taken:
            taken[own] += 1
            id = f"{own}_{taken[own]}"
        taken[id] = 1
        found.append((id, item))
    return found


def _told(item: Item, id: str, scored: bool) -> types.ListedItem:
    status = item.status or "completed"
    match item:
        case MessageItem(role=role):
            said = _said(item.content, scored) if role == "assistant" else _given(item.content)
            return types.ListedMessage(id=id, status=status, role=role, content=said)
        case FunctionCall(call_id=call, name=name, arguments=arguments, namespace=space):
            unset = msgspec.UNSET if space is None else space
            return types.MadeCall(
                id=id, status=status, call_id=call, name=name, arguments=arguments, namespace=unset
            )  # fmt: skip
        case CustomToolCall(call_id=call, name=name, input=input):
            return types.MadeCustomCall(id=id, status=status, call_id=call, name=name, input=input)
        case FunctionCallOutput(call_id=call, output=output):
            told = output if isinstance(output, str) else _given(output)
            custom = isinstance(item, CustomToolCallOutput)
            kind = types.ListedCustomOutput if custom else types.ListedOutput
            return kind(id=id, status=status, call_id=call, output=told)
        case ReasoningItem():
            content = [types.ReasoningText(text=part.text) for part in item.content or ()]
            return types.SaidReasoning(id=id, status=status, summary=[], content=content)


def _given(content: ItemContent | TextContent) -> list[types.ListedText | types.ListedImage]:
    """Return what a user, the system or a function says or shows."""
    parts = [InputText(text=content)] if isinstance(content, str) else content
    return [
        types.ListedImage(image_url=part.image_url, detail=part.detail or "auto")
        if isinstance(part, InputImage)
        else types.ListedText(text=part.refusal if isinstance(part, Refusal) else part.text)
        for part in parts
    ]


def _said(content: ItemContent, scored: bool) -> list[types.SaidText | types.SaidRefusal]:
    """Return what the model has said, with its log probabilities where it is `scored`."""
    parts = [OutputText(text=content)] if isinstance(content, str) else content
    return [
        types.SaidRefusal(refusal=part.refusal)
        if isinstance(part, Refusal)
        else types.SaidText(annotations=[], logprobs=_scores(part) if scored else [], text=part.text)
        for part in parts
        if not isinstance(part, InputImage)  # which no assistant's message has
    ]


def _scores(part: OutputText | InputText) -> list[Any]:
    """Return the log probabilities that a text came with: of one that a client has made up there may be none."""
    found = getattr(part, "logprobs", None)
    return found if isinstance(found, list) else []
