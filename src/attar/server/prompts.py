"""Prompts of token ids from texts and conversations, outside the event loop: megabytes of text stall no stream.

A job whose caller gives up is not begun. One that was begun goes on, since nothing stops a tokenizer. So texts that are
known to be far too long are never tokenized. A refusal gives the prompt's length and the context's.
"""

from __future__ import annotations

import datetime
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast

from attar import strict_json
from attar.faults import point
from attar.images.messages import MARK, in_parts
from attar.protocol.images import ImageInput
from attar.server.errors import APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.images import ImageReader, has_images, taken
from attar.server.prompt_room import Room, beyond, check_room, in_vocabulary
from attar.text.answers.reasoning import SWITCHES, Place, ReasoningMarkers, switched
from attar.text.forms.infill import File, Infill
from attar.text.forms.rerank import Reranker
from attar.text.literal import LiteralChat, Messages
from attar.text.template import TemplateError, lists_only, reads, render_chat
from attar.text.token_bounds import TokenBounds
from attar.text.tokenizer import Detokenizer, Tokenizer
from attar.text.tools.formats import ToolFormat, detect
from attar.text.tools.generic import shown
from attar.text.tools.history import has_calls
from attar.text.tools.tool import Tool, ToolError

T = TypeVar("T")

_PRIVATE = re.compile(r"0x[0-9a-fA-F]|(?<![\w/.<:])~?/[\w.-]+/|\b[A-Za-z]:\\")
"""What looks like an address in memory, or an absolute path."""
Prompt = str | Sequence[int | str]
"""A prompt: a text, or token ids and texts, one behind the other."""
DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
"""Variables by which templates that cannot ask for the day are told, as llama.cpp does: Llama 3's, firefunction's."""
Cut = Callable[[tuple[int, ...]], tuple[int, ...]]
MOST_CUT = 1 << 20  # tokens of a prompt that is to be cut
LAST_TOKENS = 64  # of a prompt: where its markers of reasoning are looked for
NO_VARIABLES: Mapping[str, Any] = {}
FEW_IDS = 4096  # checked on the spot, in less time than a thread takes to start


class Echo(NamedTuple):
    """A prompt's text, and where each of its tokens begins there, in characters."""

    text: str
    starts: array[int]


class Turn(Enum):
    """What a conversation ends with: the opening of the assistant's turn, the last message as it stands, which the
    answer continues, or a turn that has ended."""

    OPENED = "opened"
    CONTINUED = "continued"
    ENDED = "ended"

    @classmethod
    def of(cls, opened: bool | None, continued: bool | None) -> Turn:
        """Return the turn by the fields `add_generation_prompt` and `continue_final_message`."""
        if continued:
            return cls.CONTINUED
        return cls.ENDED if opened is False else cls.OPENED


class ChatPrompt(NamedTuple):
    """A conversation's token ids, where the answer begins: before, inside or behind its reasoning section, and the
    images that it has."""

    ids: tuple[int, ...]
    place: Place
    images: tuple[ImageInput, ...] = ()


class Prompts:
    """The tokenizer and chat template of the served model, for requests of a `key`, or its salt. `date` is what chat
    templates print, by default today. `reasons`: whether models reason where a request does not say; None leaves it to
    them. `images` reads those of messages. Raises APIError for what cannot be a prompt."""

    def __init__(
        self, tokenizer: Tokenizer, threads: TextThreads, date: datetime.date | None = None,
        reasons: bool | None = None, images: ImageReader | None = None,
    ) -> None:  # fmt: skip
        self.images = images
        self.tokenizer, self._date, self._reasons = tokenizer, date, reasons
        self.shortest = 0 if tokenizer.encode("") else 1  # characters of a text that has tokens
        self._threads = threads
        self._bounds = TokenBounds(tokenizer)
        self._literal = LiteralChat(tokenizer)
        self.infill = Infill.of(tokenizer, self._literal.text_ids)
        self.reranker = Reranker.of(tokenizer, self._literal.text_ids)
        self._tool_format: tuple[Tokenizer, ToolFormat] | None = None

    @property
    def template(self) -> str:
        """The model's chat template, empty where it has none."""
        return self.tokenizer.chat_templates.get("default", "")

    @property
    def reasoning(self) -> ReasoningMarkers | None:
        """The markers of the model's reasoning section; None where it has none."""
        return ReasoningMarkers.of(self.tokenizer, self.template)

    def tool_format(self) -> ToolFormat:
        """Return the model's syntax of calls, found by its template at the first call; that renders a few times. Raises
        APIError where the model has no template."""
        tokenizer, template = self.tokenizer, self._template(tools=True)
        known = self._tool_format
        if known is None or known[0] is not tokenizer:
            known = self._tool_format = (tokenizer, detect(tokenizer, template))
        return known[1]

    async def ids(
        self, key: bytes, prompts: Sequence[Prompt], room: Room, cut: Cut | None = None
    ) -> list[tuple[int, ...]]:
        """Return the token ids of prompts, each a text, token ids, or pieces of both kinds, after a `cut` of each.
        Refused are those that have no room, the longest texts by their bytes alone."""
        size, vocab, name = sum(map(len, prompts)), room.vocab, room.field
        most = room.context if cut is None else max(room.context, MOST_CUT)
        if size <= FEW_IDS and all(not isinstance(prompt, str) and _is_ids(prompt) for prompt in prompts):
            found = self._encoded(prompts, vocab, name, most)
        else:
            found = await self._threads.run(key, size, lambda: self._encoded(prompts, vocab, name, most))
        if cut is not None:
            if (longest := max(map(len, found))) > most:
                raise beyond(longest, most, name)
            found = [cut(prompt) for prompt in found]
        check_room(found, room)
        return found

    async def infill_ids(
        self, key: bytes, prefixes: Sequence[str | Sequence[int]], suffix: str, room: Room,
        files: Sequence[File] = (),
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Return the prompts for what comes between each prefix and the suffix. Raises APIError as `ids`, and where the
        model has no tokens for it."""
        infill = self.infill
        if infill is None:
            message = f"{room.field}: this model has no tokens to fill in the middle of a text"
            raise APIError("unsupported_field", message, room.field)

        def encode() -> list[tuple[int, ...]]:
            for text in (*prefixes, suffix, *(text for file in files for text in file)):
                if isinstance(text, str):
                    self._check_length(text, room.field, room.context)
                elif len(text) <= room.context:
                    in_vocabulary(text, room.vocab, room.field)
            return _tokenized(lambda: [infill.ids(prefix, suffix, files) for prefix in prefixes])

        size = sum(map(len, prefixes)) + len(suffix) + sum(len(text) for file in files for text in file)
        found = await self._threads.run(key, size, encode)
        check_room(found, room)
        return found

    async def rerank_ids(
        self, key: bytes, query: str, documents: Sequence[str], instruction: str, room: Room, most: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return a reranker's prompt for each document, of which `most` tokens are read. Raises APIError as `ids`, and
        where the model is none."""
        reranker = self.reranker
        if reranker is None:
            message = "model: it is no causal reranker, which needs the tokens `yes` and `no` and Qwen3's chat markup"
            raise APIError("unsupported_field", message, "model")

        def encode() -> list[tuple[int, ...]]:
            for text in (query, instruction, *(documents if most is None else ())):
                self._check_length(text, room.field, room.context)
            for text in documents:
                self._check_length(text, room.field, MOST_CUT)
            read = documents if most is None else [self._beginning(document, most) for document in documents]
            return _tokenized(lambda: [reranker.ids(query, document, instruction) for document in read])

        size = sum(map(len, documents)) + len(documents) * (len(query) + len(instruction))
        found = await self._threads.run(key, size, encode)
        check_room(found, room)
        return found

    async def text_ids(self, key: bytes, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        return await self._threads.run(
            key, len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def chat(
        self, key: bytes, messages: Sequence[dict[str, Any]], context: int | None = None, turn: Turn = Turn.OPENED,
        variables: Mapping[str, Any] = NO_VARIABLES, tools: Sequence[Tool] = (),
    ) -> ChatPrompt:  # fmt: skip
        """Return a conversation as token ids, with the assistant's `turn` at its end. Messages are in OpenAI's shape,
        content as text, with marks and `images` where it has any. `variables` are further ones of the template. One
        that leaves no room in the `context` is refused."""
        messages, images = await self._decoded(key, messages)
        size = sum(len(message["content"]) + _called(message) for message in messages)

        def render() -> ChatPrompt:
            said, more = self._as_said(messages, tools)
            return self._render(said, context, turn, {**variables, **more}, images)

        made = await self._threads.run(key, size, render, chat=True)
        if not made.ids:
            raise APIError("empty_prompt", "messages: no tokens", "messages")
        if context is not None and len(made.ids) >= context:
            raise beyond(len(made.ids), context, "messages")
        return made

    async def given(self, key: bytes, ids: Sequence[int], room: Room) -> ChatPrompt:
        """Return a conversation of which another server has made the token ids. Raises APIError as `ids`."""
        [found] = await self.ids(key, [ids], room)
        text = await self.text(key, found[-LAST_TOKENS:])
        return ChatPrompt(found, Place.BEFORE if self.reasoning is None else self.reasoning.place(text))

    async def chat_ids(
        self, key: bytes, messages: Sequence[dict[str, Any]], context: int | None = None, turn: Turn = Turn.OPENED,
        variables: Mapping[str, Any] = NO_VARIABLES, tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the token ids of `chat`."""
        return (await self.chat(key, messages, context, turn, variables, tools)).ids

    async def chat_text(
        self, key: bytes, messages: Sequence[dict[str, Any]], turn: Turn = Turn.OPENED,
        variables: Mapping[str, Any] = NO_VARIABLES, tools: Sequence[Tool] = (),
    ) -> str:  # fmt: skip
        """Return a conversation as the chat template renders it. The arguments are those of `chat`."""
        messages, images = await self._decoded(key, messages)
        size = sum(len(message["content"]) + _called(message) for message in messages)

        def render() -> str:
            said, more = self._as_said(messages, tools)
            given = {**variables, **more}
            template = self._template(tools=bool(given.get("tools")))
            return _rendered(
                lambda: self._seen(self._text(template, self._parted(template, said), turn, given), images)
            )

        return await self._threads.run(key, size, render, chat=True)

    async def text(self, key: bytes, ids: Sequence[int], vocab: int | None = None) -> str:
        """Return the text of token ids, special tokens included. Raises APIError for ids beyond `vocab`."""

        def decode() -> str:
            if vocab is not None:
                in_vocabulary(ids, vocab, "tokens")
            return self._decode(ids)

        return await self._threads.run(key, len(ids), decode)

    async def echoes(self, key: bytes, prompts: Sequence[str | Sequence[int]], scored: bool) -> list[Echo]:
        """Return prompts, each a text or token ids, as answers echo them; where they are `scored`, with the starts of
        their tokens."""

        def echo(prompt: str | Sequence[int]) -> Echo:
            if isinstance(prompt, str):
                return Echo(prompt, array("I", self.tokenizer.starts(prompt) if scored else ()))
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
            lengths = (len(detokenizer.push(token)) for token in prompt[:-1])
            return Echo(self._decode(prompt), array("I", accumulate(lengths, initial=0) if scored else ()))

        return [await self._threads.run(key, len(prompt), partial(echo, prompt)) for prompt in prompts]

    def _encoded(self, prompts: Sequence[Prompt], vocab: int, name: str, context: int) -> list[tuple[int, ...]]:
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(prompt, name, context)
            elif not _is_ids(prompt):
                self._check_pieces(prompt, vocab, name, context)
            elif len(prompt) <= context:
                in_vocabulary(cast(Sequence[int], prompt), vocab, name)
        return [self._encode(prompt) if isinstance(prompt, str) else self._joined(prompt) for prompt in prompts]

    def _check_pieces(self, pieces: Sequence[int | str], vocab: int, name: str, context: int) -> None:
        """Raise APIError for pieces with a text that is far too long, more of them than the context has tokens, or
        tokens beyond `vocab`. An empty text has no tokens, but so many pieces are refused too."""
        if len(pieces) > context:
            raise beyond(len(pieces), context, name, least=True)
        for piece in pieces:
            if isinstance(piece, str):
                self._check_length(piece, name, context)
        in_vocabulary([piece for piece in pieces if isinstance(piece, int)], vocab, name)

    def _joined(self, pieces: Sequence[int | str]) -> tuple[int, ...]:
        """Return the tokens of pieces. Special tokens that a prompt begins with come before a text that is first."""
        if _is_ids(pieces):
            return tuple(cast(Sequence[int], pieces))
        found: list[int] = []
        for at, piece in enumerate(pieces):
            if isinstance(piece, int):
                found.append(piece)
            else:
                found += _tokenized(partial(self._encode_piece, piece, at == 0))
        return tuple(found)

    def _encode_piece(self, text: str, first: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=first)

    def _beginning(self, text: str, most: int) -> str:
        """Return the text of the first tokens of a text, without a character that they break."""
        ids = self._literal.text_ids(text)
        return text if len(ids) <= most else self._decode(ids[:most]).rstrip("\ufffd")

    def _check_length(self, text: str, name: str, context: int | None) -> None:
        if context is not None and (least := self._bounds.at_least(text)) > context:
            raise beyond(least, context, name, least=True)

    def _decode(self, ids: Sequence[int]) -> str:
        point("prompt.decode")
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, prompt: str) -> tuple[int, ...]:
        return _tokenized(lambda: tuple(self.tokenizer.encode(prompt)))

    def _template(self, tools: bool) -> str:
        try:
            return self.tokenizer.chat_template(tools)
        except ValueError as error:
            raise APIError("no_chat_template", "this model has no chat template: use /v1/completions") from error

    def _as_said(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
    ) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
        """Return messages as the template takes them, and its variables for tools. Raises APIError for calls and
        results that do not belong together."""
        if not tools and not has_calls(messages):
            return messages, {}
        form = self.tool_format()
        try:
            return shown(form, messages, tools)
        except ToolError as error:
            raise APIError("invalid_value", f"{error.param}: {error}", error.param) from error

    async def _decoded(
        self, key: bytes, messages: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[dict[str, Any]], tuple[ImageInput, ...]]:
        """Return messages without their images, whose places are marked, and the images once they are decoded."""
        if not has_images(messages):
            return messages, ()
        said, sources = taken(messages)
        if self.images is None:
            raise APIError("unsupported_field", "messages: this model takes no images", "messages")
        return said, await self.images.decode(key, sources)

    def _parted(self, template: str, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return messages as the template takes them: content in parts where it has images, or takes no texts."""
        always = lists_only(template)
        if not always and not any(MARK in message["content"] for message in messages):
            return messages
        return [message | {"content": in_parts(message["content"], always)} for message in messages]

    def _seen(self, text: str, images: Sequence[ImageInput]) -> str:
        """Return a rendered text with the tokens of its images."""
        return self.images.places.expand(text, images) if self.images is not None and images else text

    def _render(
        self, messages: Sequence[dict[str, Any]], context: int | None, turn: Turn, variables: Mapping[str, Any],
        images: tuple[ImageInput, ...] = (),
    ) -> ChatPrompt:  # fmt: skip
        point("prompt.render")
        template = self._template(tools=bool(variables.get("tools")))
        messages = self._parted(template, messages)
        place, markers = Place.BEFORE, self.reasoning

        def render(said: Messages, more: Mapping[str, Any] = NO_VARIABLES) -> str:
            nonlocal place
            text = self._seen(self._text(template, said, turn, more), images)
            if said is messages:  # else it has placeholders, longer than the text they stand for
                self._check_length(text, "messages", context)
            if markers is not None:
                place = markers.place(text, _last_text(said) if turn is Turn.CONTINUED else None)
            return text

        ids = _rendered(lambda: tuple(self._literal.encode(messages, render, variables or None)))
        return ChatPrompt(ids, place, images)

    def _text(self, template: str, said: Messages, turn: Turn, more: Mapping[str, Any]) -> str:
        tokenizer = self.tokenizer
        day = self._date or datetime.date.today()
        dates = {name: day.strftime(form) for name, form in DATES.items() if reads(template, name)}
        reasons = {} if self._reasons is None else switched(template, self._reasons)
        more = {**dates, **reasons, **more}
        text = render_chat(
            template, said, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token,
            add_generation_prompt=turn is Turn.OPENED, continue_final_message=turn is Turn.CONTINUED,
            date=self._date, **more,
        )  # fmt: skip
        markers = self.reasoning
        if markers is None or turn is not Turn.OPENED or all(more.get(name) is not False for name in SWITCHES):
            return text
        return text + markers.end if markers.place(text) is Place.INSIDE else text


def _rendered(make: Callable[[], T]) -> T:
    """Return what `make` makes of a conversation. Raises APIError where its template cannot render it."""
    try:
        return make()
    except TemplateError as error:
        raise APIError("template_error", f"the chat template: {_fit(str(error))}", "messages") from error
    except ValueError as error:
        raise APIError("invalid_value", "messages: not text that this model can read", "messages") from error


def _last_text(messages: Messages) -> str:
    """Return the text that a conversation ends with."""
    content = messages[-1]["content"]
    return content if isinstance(content, str) else content[-1].get("text", "") if content else ""


def _called(message: Mapping[str, Any]) -> int:
    """Return the characters of a message's calls."""
    return sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def _tokenized(encode: Callable[[], T]) -> T:
    """Return the token ids that `encode` makes of texts."""
    point("prompt.tokenize")
    return encode()


def _is_ids(prompt: Sequence[int | str]) -> bool:
    """Return whether a prompt that is no text is of token ids alone."""
    return str not in set(map(type, prompt))


def _fit(sentence: str) -> str:
    """Return a template's message, for the client that caused it; not one with what looks like an address in memory or
    a path of this machine. Words with a slash between them, tags and URLs are neither."""
    return "it cannot render this conversation" if _PRIVATE.search(sentence) else strict_json.shown(sentence, 200)
