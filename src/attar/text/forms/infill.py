"""Fill in the middle: prompts from the text before and behind a gap, by the special tokens that a model has for it.

The form is that of the models' papers and of llama.cpp: prefix, suffix, middle (Bavarian et al., arXiv 2207.14255).
Files of the same repository come before it, each behind its name, as Qwen2.5-Coder and StarCoder 2 were trained. Texts
cannot contain special tokens: they are encoded as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attar.text.tokenizer import Tokenizer

_FORMS = (  # tokens before prefix, suffix and middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek-Coder
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_ENDS = (*_REPOSITORY, *_FILE, "<|fim_pad|>", "<fim_pad>", "<|endoftext|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_PROJECT = "project\n"
_SNIPPET = "\n\n--- snippet ---\n\n"  # llama.cpp's, for models without a token for files

File = tuple[str, str]
"""Name and text of a file of the repository."""


class Infill:
    """Makes prompts for the middle. `encode` encodes a text in which nothing is a special token."""

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[int], encode: Callable[[str], list[int]]) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._prefix, self._suffix, self._middle = marks
        self._repository, self._file = self._first(_REPOSITORY), self._first(_FILE)
        ends = (tokenizer.token_to_id(token) for token in _ENDS)
        self.ends = tuple(token for token in ends if token is not None)
        """Tokens that end a middle, besides EOS: behind it a model begins another file."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> Infill | None:
        """Return the maker of prompts for this tokenizer; None where it has no such tokens."""
        for form in _FORMS:
            marks = [token for name in form if (token := tokenizer.token_to_id(name)) is not None]
            if len(marks) == len(form):
                return cls(tokenizer, marks, encode)
        return None

    def ids(self, prefix: str | Sequence[int], suffix: str, files: Sequence[File] = ()) -> tuple[int, ...]:
        """Return the prompt for what comes between prefix and suffix."""
        before = self._encode(prefix) if isinstance(prefix, str) else prefix
        bos = self._tokenizer.added_bos
        return (
            *([] if bos is None else [bos]), *self._around(files), self._prefix, *before, self._suffix,
            *self._encode(suffix), self._middle,
        )  # fmt: skip

    def _around(self, files: Sequence[File]) -> Iterator[int]:
        if not files:
            return
        if self._repository is not None:
            yield from (self._repository, *self._encode(_PROJECT))
        for name, text in files:
            yield from (self._encode(_SNIPPET) if self._file is None else (self._file, *self._encode(name + "\n")))
            yield from self._encode(text)
        if self._file is not None:
            yield from (self._file, *self._encode("file\n"))

    def _first(self, names: Sequence[str]) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)
