"""The tokenizer in a GGUF file's metadata.

The file holds a vocabulary with a score and a type for each token, for byte-level BPE the merges, ids of special
tokens, a few flags and chat templates. Two of its models are read: `llama` (sentencepiece BPE: pieces merge by score,
unknown characters become bytes) and `gpt2` (byte-level BPE, text cut as `tokenizer.ggml.pre` names; `gguf_pre.py`).
They are built by the functions of `convert.py`, so encoding is the `tokenizers` library's.

Some properties of the original tokenizer cannot be expressed in GGUF:

- The tokens that end a text. Generation configs list several, the file has one `eos` and perhaps `eot` and `eom`.
  `Tokenizer.eos_ids` adds control tokens by names that only ever mean the end of a turn, like llama.cpp.
- Whether a special token consumes the spaces behind it. Only Phi-3's do, and its files are known by architecture.
- Scores, where the file was converted from a tokenizer.json: one constant for all. Ids of a sentencepiece BPE are in
  order of preference, so they replace the scores.
- The order of merges between pieces of equal score: by their halves' ids, like `convert.py` for Llama 2's spaces.

The metadata is untrusted. Lengths, element types, ids and spellings are checked before anything is built, and a
ValueError names the first that is wrong; a number's width in the file (u8 or i32) is the file reader's matter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from attar import machine
from attar.errors import UserError
from attar.text import convert
from attar.text.convert import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, malformed, unsupported
from attar.text.gguf_pre import KNOWN, Pre
from attar.text.template import MAX_TEMPLATE
from attar.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Element = TypeVar("Element", str, int, float)

MAX_TOKEN = 1024  # characters; the longest token of any known vocabulary has 256
MAX_PIECE = 256  # of `llama` vocabularies, whose merges are every cut of every piece
MAX_WHOLE = 1 << 18  # characters of all tokens found whole in text; a third for Gemma's 6000
SUPPORTED = ("llama", "gpt2")

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_LLAMA_IDS = {"bos": 1, "eos": 2}  # where a `llama` file does not say

# Control tokens that end a turn or a text in any vocabulary.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]",
    "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
# In the vocabularies of gpt-oss and Solar Open, <|end|> ends one message of several.
_END_OF_MESSAGE = "<|end|>"
_END_OF_TURN = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


@machine.uncollected()  # half a million pairs of strings: collections take a quarter of the time
def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file's metadata, which maps keys to str, int, float, bool or a collection of one
    of them.

    A collection is iterated over only where one is expected. The tokenizer's `eos_ids` are all tokens that end a text.
    Raises ValueError naming the key that is missing, malformed or unknown.
    """
    model = _value(metadata, _KEY + "model", str)
    if model not in SUPPORTED:
        raise unsupported(
            f"{_KEY}model is {_shown(model)}; the tokenizers read from GGUF are llama (sentencepiece BPE) and gpt2 "
            "(byte-level BPE)"
        )
    tokens, kinds, scores = _vocabulary(metadata, model)
    special = _special_ids(metadata, tokens)
    if model == "llama":
        usual = {name: i for name, i in _LLAMA_IDS.items() if i < len(tokens) and kinds[i] == CONTROL}
        special = usual | special
        backend = _llama(metadata, tokens, scores, kinds)
        adds_bos = _flag(metadata, "add_bos_token", "bos" in special)
    else:
        pre = _pre(metadata)
        backend = _gpt2(metadata, pre, tokens, kinds, special.values())
        adds_bos = _flag(metadata, "add_bos_token", pre.bos and "bos" in special)
    text = {name: tokens[i] for name, i in special.items()}
    _register(backend, metadata, tokens, kinds, [text[name] for name in ("bos", "eos", "eot", "eom") if name in text])
    ends = {"bos": adds_bos, "eos": _flag(metadata, "add_eos_token", False)}
    for name in [name for name, added in ends.items() if added and name not in special]:
        logger.warning("%sadd_%s_token is true, but the file names no such token: none is added", _KEY, name)
        ends[name] = False
    if any(ends.values()):
        convert.surround(backend, *(text[name] if added else None for name, added in ends.items()))
    eos_ids = _eos_ids(tokens, kinds, special)
    return Tokenizer(backend, text.get("bos"), text.get("eos"), _chat_templates(metadata), eos_ids)


def _vocabulary(metadata: Mapping[str, Any], model: str) -> tuple[list[str], list[int], list[float]]:
    """Return tokens, types and scores. Only a `gpt2` file may lack types, then all normal, and scores, then empty."""

    def given(name: str) -> bool:
        return model != "gpt2" or _KEY + name in metadata

    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise malformed(f"{_KEY}tokens is empty")
    _check_tokens(tokens, MAX_PIECE if model == "llama" else MAX_TOKEN)
    kinds = _array(metadata, "token_type", int, like=tokens) if given("token_type") else []
    wrong = next((i for i, kind in enumerate(kinds) if not NORMAL <= kind <= BYTE), None)
    if wrong is not None:
        raise malformed(f"{_KEY}token_type[{wrong}] is {kinds[wrong]}: types are 1 (normal) to 6 (byte)")
    scores = _array(metadata, "scores", float, like=tokens) if given("scores") else []
    wrong = next((i for i, score in enumerate(scores) if not math.isfinite(score)), None)
    if wrong is not None:
        raise malformed(f"{_KEY}scores[{wrong}] is {scores[wrong]}")
    return tokens, kinds or [NORMAL] * len(tokens), scores


def _llama(metadata: Mapping[str, Any], tokens: Sequence[str], scores: list[float], kinds: Sequence[int]) -> Backend:
    wrong = next((i for i, kind in enumerate(kinds) if kind == BYTE and tokens[i] not in _BYTES), None)
    if wrong is not None:
        raise malformed(f"{_KEY}tokens[{wrong}] is a byte, but {_shown(tokens[wrong])} is not <0x00> to <0xFF>")
    count = kinds.count(BYTE)
    if count not in (0, 256):
        raise malformed(f"{_KEY}token_type marks {count} byte tokens; a vocabulary has all 256 or none")
    if len({score for score, kind in zip(scores, kinds, strict=True) if kind == NORMAL}) == 1:
        scores = [-float(i) for i in range(len(tokens))]
    pieces = list(zip(tokens, scores, kinds, strict=True))
    prefix = _flag(metadata, "add_space_prefix", True)
    return convert.sentencepiece(pieces, dummy_prefix=prefix, byte_fallback=count == 256)


def _gpt2(
    metadata: Mapping[str, Any], pre: Pre, tokens: Sequence[str], kinds: Sequence[int], special: Iterable[int]
) -> Backend:
    """Build byte-level BPE without unused tokens: the converter pads a vocabulary with them, and their ids decode to
    nothing."""
    padding = {i for i, kind in enumerate(kinds) if kind == UNUSED or not tokens[i]} - set(special)
    vocab = {token: i for i, token in enumerate(tokens) if i not in padding}
    merges: dict[tuple[str, str], None] = {}
    for number, merge in enumerate(_array(metadata, "merges", str)):
        left, _, right = merge.partition(" ")
        if " " in right or not left or not right:
            raise malformed(f"{_KEY}merges[{number}] is {_shown(merge)}: not two tokens with one space between them")
        missing = next((part for part in (left, right, left + right) if part not in vocab), None)
        if missing is not None:
            raise malformed(f"{_KEY}merges[{number}] needs the token {_shown(missing)}, which is not in the vocabulary")
        merges[left, right] = None
    model = models.BPE(vocab, list(merges), fuse_unk=False, ignore_merges=pre.whole)
    return convert.byte_level(model, pre.cuts, normalizers.NFC() if pre.nfc else None, byte_cuts=pre.byte_cuts)


def _pre(metadata: Mapping[str, Any]) -> Pre:
    if _KEY + "pre" not in metadata:
        raise unsupported(
            f"the file has no {_KEY}pre, so it is unknown how its tokenizer cuts text: it was converted before April "
            "2024. Convert the model again"
        )
    name = _value(metadata, _KEY + "pre", str)
    if name not in KNOWN:
        raise unsupported(f"unknown {_KEY}pre {_shown(name)}; known are {', '.join(sorted(KNOWN))}")
    return KNOWN[name]


def _register(
    backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], special: Sequence[str]
) -> None:
    """Register tokens that are found whole in text, before it is cut or normalized; `special` ones of any type."""
    whole_kinds = (CONTROL, UNKNOWN, USER_DEFINED)
    characters = sum(len(token) for token, kind in zip(tokens, kinds, strict=True) if kind in whole_kinds)
    if characters > MAX_WHOLE:
        raise unsupported(
            f"{_KEY}token_type: the tokens found whole in text (types 2 to 4) have {characters} characters in all, "
            f"more than {MAX_WHOLE}"
        )
    phi3 = metadata.get("general.architecture") == "phi3" and metadata[_KEY + "model"] == "llama"
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    strips = set(control) - {"<unk>", "<s>", "<|endoftext|>"} if phi3 else set()
    names = dict.fromkeys([*control, *special])
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, rstrip=token in strips) for token in names]
    )
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and token not in special]
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])


def _eos_ids(tokens: Sequence[str], kinds: Sequence[int], special: Mapping[str, int]) -> frozenset[int]:
    named = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] in _ENDS}
    if any(turn <= named.keys() for turn in _END_OF_TURN):
        named.pop(_END_OF_MESSAGE, None)
    return frozenset(named.values()) | {special[name] for name in ("eos", "eot", "eom") if name in special}


def _special_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """Return ids by name: bos, eos, eot, ... An id that is no token of the vocabulary, such as -1 as u32, is left out
    with a warning, as in llama.cpp."""
    found = {}
    for key in metadata:
        if key.startswith(_KEY) and key.endswith("_token_id"):
            index = _value(metadata, key, int)
            if not 0 <= index < len(tokens) or not tokens[index]:
                logger.warning("%s is %d, which is no token of the vocabulary: it is not used", _shown(key), index)
                continue
            found[key.removeprefix(_KEY).removesuffix("_token_id")] = index
    return found


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(_TEMPLATE + "."):
            template = _value(metadata, key, str)
            if len(template) > MAX_TEMPLATE or len(template.encode()) > MAX_TEMPLATE:
                raise UserError("template_failed", f"{_shown(key)} is larger than {MAX_TEMPLATE >> 20} MiB")
            templates[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = template
    return templates


def _check_tokens(tokens: Sequence[str], limit: int) -> None:
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if len(token) > limit:
            raise unsupported(f"{_KEY}tokens[{i}] has {len(token)} characters, more than {limit}")
        if token and first.setdefault(token, i) != i:
            raise malformed(f"{_KEY}tokens[{i}] is {_shown(token)}, as is tokens[{first[token]}]")


def _array(
    metadata: Mapping[str, Any], name: str, kind: type[Element], like: Sequence[str] | None = None
) -> list[Element]:
    """Return a list of exactly `kind`, as long as the tokens `like`. Its length is checked first: it may not be
    decoded."""
    key = _KEY + name
    given = _given(metadata, key)
    if isinstance(given, str) or not isinstance(given, Collection):
        raise malformed(f"{key} is of type {type(given).__name__}, not list")
    if like is not None and len(given) != len(like):
        raise malformed(f"{key} has {len(given)} entries, {_KEY}tokens has {len(like)}")
    value = list(given)
    if set(map(type, value)) - {kind}:
        wrong = next(i for i, element in enumerate(value) if type(element) is not kind)
        raise malformed(f"{key}[{wrong}] is of type {type(value[wrong]).__name__}, not {kind.__name__}")
    if kind is str:
        _check_unicode(key, value)
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return _value(metadata, _KEY + name, bool) if _KEY + name in metadata else default


Value = TypeVar("Value")


def _value(metadata: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    value = _given(metadata, key)
    if type(value) is not kind:  # a bool is no id
        raise malformed(f"{_shown(key)} is of type {type(value).__name__}, not {kind.__name__}")
    if isinstance(value, str):
        _check_unicode(key, [value])
    return value


def _given(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise UserError("tokenizer_missing", f"the file has no {key}: its tokenizer is missing or incomplete")
    return metadata[key]


def _check_unicode(key: str, texts: Sequence[str]) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise malformed(f"{_shown(key)} holds a lone surrogate (no Unicode)") from error


def _shown(text: str) -> str:
    """Show an untrusted text in a message: printable and short."""
    return ascii(text if len(text) <= 60 else text[:60] + "...")
