"""Text to prompts of token ids, beside the event loop: a render or a tokenization of megabytes stalls no stream.

Threads do it, a few, since the tokenizer releases Python's lock and templates are another process's work. Conversations
have threads of their own: a template that takes all the time it may holds up other conversations, which wait for the
same process, and no smaller texts. So have large texts, of which a tokenizer does about a megabyte a second: whoever
asks little does not wait for them, and where several keys share the server, of each there is one at a time. How many
jobs may wait is bounded by how many requests the server holds at all. A job whose caller gives up is not begun; one
that was begun goes on, since nothing stops a tokenizer: so texts that are seen to be far too long are not given to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from attar.faults import point
from attar.server import strict_json
from attar.server.admission.request_limits import beyond
from attar.server.api import schemas
from attar.server.api.sampling_params import in_vocabulary
from attar.server.api.schemas import text_of
from attar.server.errors import Refusal
from attar.server.lengths import Lengths
from attar.server.workers import Workers
from attar.text.literal import LiteralChat, Messages
from attar.text.template import TemplateError, render_chat
from attar.text.tokenizer import Tokenizer

THREADS = 2
LARGE = 64 << 10  # characters
FEW_IDS = 4096  # that are looked at on the spot, in less time than a thread is asked
LARGE_BODY = 16 << 10  # bytes: smaller ones are parsed on the spot, in less time than a thread is asked

Value = TypeVar("Value")
BodyType = TypeVar("BodyType", bound=schemas.Body)

logger = logging.getLogger(__name__)


class Prompts:
    """The tokenizer and the chat template of the served model, for requests of a `key`, or its salt. Raises Refusal for
    what cannot be a prompt."""

    def __init__(self, tokenizer: Tokenizer, keys: int = 0) -> None:
        """So many `keys` share the threads; with one, or none, nobody is kept out by who takes all of them."""
        self.tokenizer = tokenizer
        self.shortest = 0 if tokenizer.encode("") else 1  # characters of a text that has tokens
        self._lengths = Lengths(tokenizer)
        self._literal = LiteralChat(tokenizer)
        self._texts = Workers("prompts", THREADS, THREADS)
        self._chats = Workers("renders", THREADS, THREADS)
        self._large = Workers("large", THREADS, THREADS if keys < 2 else 1)

    def close(self) -> None:
        """Let the threads go."""
        for workers in (self._texts, self._chats, self._large):
            workers.close()

    async def read(self, key: bytes, kind: type[BodyType], body: bytes) -> BodyType:
        """A request's body as `kind`."""
        if len(body) <= LARGE_BODY:
            return schemas.read(kind, body)
        return await self._beside(key, len(body), lambda: schemas.read(kind, body))

    async def ids(
        self,
        key: bytes,
        prompts: Sequence[str | Sequence[int]],
        vocab: int,
        name: str,
        context: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Token ids of prompts that are texts or token ids already. `name` is their field. Where a `context` is given,
        what is seen to be longer by its bytes alone is refused; what is not may still be longer, and is not looked at
        where it is token ids."""
        size = sum(map(len, prompts))
        if size <= FEW_IDS and not any(isinstance(prompt, str) for prompt in prompts):
            found = self._encoded(prompts, vocab, name, context)
        else:
            found = await self._beside(key, size, lambda: self._encoded(prompts, vocab, name, context))
        if not all(found):
            raise Refusal("empty_prompt", f"{name}: no tokens", name)
        return found

    async def text_ids(self, key: bytes, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return await self._beside(
            key, len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def chat_ids(
        self, key: bytes, messages: Sequence[dict[str, str]], context: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's answer. `context` is as of `ids`."""
        size = sum(len(message["content"]) for message in messages)
        workers = self._large if size > LARGE else self._chats
        ids = await workers.run(key, lambda: self._render(messages, context))
        if not ids:
            raise Refusal("empty_prompt", "messages: no tokens", "messages")
        return ids

    async def text(self, key: bytes, ids: Sequence[int], vocab: int | None = None) -> str:
        """The text of token ids, special tokens and all. Raises Refusal for those beyond `vocab`."""

        def decode() -> str:
            if vocab is not None:
                in_vocabulary(ids, vocab, "tokens")
            return self._decode(ids)

        return await self._beside(key, len(ids), decode)

    async def _beside(self, key: bytes, size: int, work: Callable[[], Value]) -> Value:
        return await (self._large if size > LARGE else self._texts).run(key, work)

    def _encoded(
        self, prompts: Sequence[str | Sequence[int]], vocab: int, name: str, context: int | None
    ) -> list[tuple[int, ...]]:
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(prompt, name, context)
            elif context is None or len(prompt) <= context:
                in_vocabulary(prompt, vocab, name)
        return [self._encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]

    def _check_length(self, text: str, name: str, context: int | None) -> None:
        if context is not None and (least := self._lengths.at_least(text)) > context:
            raise beyond(f"at least {least}", 0, context, name)

    def _encode(self, prompt: str) -> tuple[int, ...]:
        point("prompt.tokenize")
        return tuple(self.tokenizer.encode(prompt))

    def _decode(self, ids: Sequence[int]) -> str:
        point("prompt.decode")
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _render(self, messages: Sequence[dict[str, str]], context: int | None = None) -> tuple[int, ...]:
        point("prompt.render")
        tokenizer = self.tokenizer
        try:
            template = tokenizer.chat_template()
        except ValueError as error:
            raise Refusal("no_chat_template", "this model has no chat template: use /v1/completions") from error

        def render(said: Messages) -> str:
            text = render_chat(template, said, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
            if said is messages:  # else placeholders are in it, which are longer than what they stand for
                self._check_length(text, "messages", context)
            return text

        try:
            return tuple(self._literal.encode(messages, render))
        except TemplateError as error:
            raise Refusal("template_error", f"the chat template: {_fit(str(error))}", "messages") from error
        except ValueError as error:
            raise Refusal("invalid_value", "messages: not text that this model can read", "messages") from error


def _fit(sentence: str) -> str:
    """What a template says goes back to whoever made it say so, but for what looks like an address or a path."""
    unfit = "0x" in sentence or "/" in sentence or "\\" in sentence
    return "it cannot render this conversation" if unfit else strict_json.shown(sentence, 200)


def chat_messages(body: schemas.ChatBody | schemas.TokenizeBody) -> list[dict[str, str]]:
    """OpenAI's messages as templates know them: `developer` is `system` by its newer name."""
    found = []
    for message in body.messages or ():
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": text_of(message.content)}
        found.append(entry if message.name is None else entry | {"name": message.name})
    return found


def anthropic_messages(body: schemas.AnthropicPrompt) -> list[dict[str, str]]:
    """Anthropic's messages as templates know them."""
    system = text_of(body.system)
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": message.role, "content": text_of(message.content)} for message in body.messages]
