"""Text to token ids and back, with the `tokenizers` library and the small files beside a checkpoint.

Encoding is the library's. Two questions about it have a fixed answer here. A `tokenizer.json` defines how text is cut
and its own post-processor decides about BOS, whatever `add_bos_token` says, as in transformers 5. (For
`LlamaTokenizer` transformers 5 rebuilds the rest of the pipeline, which changes text that begins with a space or
follows a special token; here both follow the file and sentencepiece.) A rendered chat template is encoded with nothing
added, because templates write their own BOS.

Decoding is attar's own: every token is a run of bytes (`id_to_bytes`), text is those bytes read as UTF-8. So a stream
and a whole decode agree by construction, whichever way characters are split over tokens. It differs from the library's
in one corner: where sentencepiece byte pieces (`<0xE2>`) form invalid UTF-8, the library turns the whole run of them,
valid characters included, into one U+FFFD per byte; here only the invalid bytes are replaced (one U+FFFD per maximal
subpart, Unicode 15 section 3.9, as byte-level BPE does).
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from attar.errors import UserError
from attar.text import convert

logger = logging.getLogger(__name__)

SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # the special tokens that transformers names
_AS_WRITTEN = ("LlamaTokenizer", "LlamaTokenizerFast")  # classes that have no normalizer in transformers 5
LONGEST_CHARACTER = 4  # bytes, of UTF-8
MISSING = (
    "{folder} has no tokenizer: neither tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model. "
    "Copy these files from the original model, or pass token ids instead of text"
)


class Tokenizer:
    """One model's tokenizer, its special tokens and its chat templates.

    `bos_id` and `eos_id` are None where the model declares none. `eos_ids` are all tokens that end a text: `eos_id` and
    others declared by the tokenizer's source, such as a GGUF file. `vocab_size` counts added tokens; a model's
    embedding may have more rows, and the ids beyond decode to nothing. Raises ValueError on construction for special
    tokens outside the vocabulary and for an unknown decoder.
    """

    def __init__(
        self,
        backend: Backend,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()  # both are left over from training in some published files
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._byte_of, self.strips_leading_space = _decoding(backend)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_id = None if bos_token is None else self._known(bos_token)
        self.eos_id = None if eos_token is None else self._known(eos_token)
        self.eos_ids = frozenset(eos_ids) | ({self.eos_id} if self.eos_id is not None else set())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # Special tokens that are searched for in normalized text: fullwidth letters or capitals, say, may then spell
        # them as well.
        respelled = any(token.special and token.normalized for token in added.values())
        self.specials_respelled = respelled and backend.normalizer is not None
        self.chat_templates: dict[str, str] = dict(chat_templates or {})

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. Raises ValueError naming the file that is missing or malformed.

        Special and added tokens come from the files that transformers reads: `tokenizer_config.json`, where it lists
        added tokens; in older folders also `special_tokens_map.json`, which wins over it, and `added_tokens.json`.
        """
        config, beside = (_read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
        special = beside | config if "added_tokens_decoder" in config else config | beside
        named = _named(special)
        listed = convert.listed_tokens(config, _read_json(folder / "added_tokens.json"), named)
        complete = (folder / "tokenizer.json").is_file()
        if complete:
            try:
                # As text: the library reads paths in UTF-8 alone, whatever the locale's encoding is.
                backend = Backend.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
            except Exception as error:  # the library raises bare Exception
                raise convert.malformed(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            backend = convert.from_merges(folder, config, _read_json(folder / "config.json"))
            if not special and backend.token_to_id("<|endoftext|>") is not None:
                special = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")  # GPT-2 itself is these two files
        elif (folder / "tokenizer.model").is_file():
            backend = convert.from_model_file(folder / "tokenizer.model")
        else:
            if not (folder / "config.json").is_file():
                raise UserError("file_wrong_kind", f"{folder}: no config.json: not a Hugging Face model folder")
            raise UserError("tokenizer_missing", MISSING.format(folder=folder))
        missed = convert.add_listed(backend, listed, flags="added_tokens_decoder" in config)
        if missed and not complete:
            index, token = next(iter(missed.items()))
            raise convert.malformed(f"added token {token!r} cannot get the id {index}: the vocabulary has a gap")
        if missed:
            logger.warning("%s: ids of added tokens beside tokenizer.json are not used: %s", folder, _few(missed))
        if config.get("tokenizer_class") in _AS_WRITTEN:
            convert.seek_as_written(backend)
        bos, eos = (
            _in_vocabulary(_content(special.get(key)), key, backend, folder) for key in ("bos_token", "eos_token")
        )
        convert.mark_special(backend, [*named, *(token for token in (bos, eos) if token is not None)])
        # A tokenizer.model belongs to a Llama-like model, which begins with BOS unless the config says otherwise.
        adds_bos = config.get("add_bos_token", not (folder / "vocab.json").is_file())
        if not complete and adds_bos and bos is not None:
            convert.surround(backend, bos, None)
        return cls(backend, bos, eos, _chat_templates(folder, config))

    @classmethod
    def of(
        cls, text: str, bos_token: str | None, eos_token: str | None, chat_templates: Mapping[str, str],
        eos_ids: Iterable[int],
    ) -> Tokenizer:  # fmt: skip
        """Make a tokenizer of a tokenizer.json's text, as `backend_text` gives it. Raises UserError for other text."""
        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise convert.malformed(f"this is not the text of a tokenizer.json: {error}") from error
        return cls(backend, bos_token, eos_token, chat_templates, eos_ids)

    def with_special(self, token: str) -> Tokenizer:
        """Return this tokenizer with one more special token, whose id is behind all others."""
        backend = Backend.from_str(self.backend_text())
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        return Tokenizer(backend, self.bos_token, self.eos_token, self.chat_templates, self.eos_ids)

    def backend_text(self) -> str:
        """Return the text of the tokenizer.json."""
        return self._backend.to_str()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load` and transformers read as this tokenizer."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        templates = self.chat_templates
        named = [{"name": name, "template": template} for name, template in templates.items()]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "clean_up_tokenization_spaces": False,
            "chat_template": templates["default"] if templates.keys() == {"default"} else named or None,
        }
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")

    @property
    def added_bos(self) -> int | None:
        """Id of the BOS token where the tokenizer itself puts it in front of a text, else None."""
        return self.bos_id if self.bos_id is not None and self.encode("a")[:1] == [self.bos_id] else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`; with `add_special_tokens`, including those of the model's post-processor (often
        BOS).

        Special tokens written in the text become special tokens. Raises ValueError for a lone surrogate, which is not
        text.
        """
        check_unicode(text)
        # A batch, because the library lets other threads run then; and the fast one, which keeps no offsets.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_chat(self, rendered: str) -> list[int]:
        """Return token ids of a rendered chat template. Nothing is added: a template writes its own BOS, or has
        none."""
        return self.encode(rendered, add_special_tokens=False)

    def starts(self, text: str) -> list[int]:
        """Return where each token of `encode(text)` begins in the text, in characters.

        A token begins where those before it end, or within a character that it shares with them. So slices from one
        start to the next make up the text. Tokens that the post-processor adds, such as BOS, have empty slices.
        """
        check_unicode(text)
        encoding = self._backend.encode_batch([text])[0]
        found, end = [], 0
        for (first, last), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            found.append(end if added else min(first, end))
            end = max(end, last)
        return found

    @property
    def added_words(self) -> dict[int, str]:
        """Added tokens that are not special, by their ids."""
        return {index: name for index, name in self._added.items() if index not in self.special_ids}

    def special_spans(self, texts: Sequence[str], also: Container[int] = ()) -> list[list[tuple[int, int]]]:
        """Return the spans (first character, end) of special tokens in each text, and of tokens `also`, in order.

        They are found in their own spelling, or in any that normalizes to it. Raises ValueError like `encode`.
        """
        for text in texts:
            check_unicode(text)
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        found = (
            [each.token_to_chars(at) for at, i in enumerate(each.ids) if i in self.special_ids or i in also]
            for each in encodings
        )
        return [[span for span in spans if span is not None] for spans in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self._shown(index, skip_special_tokens) for index in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def id_to_bytes(self, index: int) -> bytes:
        """Return the bytes of one token, a sentencepiece word's leading space included; empty for an unknown id."""
        known = self._bytes.get(index)
        if known is None:
            # The library spells added tokens as its normalizer does: with Llama 2's, `<s>` would get a space.
            token = self._added.get(index, self._backend.id_to_token(index) if 0 <= index < 2**32 else None)
            known = self._bytes[index] = b"" if token is None else _spell(token, self._byte_of)
        return known

    def id_to_token(self, index: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġthe`; empty for an unknown id."""
        return self._added.get(index) or str(self._backend.id_to_token(index) or "")

    def token_to_id(self, token: str) -> int | None:
        """Return the id of one whole token, None where the vocabulary lacks it."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def chat_template(self, tools: bool = False) -> str:
        """Return the model's template: `tool_use` where tools are given and it exists. Raises ValueError where there is
        none."""
        names = ["tool_use", "default"] if tools else ["default"]
        for name in names:
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            raise UserError(
                "template_missing",
                f"no default chat template; this model has: {', '.join(sorted(self.chat_templates))}",
            )
        raise UserError("template_missing", "this model has no chat template: use generate with a plain prompt")

    def _shown(self, index: int, skip_special_tokens: bool) -> bytes:
        return b"" if skip_special_tokens and index in self.special_ids else self.id_to_bytes(index)

    def _known(self, token: str) -> int:
        index = self.token_to_id(token)
        if index is None:
            raise UserError(
                "tokenizer_mismatch",
                f"special token {token!r} is not in the vocabulary: these files do not belong together",
            )
        return index


class Detokenizer:
    """Text of tokens as they arrive, never half a character.

    The pieces from `push` and the last one from `flush`, joined, are what `decode(prompt_ids + ids)` adds to the
    prompt's own text. Without a prompt that is `decode(ids)`; after one, a sentencepiece word keeps its leading space.
    Special tokens among `visible` are shown also where the others are skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True,
        visible: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._skip, self._visible = skip_special_tokens, visible
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strips_leading_space
        # UTF-8 resynchronizes within a character, so the end of a prompt gives the state of all of it.
        end = b""
        for index in reversed(prompt_ids):
            end = tokenizer._shown(index, skip_special_tokens) + end
            if len(end) >= LONGEST_CHARACTER:
                break
        self._stripped(self._utf8.decode(end))

    def push(self, index: int) -> str:
        """Return the characters that this token completes; empty while one is still open."""
        skip = self._skip and index not in self._visible
        return self._stripped(self._utf8.decode(self._tokenizer._shown(index, skip)))

    def flush(self) -> str:
        """Return the end of the text: U+FFFD if it stops within a character, else empty."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if text and self._strip_next:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


def _decoding(backend: Backend) -> tuple[dict[str, int] | None, bool]:
    """Return how tokens spell bytes: (the byte-level alphabet, or None for sentencepiece; drop the text's first
    space?)."""
    decoder = backend.decoder
    steps = {} if decoder is None else json.loads(decoder.__getstate__())
    flat = steps.get("decoders", [steps])
    kinds = [step.get("type") for step in flat]
    if "ByteLevel" in kinds:
        return {char: byte for byte, char in convert.bytes_to_chars().items()}, False
    if "Metaspace" in kinds:
        return None, flat[kinds.index("Metaspace")].get("prepend_scheme", "always") != "never"
    if {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} in flat:
        return None, any(step["type"] == "Strip" and step["content"] == " " and step["start"] for step in flat)
    raise convert.unsupported(f"unknown text decoder {kinds}: known are byte-level BPE and sentencepiece")


def _spell(token: str, byte_of: Mapping[str, int] | None) -> bytes:
    if byte_of is not None:
        # Added tokens are plain text; those outside the byte alphabet are recognised by their characters.
        return bytes(byte_of[char] for char in token) if all(char in byte_of for char in token) else token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return bytes([int(digits, 16)])
    return token.replace("▁", " ").encode()


def check_unicode(text: str) -> None:
    """Raise UserError for a lone surrogate, which is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "text_not_utf8", f"the text holds a lone surrogate (no Unicode) at character {error.start}"
        ) from error


def _content(token: Any) -> str | None:
    """Return a special token of a config: a string, or an object with `content`. Raises ValueError for anything
    else."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not isinstance(text, str):
        raise convert.malformed(f"a special token must be a string, not {text!r}")
    return text


def _named(special: Mapping[str, Any]) -> list[str]:
    """Return every special token that the configs name: BOS, EOS, padding and so on, and those without a name."""
    tokens = [special.get(f"{name}_token") for name in SPECIAL]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = special.get(key)
        tokens += more if isinstance(more, list) else more.values() if isinstance(more, dict) else []
    found = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return [token for token in found if isinstance(token, str)]


def _in_vocabulary(token: str | None, key: str, backend: Backend, folder: Path) -> str | None:
    """Return the token; None, with a warning, where the vocabulary lacks it. An id made up for it would mean
    nothing."""
    if token is not None and backend.token_to_id(token) is None:
        logger.warning("%s: %s is %r, which the vocabulary lacks: it is not used", folder, key, token)
        return None
    return token


def _few(tokens: Mapping[int, str]) -> str:
    shown = [f"{token!r} ({index})" for index, token in tokens.items()]
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name. `chat_template.jinja` wins, then `chat_template.json`, then `tokenizer_config.json`."""
    found = config.get("chat_template")
    found = _read_json(folder / "chat_template.json").get("chat_template", found)
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, str):
        found = {"default": found}
    templates: dict[str, str] = dict(found or {})
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise convert.malformed(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise convert.malformed(f"{path} must hold a JSON object")
    return value
