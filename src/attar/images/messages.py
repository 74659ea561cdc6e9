"""Places of images in a message's text.

A text has MARK where an image is, and the images are beside it, in the same order. MARK is a lone surrogate, which
strict JSON and every encoding refuse: no client's text can hold one.
"""

from __future__ import annotations

MARK = "\udc00"
"""What stands for an image in a message's text."""


def in_parts(content: str, always: bool = False) -> str | list[dict[str, str]]:
    """Return a message's content as chat templates take it: a text, or a list of images and texts where it has marks.
    With `always` a text is a list too."""
    if MARK not in content and not always:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]  # templates look at the first part
