"""Tokenizers rebuilt from older files, against sentencepiece, tiktoken and transformers."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer

from attar.text import convert
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

LINES = (
    "Hello world",
    "  two  spaces  and\ttabs\t\t",
    "            deeply indented = {x: 1}  # 12345 + 67",
    "naïve café, 日本語 𠮷野家 👩\u200d👩\u200d👧 e\u0301 don't WE'LL",
    "có nhiều việc",  # Llama 3 has these words as pieces that merges alone do not reach
    "a\r\n\r\nb\n\n\nc   ",
    "\u2581x \u00a0 \ufeff",
    "",
    " ",
)


def _lines(shared: Path) -> list[str]:
    text = shared / "data" / "text"
    prose = (text / "wikitext2_test.txt").read_text()[:60_000].replace("<unk>", "thing")
    code = (text / "code.txt").read_text()[:60_000]
    return [*LINES, *prose.split("\n"), *code.split("\n")]


def test_the_byte_alphabet_is_the_libraries() -> None:
    alphabet = convert.bytes_to_chars()
    assert sorted(alphabet.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet) == list(range(256))


def test_gpt2_from_vocab_and_merges(shared: Path) -> None:
    ours, oracle = (load(shared / "tokenizers" / "gpt2") for load in (Tokenizer.load, GPT2Tokenizer.from_pretrained))
    assert [ours.encode(line) for line in _lines(shared)] == [oracle(line)["input_ids"] for line in _lines(shared)]
    assert ours.bos_id == ours.eos_id == oracle.eos_token_id


def test_qwen2_from_vocab_and_merges(shared: Path) -> None:
    ours, oracle = (load(shared / "tokenizers" / "qwen2.5") for load in (Tokenizer.load, AutoTokenizer.from_pretrained))
    lines = [*_lines(shared), "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b"]
    assert [ours.encode(line) for line in lines] == [oracle(line)["input_ids"] for line in lines]
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (None, oracle.eos_token_id, len(oracle))
    assert ours.special_ids >= set(oracle.all_special_ids)


def test_llama3_from_tiktoken_ranks(shared: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed: the oracle for rank files")
    path = shared / "tokenizers" / "llama3"
    ours = Tokenizer.load(path)
    ranks = {base64.b64decode(a): int(b) for a, b in (x.split() for x in (path / "tokenizer.model").open("rb"))}
    oracle = tiktoken.Encoding("llama3", pat_str=convert.LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    lines = _lines(shared)
    assert [ours.encode(line, add_special_tokens=False) for line in lines] == [oracle.encode(line) for line in lines]
    assert ours.encode("a<|eot_id|>") == [128000, 64, 128009]
    # As transformers converts the file; the splitting pattern is not the one above there.
    assert ours.encode("Hello world 12345\n\n don't")[1:] == [9906, 1917, 220, 4513, 1774, 271, 1541, 956]
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (128000, 128009, 128256)


def test_llama2_from_sentencepiece(shared: Path, tmp_path: Path) -> None:
    """The same as the published tokenizer.json, and both as sentencepiece."""
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(shared / "tokenizers" / "llama2" / name, tmp_path)
    ours, published = Tokenizer.load(tmp_path), Tokenizer.load(shared / "tokenizers" / "llama2")
    lines = _lines(shared)
    assert [ours.encode(line) for line in lines] == [published.encode(line) for line in lines]
    assert ours.encode_chat("<s>[INST] hi [/INST]</s>") == [1, *ours.encode("[INST] hi [/INST]")[1:], 2]
    assert ours.special_ids == published.special_ids
    for ids in ([306, 29871, 243, 162], [1, 15043, 2], [15043]):
        assert ours.decode(ids) == published.decode(ids)
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: the second oracle")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert [ours.encode(line, add_special_tokens=False) for line in lines] == [oracle.encode(line) for line in lines]


# A sentencepiece model by hand, so that the reader is tested without any data.


def _field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    tag = number << 3 | (2 if isinstance(value, bytes) else 0)
    head = _varint(tag)
    return head + _varint(len(value)) + value if isinstance(value, bytes) else head + _varint(value)


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _model(*, model_type: int = 2, prefix: int = 1, charsmap: bytes = b"") -> bytes:
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate(("ab", "▁ab", "abc", "▁", "a", "b", "c"))]
    pieces += [("<tool>", 0.0, 4)]
    fields = (_field(1, text.encode()) + _field(2, score) + _field(3, kind) for text, score, kind in pieces)
    body = b"".join(_field(1, piece) for piece in fields)
    normalizer = _field(2, charsmap) + _field(3, prefix) + _field(4, 0)
    return body + _field(2, _field(3, model_type) + _field(35, 1)) + _field(3, normalizer)


def _folder(path: Path, model: bytes) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    return path


def test_reads_a_sentencepiece_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_folder(tmp_path, _model()))
    ids = {piece: tokenizer.token_to_id(piece) for piece in ("▁ab", "abc", "▁", "c", "<tool>", "<0xC3>", "<0xA9>")}
    assert tokenizer.encode("ab abc") == [1, ids["▁ab"], ids["▁ab"], ids["c"]]
    assert tokenizer.encode("é", add_special_tokens=False) == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.encode("<tool>", add_special_tokens=False)[-1] == ids["<tool>"]
    assert tokenizer.decode(tokenizer.encode("ab é abc")) == "ab é abc"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_ids) == (1, 2, {0, 1, 2})


def test_a_model_without_the_prefix_space_keeps_every_space(tmp_path: Path) -> None:
    """As Gemma: no space is put before the text, so none is taken away."""
    tokenizer = Tokenizer.load(_folder(tmp_path, _model(prefix=0)))
    assert tokenizer.encode("abc", add_special_tokens=False) == [tokenizer.token_to_id("abc")]
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (_model(model_type=1), "tokenizer_unsupported"),
        (_model(charsmap=b"x"), "tokenizer_unsupported"),
        (b"", "tokenizer_unsupported"),
        (b"\x0a\xff", "tokenizer_malformed"),
        (_model()[:-3], "tokenizer_malformed"),
        (b"\xff" * 40, "tokenizer_malformed"),
        (b"hello, world\n", "tokenizer_malformed"),
        (b"IQ== 0\nnot-base64 1\n", "tokenizer_malformed"),
        (b"IQ== 0\nIg== one\n", "tokenizer_malformed"),
        (b"IQ== 0\nIg==\n", "tokenizer_malformed"),
    ],
)
def test_refuses_other_models(tmp_path: Path, model: bytes, word: str) -> None:
    with user_error(word):
        Tokenizer.load(_folder(tmp_path, model))


def test_refuses_malformed_merges(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    for merges, word in (
        ("a b c\n", "tokenizer_malformed"),
        ("ab\n", "tokenizer_malformed"),
        ("a x\n", "tokenizer_mismatch"),
    ):
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
        with user_error(word):
            Tokenizer.load(tmp_path)


def test_vocab_and_merges_with_bos(tmp_path: Path) -> None:
    """As OPT: `add_bos_token` in the config of a GPT-2 tokenizer."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "</s>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {"add_bos_token": True, "bos_token": {"content": "</s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abb") == [3, 2, 1]
    assert tokenizer.encode("abb", add_special_tokens=False) == [2, 1]


def _merges(folder: Path, *merges: str, config: dict[str, object] | None = None, **vocab: int) -> Path:
    """Byte-level BPE as two files: the bytes, one token for each merge, and `vocab`; with a tokenizer_config.json."""
    chars = convert.bytes_to_chars().values()
    tokens = [*chars, *(merge.replace(" ", "") for merge in merges)]
    known = {token: index for index, token in enumerate(tokens)} | vocab
    (folder / "vocab.json").write_text(json.dumps(known))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def test_added_tokens_of_an_older_folder(tmp_path: Path) -> None:
    """Without added_tokens_decoder, ids stand in added_tokens.json, and special tokens in special_tokens_map.json."""
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    _merges(tmp_path, config=config, **{"<s>": 256, "</s>": 257})
    added = {"<|im_end|>": 259, "<|im_start|>": 258, "<think>": 260}
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours, oracle = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|im_start|>b<think><|im_end|>"
    assert ours.encode(text) == oracle(text)["input_ids"] == [97 - 33, 258, 98 - 33, 260, 259]
    assert ours.eos_id == oracle.eos_token_id == 259
    assert ours.special_ids == {256, 258, 259}
    (tmp_path / "added_tokens.json").write_text('["<|im_end|>"]')
    with user_error("tokenizer_malformed"):
        Tokenizer.load(tmp_path)


def test_added_tokens_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    size = 3 + 256 + 7 + 1
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    tokenizer = Tokenizer.load(_folder(tmp_path, _model()))
    assert tokenizer.encode("abc<|im_end|>")[-1] == size


@pytest.mark.parametrize("where", ["tokenizer_class", "config.json", "model_type"])
@pytest.mark.parametrize("kind", ["Qwen2", "GPT2"])
def test_the_class_or_the_models_type_says_how_text_is_cut(kind: str, where: str, tmp_path: Path) -> None:
    newlines, digits = "\u010a \u010a", "1 2"
    named = {"tokenizer_class": f"{kind}Tokenizer"}
    _merges(tmp_path, newlines, digits, config=named if where == "tokenizer_class" else {})
    model = {"model_type": kind.lower()} | (named if where == "config.json" else {})
    (tmp_path / "config.json").write_text(json.dumps(model))
    ours, oracle = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("x\n\n12")
    assert ids == oracle("x\n\n12", add_special_tokens=False)["input_ids"]
    assert (257 in ids) == (kind == "GPT2")


def test_a_class_that_cuts_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    for config, model_type in (({"tokenizer_class": "RobertaTokenizer"}, "qwen2"), ({}, "llama")):
        _merges(tmp_path, config=config)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with user_error("tokenizer_unsupported"):
            Tokenizer.load(tmp_path)


def test_added_tokens_must_fit_behind_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "merges.txt").write_text("")
    for index in (2, 5):
        config = {"added_tokens_decoder": {str(index): {"content": "<x>", "special": True}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if index == 2:
            assert Tokenizer.load(tmp_path).special_ids == {2}
        else:
            with user_error("tokenizer_malformed"):
                Tokenizer.load(tmp_path)
