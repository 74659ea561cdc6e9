"""Writing a tokenizer as the metadata of a GGUF file, which `gguf.py` reads.

A file expresses less than a tokenizer.json: the vocabulary with types and scores, the merges, the name of a splitting
(`tokenizer.ggml.pre`), some ids and flags. So the result is tested. The pipeline is written as metadata, and `gguf.py`
builds a tokenizer from it. The two must encode a text of everything that tokenizers differ in (`TRIAL`), and every
added token, to the same ids. Where they do not, or where the splitting has no name, the tokenizer cannot be written,
which is an error: a file whose tokenizer is nearly right gives nearly right answers, and the cause is hard to find.

One loss is reported instead of refused. A file stores an added token's text and whether it is special, but not its
treatment of neighbours: that it consumes the spaces before or behind it (`lstrip`, `rstrip`), that it is found only
between words (`single_word`), or in text that was normalized (`normalized`). Every added token is tried with neighbours
of each kind. Where one that has such a flag encodes differently, `lost` names it, for the writer of the file to report.

Scores of a sentencepiece vocabulary are the ranks of its merges: tokenizer.json keeps no others, and readers use only
their order.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attar.errors import UserError
from attar.text.convert import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from attar.text.gguf import tokenizer_from_gguf
from attar.text.gguf_pre import GPT2_SPLIT, KNOWN, Pre
from attar.text.tokenizer import Tokenizer

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

TRIAL = (
    "The quick brown fox can't jump; it's 12 o'clock, WE'LL see 1234567 of 3.14 (x_1 += 2)!\n\n\tdef f(a,b):\n"
    "        return a  +b   # sp\u00e4t\r\n caf\u00e9 cafe\u0301 \u00bd\u00b2 \u4f60\u597d\uff0c\u4e16\u754c "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f3fd \u0928\u092e\u0938\u094d\u0924\u0947 http://a.b/c?d=e&f  "
    "end \u00a0x\u200by"
)
"""Contractions, digits, runs of spaces, line ends, code, composed and decomposed letters, scripts without spaces."""


def vocabulary(tokenizer: Tokenizer, rows: int, eos_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a model whose embedding has `rows` rows, at least its number of tokens.

    `eos_ids` are further tokens that end a text, from the model's configs. Raises ValueError where a GGUF file cannot
    express the tokenizer.
    """
    state = json.loads(tokenizer._backend.to_str())
    model, steps = state["model"], _steps(state.get("decoder"), "decoders")
    if model.get("type") != "BPE":
        raise _refused(f"its tokenizer is {model.get('type')}: GGUF files are written with byte-pair encodings alone")
    if tokenizer.vocab_size > rows:
        raise UserError(
            "tokenizer_mismatch", f"its tokenizer has {tokenizer.vocab_size} tokens, and its embedding {rows} rows"
        )
    ends = _ends(tokenizer, eos_ids)
    if any(step["type"] == "ByteLevel" for step in steps):
        tried = [_byte_level(state, rows)]
    else:
        tried = [_sentencepiece(state, rows, prefix) for prefix in (True, False)]
    wrong: list[str] = []
    for words in tried:
        found = words | ends | _templates(tokenizer)
        if (difference := _difference(tokenizer, found, state)) is None:
            return found
        wrong.append(difference)
    raise _refused(
        f"its tokenizer cannot be written to a GGUF file: read back, it encodes {wrong[0]!r} to other tokens"
    )


def lost(tokenizer: Tokenizer, words: Mapping[str, Any]) -> str | None:
    """Return the changes that a reader of `words` makes beside added tokens, as a sentence for people; None: no
    change."""
    flagged = [added for added in json.loads(tokenizer._backend.to_str())["added_tokens"] if _flags(added)]
    if not flagged:
        return None
    again = tokenizer_from_gguf(words)
    changed = [
        f"{added['content']!r} ({', '.join(_flags(added))})"
        for added in flagged
        if tokenizer.encode(beside := _beside(added["content"])) != again.encode(beside)
    ]
    if not changed:
        return None
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        "A GGUF file cannot say how an added token takes its neighbours, so text beside these is cut otherwise than by "
        f"the source's tokenizer: {', '.join(changed[:3])}{more}."
    )


def _refused(why: str) -> UserError:
    return UserError("gguf_inexpressible", why)


def _ends(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Return ids of special tokens, and the flags of tokens that `encode` adds. Raises ValueError for inexpressible
    ones."""
    found: dict[str, Any] = {}
    if tokenizer.bos_id is not None:
        found[_KEY + "bos_token_id"] = tokenizer.bos_id
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ends = list(dict.fromkeys([*own, *eos_ids]))
    if len(ends) > 3:
        raise _refused(f"the model ends texts with any of {len(ends)} tokens, and a GGUF file can say three")
    for name, token in zip(("eos", "eot", "eom"), ends, strict=False):
        found[f"{_KEY}{name}_token_id"] = token
    found[_KEY + "add_bos_token"] = tokenizer.added_bos is not None
    plain, surrounded = (tokenizer.encode("a", add_special_tokens=each) for each in (False, True))
    behind = surrounded[len(plain) + (tokenizer.added_bos is not None) :]
    if behind not in ([], [tokenizer.eos_id]):
        raise _refused(f"its tokenizer adds the tokens {behind} behind a text, which a GGUF file cannot say")
    found[_KEY + "add_eos_token"] = bool(behind)
    return found


def _templates(tokenizer: Tokenizer) -> dict[str, str]:
    named = tokenizer.chat_templates.items()
    return {_TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}": template for name, template in named}


def _steps(stage: Any, inner: str) -> list[dict[str, Any]]:
    """Return a stage of the pipeline as a list of its steps."""
    if stage is None:
        return []
    return [dict(step) for step in stage[inner]] if stage["type"] == "Sequence" else [dict(stage)]


def _tokens(state: Mapping[str, Any], rows: int, kind_of: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return tokens and types by id. Unused ids are filled with names that no vocabulary has."""
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for token, i in state["model"]["vocab"].items():
        tokens[i], kinds[i] = token, kind_of.get(token, NORMAL)
    for added in state["added_tokens"]:
        i = added["id"]
        kind = UNKNOWN if kind_of.get(added["content"]) == UNKNOWN else CONTROL if added["special"] else USER_DEFINED
        tokens[i], kinds[i] = added["content"], kind
    return tokens, kinds


def _merges(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return merges in order; older files write each as one string."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in state["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _byte_level(state: Mapping[str, Any], rows: int) -> dict[str, Any]:
    tokens, kinds = _tokens(state, rows, {})
    merges = [f"{left} {right}" for left, right in _merges(state)]
    found = {"model": "gpt2", "pre": _pre(state), "tokens": tokens, "token_type": kinds, "merges": merges}
    return {_KEY + name: value for name, value in found.items()}


def _pre(state: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer's splitting. Raises ValueError where it has none."""
    forms = [step["type"] for step in _steps(state.get("normalizer"), "normalizers")]
    found = Pre(*_cuts(state), nfc=forms == ["NFC"], whole=bool(state["model"].get("ignore_merges")))
    name = next((name for name, pre in KNOWN.items() if replace(pre, bos=False) == found), None)
    if name is None or forms not in ([], ["NFC"]):
        raise _refused("its tokenizer cuts text in a way that has no name in GGUF files (tokenizer.ggml.pre)")
    return name


def _cuts(state: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the regular expressions that cut text, and those that cut its bytes' characters."""
    before: list[str] = []
    behind: list[str] = []
    cuts = before
    for step in _steps(state.get("pre_tokenizer"), "pretokenizers"):
        kind = step["type"]
        if kind == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True) and before:
                before.append(GPT2_SPLIT)
            cuts = behind
        elif kind == "Digits" and step["individual_digits"]:
            cuts.append(r"\p{N}")
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            cuts.append(step["pattern"]["Regex"])
        else:
            cuts.append(json.dumps(step))  # equals no cut of the table
    return tuple(before), tuple(behind)


def _sentencepiece(state: Mapping[str, Any], rows: int, prefix: bool) -> dict[str, Any]:
    model = state["model"]
    unknown = model.get("unk_token")
    given = {} if unknown is None else {unknown: UNKNOWN}
    if model.get("byte_fallback"):
        given |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    tokens, kinds = _tokens(state, rows, given)
    merged: dict[str, int] = {}
    for left, right in _merges(state):
        merged.setdefault(left + right, len(merged))
    scores = [
        -float(merged.get(token, len(merged) + i)) if kind == NORMAL else 0.0
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]
    found = {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": kinds,
        "add_space_prefix": prefix,
    }  # fmt: skip
    if unknown is not None:
        found["unknown_token_id"] = model["vocab"][unknown]
    return {_KEY + name: value for name, value in found.items()}


def _difference(tokenizer: Tokenizer, words: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Return the first text of the trial that a reader of `words` encodes differently; None where all are the same."""
    again = tokenizer_from_gguf(words)
    texts = [TRIAL, *TRIAL.splitlines(keepends=True)]
    for added in state["added_tokens"]:
        texts += [added["content"], *([] if _flags(added) else [_beside(added["content"])])]
    return next((text for text in texts if tokenizer.encode(text) != again.encode(text)), None)


def _beside(token: str) -> str:
    """Place a token between letters, spaces, digits, stops, line ends and itself, and in decomposed form."""
    apart = unicodedata.normalize("NFD", token)
    return f"a{token}b {token} c  {token}  1{token}2 .{token}.\n{token}\n{token}{token} \u00e9{token}\u00e9 {apart}x"


def _flags(added: Mapping[str, Any]) -> list[str]:
    """Return an added token's treatment of neighbours that a file cannot express."""
    return [flag for flag in ("lstrip", "rstrip", "single_word", "normalized") if added.get(flag)]
