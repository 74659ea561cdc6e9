"""The body of llama.cpp's /embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from attar.server.api.body import Body
from attar.server.api.dialects.llamacpp.inputs import Inputs, Pieces, check_inputs, inputs_of
from attar.server.api.schemas import MAX_INPUTS, Pooling
from attar.server.errors import APIError


class NativeEmbeddingBody(Body, frozen=True, kw_only=True):
    """Body of /embedding, whose text is in `content` or `input`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"embd_normalize": (2,), "encoding_format": ("float",)}

    content: Inputs | None = None
    input: Inputs | None = None
    pooling: Annotated[Pooling, Meta(description="llama.cpp sets it for all requests.")] = "mean"

    def __post_init__(self) -> None:
        if (self.content is None) == (self.input is None):
            raise APIError("missing_field", "content: either content or input, and one of them", "content")
        for name, given in (("content", self.content), ("input", self.input)):
            if given is not None:
                check_inputs(given, name, MAX_INPUTS)

    def inputs(self) -> Sequence[str | Pieces]:
        """Return the texts, each as it is, or a list of token ids and texts."""
        given = self.input if self.content is None else self.content
        assert given is not None
        return inputs_of(given)
