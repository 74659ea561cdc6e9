"""Tokenizers that ship without a `tokenizer.json`, rebuilt for the `tokenizers` library.

Three older forms occur in checkpoints: `vocab.json` + `merges.txt` (GPT-2, OPT, Qwen2), a `tokenizer.model` of tiktoken
ranks (Llama 3), and a `tokenizer.model` of sentencepiece BPE (Llama 2, Mistral, Gemma). All three are byte-pair
encodings, so each is converted to the same parts: a vocabulary, an ordered list of merges, and the text splitting
around them: `byte_level` and `sentencepiece` below, which `gguf.py` uses too.

A rank file and a sentencepiece file store no merges, only pieces in order of preference. The merges follow: every way
to cut a piece into two pieces is a merge, ordered by the preference of the whole, then by its halves. The sentencepiece
file is a protobuf; the few fields needed are read by hand, which saves a dependency that is otherwise unused. Unigram
models and models with a character map are refused: no decoder here was trained with one.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attar.errors import UserError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = _WORDS % r"\p{N}"
LLAMA3_SPLIT = _WORDS % r"\p{N}{1,3}"
"""Text splitting before merging: GPT-4's, with digits one by one (Qwen2) or in threes (Llama 3)."""

_CUTS: Mapping[str, Sequence[str]] = {
    "qwen2": (QWEN2_SPLIT,), "qwen3": (QWEN2_SPLIT,), "gpt2": (), "opt": (), "codegen": ()
}  # fmt: skip
"""Text splitting by how the name of a tokenizer's class, or of a model's type, begins; () is GPT-2's."""
_ANY = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", None)  # classes that do not say

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # sentencepiece's piece types, and GGUF's
_BPE = 2  # sentencepiece's model types: 1 is unigram


def malformed(text: str) -> UserError:
    return UserError("tokenizer_malformed", text)


def unsupported(text: str) -> UserError:
    return UserError("tokenizer_unsupported", text)


def bytes_to_chars() -> dict[int, str]:
    """Return the 256 printable characters by which byte-level BPE writes bytes (GPT-2): themselves, or 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def from_merges(folder: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> Tokenizer:
    """Load byte-level BPE from `vocab.json` and `merges.txt`, which do not say how text is cut: its class does.

    The class stands in tokenizer_config.json (`config`) or in config.json (`model_config`), else the model's type has
    one. Where neither is known, it is GPT-2, which was published as the two files alone. Raises ValueError for a class
    that cuts in a way unknown here, and where the merges are malformed or do not belong to the vocabulary.
    """
    words = [config.get("tokenizer_class"), model_config.get("tokenizer_class"), model_config.get("model_type")]
    word = str(next((word for word in words if word not in _ANY), "gpt2"))
    kind = next((kind for kind in _CUTS if word.lower().startswith(kind)), None)
    if kind is None:
        raise unsupported(
            f"{folder}: how {word!r} cuts text is not known of vocab.json and merges.txt; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes a tokenizer.json"
        )
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    split = (line.split(" ") for line in lines if line and not line.startswith("#version"))
    try:
        pairs = [(left, right) for left, right in split]
    except ValueError as error:
        raise malformed(f"{folder / 'merges.txt'}: a line must hold two pieces with one space between them") from error
    try:
        model = models.BPE(vocab, pairs, fuse_unk=False)
    except Exception as error:  # the library raises bare Exception, for a merge of pieces that the vocabulary lacks
        raise UserError(
            "tokenizer_mismatch", f"{folder / 'merges.txt'} does not belong to its vocab.json: {error}"
        ) from error
    prefix = bool(config.get("add_prefix_space", False))
    cuts = _CUTS[kind]
    return byte_level(model, cuts, normalizers.NFC() if cuts else None, prefix=prefix)


def from_model_file(path: Path) -> Tokenizer:
    """Load a `tokenizer.model` of tiktoken ranks (lines of base64 and rank) or of sentencepiece, told apart by content.

    Raises ValueError where it is neither, or not supported.
    """
    data = path.read_bytes()
    first, _, rank = data.split(b"\n", 1)[0].partition(b" ")
    if first and rank.strip().isdigit():
        return _from_ranks(path, data)
    return _from_sentencepiece(path, data)


def listed_tokens(
    config: Mapping[str, Any], beside: Mapping[str, Any], special: Collection[str]
) -> dict[int, AddedToken]:
    """Return added tokens by id: those of `added_tokens_decoder` in tokenizer_config.json, else those of
    added_tokens.json (`beside`), of which the tokens named `special` are special.

    Raises ValueError where an entry is malformed.
    """
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        if "added_tokens_decoder" in config:
            return {
                int(index): AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags})
                for index, entry in config["added_tokens_decoder"].items()
            }
        return {
            int(index): AddedToken(text, special=text in special, normalized=False) for text, index in beside.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise malformed(f"added tokens must be listed with an id each: {error}") from error


def add_listed(tokenizer: Tokenizer, listed: Mapping[int, AddedToken], flags: bool) -> dict[int, str]:
    """Register added tokens; with `flags`, give those that are registered already the flags listed.

    Return those, by id, that cannot get their id: another token has it, or ids before it are free.
    """
    added = tokenizer.get_added_tokens_decoder()
    following = max(tokenizer.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
    tokens, missed = [], {}
    for index, token in sorted(listed.items()):
        known = tokenizer.token_to_id(token.content)
        if index != (following if known is None else known):
            missed[index] = token.content
            continue
        following += known is None
        if flags or index not in added:
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    return missed


def seek_as_written(tokenizer: Tokenizer) -> None:
    """Make added tokens be found as they are spelt, not in normalized text. Llama's old tokenizer.json says otherwise:
    there `</s>` within a text would be five pieces, since the normalizer's space belongs to the token."""
    added = (token for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.normalized)
    kept = ("single_word", "lstrip", "rstrip", "special")
    tokens = [
        AddedToken(token.content, normalized=False, **{flag: getattr(token, flag) for flag in kept}) for token in added
    ]
    tokenizer.add_tokens(tokens)


def mark_special(tokenizer: Tokenizer, names: Iterable[str]) -> None:
    """Register tokens of the vocabulary as special ones, which are found whole in text. Those that the vocabulary lacks
    are left out, and added tokens keep their flags."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known = (name for name in dict.fromkeys(names) if name not in added and tokenizer.token_to_id(name) is not None)
    tokenizer.add_special_tokens(list(known))


def surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put the BOS token first and the EOS token last, where given."""
    ends = {name: token for name, token in (("bos", bos), ("eos", eos)) if token is not None}
    first, last = ([name] if name in ends else [] for name in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", "$B", *last],
        # Under own names: a token's text may mean something else in a template.
        special_tokens=[
            {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]} for name, token in ends.items()
        ],
    )


def byte_level(
    model: models.BPE,
    cuts: Sequence[str],
    normalizer: normalizers.Normalizer | None,
    *,
    byte_cuts: Sequence[str] = (),
    prefix: bool = False,
) -> Tokenizer:
    """Build byte-level BPE of text cut by each regular expression in turn; without any, GPT-2's splitting is used.

    Matches and the text between them are both pieces. `byte_cuts` cut again, once bytes have become characters.
    """

    def split(by: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(by), behavior="isolated", invert=False)

    tokenizer = Tokenizer(model)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not cuts)
    steps = [*map(split, cuts), to_bytes, *map(split, byte_cuts)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else to_bytes
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(pieces: Sequence[tuple[str, float, int]], *, dummy_prefix: bool, byte_fallback: bool) -> Tokenizer:
    """Build BPE from (text, score, type): spaces become U+2581, better scores merge first, unknown characters become
    bytes.

    With `dummy_prefix` a space is put before the text, and before text that follows a special token. No piece is
    registered as an added token; the caller does that.
    """
    from attar.text.merges import merges  # with numpy, which not every tokenizer needs

    vocab = {text: index for index, (text, _, _) in enumerate(pieces)}
    ranks = {text: -score for text, score, kind in pieces if kind in (NORMAL, USER_DEFINED, UNUSED)}
    unknown = next((text for text, _, kind in pieces if kind == UNKNOWN), None)
    model = models.BPE(vocab, merges(ranks, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * dummy_prefix + spaces)
    strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _from_ranks(path: Path, data: bytes) -> Tokenizer:
    """Load Llama 3's ranks: they are ids, and a word that is a piece is taken whole, without merging
    (tiktoken's rule)."""
    from attar.text.merges import merges  # as above

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one
            raise malformed(f"{path}: line {number} is not a base64 piece and its rank") from error
    chars = bytes_to_chars()
    spelled = {piece: "".join(chars[byte] for byte in piece) for piece in ranks}
    vocab = {spelled[piece]: rank for piece, rank in ranks.items()}
    pairs = [(spelled[left], spelled[right]) for left, right in merges(ranks, ranks)]
    return byte_level(models.BPE(vocab, pairs, fuse_unk=False, ignore_merges=True), [LLAMA3_SPLIT], None)


def _from_sentencepiece(path: Path, data: bytes) -> Tokenizer:
    """Load a sentencepiece BPE model: Llama 2, Mistral, Gemma."""
    pieces: list[tuple[str, float, int]] = []
    model_type, dummy_prefix, byte_fallback = 1, True, False  # protobuf defaults of these fields
    extra_whitespace, charsmap = True, b""
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
                pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
            elif field == 2:
                trainer = dict(_fields(value))
                model_type, byte_fallback = trainer.get(3, model_type), bool(trainer.get(35, byte_fallback))
            elif field == 3:
                spec = dict(_fields(value))
                charsmap = spec.get(2, charsmap)
                dummy_prefix, extra_whitespace = bool(spec.get(3, True)), bool(spec.get(4, True))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise malformed(f"{path} is neither a sentencepiece model nor a tiktoken rank file") from error
    if model_type != _BPE or charsmap or extra_whitespace or not pieces:
        raise unsupported(
            f"{path}: only sentencepiece BPE models without text normalization are read directly; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes a tokenizer.json "
            "(transformers needs the `sentencepiece` package for this)"
        )
    tokenizer = sentencepiece(pieces, dummy_prefix=dummy_prefix, byte_fallback=byte_fallback)
    control = [text for text, _, kind in pieces if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    whole = [text for text, _, kind in pieces if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    return tokenizer


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of one protobuf message: int for varints, bytes for everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(message):
            raise ValueError("a field is longer than its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: Sequence[int], at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a varint is longer than ten bytes")
