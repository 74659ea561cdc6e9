"""Jina's and Cohere's /v1/rerank, by a causal reranker (`text/forms/rerank.py`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from attar.protocol.messages import Delta, Failed
from attar.server.api.body import MAX_TOKENS, Body
from attar.server.api.schemas import Length
from attar.server.errors import APIError
from attar.server.request_handler import RequestHandler
from attar.text.forms.rerank import score

MAX_DOCUMENTS = 1024
_PER_DOC = "Most tokens of a document, whose end is dropped; 0 sets no limit."


class Document(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankBody(Body, frozen=True, kw_only=True):
    """Body of /v1/rerank. `instruction`, an extension, says what makes a document relevant."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate_prompt_tokens": (), "max_chunks_per_doc": (), "rank_fields": (["text"],), "priority": (0,),
    }  # fmt: skip

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Length | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description=_PER_DOC)] | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


async def whole(request: RequestHandler, model: str, body: RerankBody, words: tuple[int, int]) -> list[bytes]:
    """Return the documents by their scores, the best first, equals in their own order. `words` are the tokens of no
    and yes. Raises APIError."""
    scores: dict[int, float] = {}
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.context.refusal(event)
            if isinstance(event, Delta) and event.logprobs:
                told = dict(event.logprobs[0].top)
                scores[request.stream.prompts[event.id]] = score(*(told[word] for word in words))
    texts = body.texts()
    if len(scores) < len(texts):
        raise APIError("bad_logits", "the model gave no valid numbers for a document")
    best = sorted(scores, key=lambda at: (-scores[at], at))[: body.top_n]
    shown = body.return_documents is not False
    results = [
        {"index": at, "relevance_score": scores[at], **({"document": {"text": texts[at]}} if shown else {})}
        for at in best
    ]
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    told_all = {"id": "rerank-" + request.caller.id, "model": model, "results": results, "usage": usage}
    return [msgspec.json.encode(told_all)]
