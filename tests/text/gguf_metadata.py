"""Metadata of GGUF files for tests, as the public converter writes it: every token with its type, padding up to the
embedding's size, merges as strings, scores of sentencepiece."""

# ruff: noqa: RUF001 - the texts are meant to be confusing

from __future__ import annotations

import json
import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from attar.text import convert
from tests.text.test_convert import LINES

K = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = (
    *LINES,
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n 🚀 (normal) 😶\u200d🌫️ 🦙🦙",
    "3 33 333 3333 33333 333333 3.3 3..3 កាន់តែពិសេស ?我想在apple工作1314151天～ ",
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? 'RE you sure? 'M not, 'D you? We'Ve a'lL",
    "ÉCOLE École éCOLE straßeSTRASSE ǅungla ΑΒγδ ЖЗий camelCaseHTTPServer2Go ªº ʼ ʰ ⓐ Ⅷ",
    "½ ² ³ ①②③ ٣٤٥٦ 一二三 ⅣⅤ x²y 1½2 12345678901234567890 1.000.000 $1,234.56 + 7% = <b>`x`</b> ~^|~ €9",
    "हिन्दी में ไทย ภาษา বাংলা العربيّة עִבְרִית 한국어 ㄱㄴㄷ, 「日本」。『ア』、……“q”‘r’—：；，",
    "a/b//c /usr/local/bin\n/etc\r\n _under_score__ #!/bin/sh @user l'été y'all'd've",
    "\u3000全角　空白\u2003em\u2028line\u2029para\u0085nel\x1c\x1d\x0b\x0c word\u00a0nbsp\u202fnnbsp \x00\x01\x7f",
    "  \n  x\n\n  y \r z\r\r\n    return x\n\n\n\n    if (y) {\n\t\t\tz++;\n\t}",
)


def random_texts(count: int) -> list[str]:
    """Soup of what pre-tokenizers look at: spaces, digits, quotes, cases, scripts, marks."""
    draw = random.Random(0)
    soup = [chr(code) for code in range(32, 127)] + list("\n\r\t \n  ") * 6 + list("0123456789'sdtlrevm") * 2
    soup += list("éÉÀøØΣσЖж日本語ひ한국ㄱअािทั𠮷😀½²٣①ʰªǅ\u0301\u200d\u00a0。，！“…")
    return ["".join(draw.choices(soup, k=draw.randint(1, 40))) for _ in range(count)]


def byte_level(tokenizer: Backend, pre: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    """Of a byte-level BPE; padded to `size` with unused tokens."""
    spec = json.loads(tokenizer.to_str())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    ids = spec["model"]["vocab"] | {added["content"]: added["id"] for added in spec["added_tokens"]}
    count = size or max(ids.values()) + 1
    tokens, kinds = [f"[PAD{i}]" for i in range(count)], [UNUSED] * count
    for token, i in ids.items():
        tokens[i], kinds[i] = token, NORMAL
    for added in spec["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return {
        K + "model": "gpt2", K + "pre": pre, K + "tokens": tokens, K + "token_type": kinds, K + "merges": merges,
    } | {K + key: value for key, value in more.items()}  # fmt: skip


def sentencepiece(path: Path) -> dict[str, Any]:
    """Of a tokenizer.model."""
    pieces = [dict(convert._fields(value)) for field, value in convert._fields(path.read_bytes()) if field == 1]
    return llama(
        [
            (piece[1].decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0, piece.get(3, NORMAL))
            for piece in pieces
        ]
    )


def llama(pieces: list[tuple[str, float, int]], **more: Any) -> dict[str, Any]:
    tokens, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
    return {K + "model": "llama", K + "tokens": tokens, K + "scores": scores, K + "token_type": kinds} | {
        K + key: value for key, value in more.items()
    }


def small_llama(**more: Any) -> dict[str, Any]:
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    words = ("▁t", "he", "in", "▁a", "▁the", "er", "▁in", "▁▁", "▁▁▁▁", "ab", "▁ab", "abab", "日本", "é")
    letters = [chr(code) for code in range(33, 127)] + ["▁", "日", "本", "Ж"]
    pieces += [(piece, -float(rank), NORMAL) for rank, piece in enumerate([*words, *letters])]
    pieces += [("<tool>", -1000.0, USER_DEFINED), ("    ", -1000.0, USER_DEFINED), ("<|im_end|>", -1000.0, CONTROL)]
    return llama(pieces, **more)


@cache
def trained() -> Backend:
    """A vocabulary whose merges span spaces, digits, stops and letters, so that every cut shows in the ids."""
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS * 4, *random_texts(2000)], trainer)
    return backend


def small_gpt2(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    backend = Backend.from_str(trained().to_str())
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|end|>"])
    backend.add_tokens(["<tool_call>"])
    return byte_level(backend, pre, **more)
