"""Text to ids as transformers does it; ids to text, whole and streamed, never half a character."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from attar.text.convert import bytes_to_chars
from attar.text.template import render_chat
from attar.text.tokenizer import Detokenizer, Tokenizer
from tests.errors import user_error

BROKEN = "\ufffd"
EVERY_POINT = int(os.environ.get("TEST_EVERY_CODE_POINT", "7"))
"""Of the code points, which are tried one by one: every so many."""
BYTE_STRINGS = int(os.environ.get("TEST_BYTE_STRINGS", "20000"))
TEXT = st.text(
    st.one_of(
        st.sampled_from("ab c \n▁é日👩👧\u200d\ufe0f\u0301🇩🇪🏽\u202e𠮷"), st.characters(exclude_categories=["Cs"])
    ),
    max_size=20,
)  # fmt: skip


def byte_level() -> Backend:
    """GPT-2's way, with a few merges across the bytes of a character, and two special tokens."""
    chars = bytes_to_chars()
    vocab = {char: index for index, char in enumerate(chars.values())}
    pairs = ((0xF0, 0x9F), (0x9F, 0x91), (0xC3, 0xA9), (0xE2, 0x80), (0x61, 0x62), (0x20, 0x61))
    merges = [(chars[left], chars[right]) for left, right in pairs]
    vocab |= {left + right: len(chars) + index for index, (left, right) in enumerate(merges)}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<added token>"])
    return backend


def sentencepiece_like() -> Backend:
    """Llama 2's way: a leading space that is taken back, byte pieces for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁ab", "é"]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        [("a", "b"), ("▁", "ab")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    bos = [("<s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=bos)
    return backend


@cache
def tokenizers() -> tuple[Tokenizer, ...]:
    return Tokenizer(byte_level(), "<s>", "</s>"), Tokenizer(sentencepiece_like(), "<s>", "</s>")


KIND = st.integers(0, 1)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@given(KIND, TEXT)
def test_text_survives_and_streams_whole(kind: int, text: str) -> None:
    tokenizer = tokenizers()[kind]
    text = text.replace("▁", " ") if kind else text  # sentencepiece writes spaces so
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == text
    assert BROKEN in text or all(BROKEN not in piece for piece in pieces)


@given(KIND, st.lists(st.integers(0, 270), max_size=24), st.booleans())
def test_any_tokens_stream_to_their_decoding(kind: int, ids: list[int], skip: bool) -> None:
    tokenizer = tokenizers()[kind]
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)) == tokenizer.decode(ids, skip)


@given(KIND, st.lists(st.integers(0, 270), max_size=24), st.booleans())
def test_decoding_equals_the_library_where_the_bytes_are_text(kind: int, ids: list[int], skip: bool) -> None:
    tokenizer = tokenizers()[kind]
    library = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    if BROKEN not in library or kind == 0:  # byte-level decoding replaces invalid bytes by the same rule
        assert tokenizer.decode(ids, skip) == library


@given(KIND, TEXT, st.data())
def test_text_after_a_prompt_is_what_the_prompt_lacks(kind: int, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizers()[kind]
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))  # also within a character
    pieces = stream(Detokenizer(tokenizer), ids)
    assert stream(Detokenizer(tokenizer, ids[:cut]), ids[cut:]) == pieces[cut:]


@given(KIND, TEXT, st.data())
def test_a_text_cut_short_ends_in_at_most_one_broken_character(kind: int, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizers()[kind]
    ids = tokenizer.encode(text.replace(BROKEN, ""))
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(tokenizer)
    *pieces, last = stream(detokenizer, ids[:cut])
    assert BROKEN not in "".join(pieces)
    assert last in ("", BROKEN)


def test_valid_characters_survive_beside_invalid_bytes() -> None:
    """Byte pieces E2 82 AC FF: the library gives four replacement characters, losing the euro sign."""
    tokenizer = tokenizers()[1]
    ids = [3 + byte for byte in (0xE2, 0x82, 0xAC, 0xFF)]
    assert tokenizer._backend.decode(ids) == BROKEN * 4
    assert tokenizer.decode(ids) == "€" + BROKEN


def test_a_leading_space_is_dropped_at_the_start_alone() -> None:
    tokenizer = tokenizers()[1]
    ids = tokenizer.encode("ab ab")
    assert tokenizer.decode(ids) == "ab ab"
    assert stream(Detokenizer(tokenizer), ids) == ["", "ab", " ab", ""]
    assert stream(Detokenizer(tokenizer, ids), ids[1:]) == [" ab", " ab", ""]


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = tokenizers()[0]
    assert tokenizer.bos_id is not None
    assert tokenizer.bos_id in tokenizer.special_ids
    ids = [tokenizer.bos_id, *tokenizer.encode("ab<added token>")]
    assert tokenizer.decode(ids) == "ab<added token>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab<added token>"
    for visible, shown in ((), "ab"), ((tokenizer.bos_id,), "ab<s>"), ((ids[-1],), "ab"):
        detokenizer = Detokenizer(tokenizer, ids[:1], visible=visible)
        assert "".join(stream(detokenizer, [*tokenizer.encode("ab"), tokenizer.bos_id])) == shown


@cache
def id_of_byte(kind: int) -> tuple[int, ...]:
    tokenizer = tokenizers()[kind]
    ids = {tokenizer.id_to_bytes(index): index for index in range(tokenizer.vocab_size)}
    return tuple(ids[bytes([byte])] for byte in range(256))


def ids_of(kind: int, data: bytes) -> list[int]:
    """A token for each byte."""
    return [id_of_byte(kind)[byte] for byte in data]


@pytest.mark.parametrize("kind", [0, 1])
def test_every_character_streams_byte_by_byte(kind: int) -> None:
    points = [c for c in range(1, sys.maxunicode + 1, EVERY_POINT) if not 0xD800 <= c < 0xE000]
    text, tokenizer = "".join(map(chr, points)), tokenizers()[kind]
    assert "".join(stream(Detokenizer(tokenizer), ids_of(kind, text.encode()))) == text


@pytest.mark.parametrize("kind", [0, 1])
def test_any_bytes_stream_to_what_they_say(kind: int) -> None:
    """Of short strings many hold a whole character beside half of one."""
    tokenizer, rng = tokenizers()[kind], random.Random(0)
    lead = [0x41, 0x7F, 0x80, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x91, 0xF4, 0x90, 0xFF]
    for _ in range(BYTE_STRINGS):
        data = bytes(rng.choice(lead) for _ in range(rng.randint(0, 8)))
        pieces = stream(Detokenizer(tokenizer), ids_of(kind, data))
        assert "".join(pieces) == tokenizer.decode(ids_of(kind, data)) == data.decode(errors="replace")


def test_unknown_ids_are_empty() -> None:
    tokenizer = tokenizers()[0]
    assert (
        tokenizer.id_to_bytes(tokenizer.vocab_size) == tokenizer.id_to_bytes(-1) == tokenizer.id_to_bytes(2**40) == b""
    )
    assert tokenizer.decode([10**6]) == ""


def test_bytes_of_tokens() -> None:
    byte, piece = tokenizers()
    assert {byte.id_to_bytes(index) for index in range(256)} == {bytes([value]) for value in range(256)}
    assert [piece.id_to_bytes(3 + value) for value in range(256)] == [bytes([value]) for value in range(256)]
    assert piece.id_to_bytes(piece.token_to_id("▁ab") or 0) == b" ab"


def test_refuses_lone_surrogates() -> None:
    with user_error("text_not_utf8"):
        tokenizers()[0].encode("ab\ud800")


def test_an_added_token_is_spelled_as_it_was_added(shared: Path) -> None:
    """The library spells it as the normalizer does, which in Llama 2's file puts a space before it."""
    tokenizer = _load(shared / "tokenizers" / "llama2")
    assert (tokenizer.id_to_bytes(1), tokenizer.id_to_token(1), tokenizer.id_to_token(10**6)) == (b"<s>", "<s>", "")
    ids = [1, *tokenizer.encode("na", add_special_tokens=False), 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> na</s>"  # as transformers has it


def test_leftover_truncation_and_padding_are_off() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert Tokenizer(backend).decode(Tokenizer(backend).encode("a b c d e")) == "a b c d e"


# Real tokenizers


@pytest.mark.parametrize("name", ["tokenizers/llama2", "models/TinyStories-656K"])
def test_ids_equal_transformers(shared: Path, name: str) -> None:
    ours, oracle = Tokenizer.load(shared / name), AutoTokenizer.from_pretrained(shared / name)
    story = (shared / "data" / "text" / "tinystories.txt").read_text()[:20_000]
    lines = [line for line in story.split("\n") if not line.startswith(("<", " "))]  # those: see the module's docstring
    assert [ours.encode(line) for line in lines] == [oracle(line)["input_ids"] for line in lines]
    assert [ours.decode(ours.encode(line)) for line in lines] == lines
    assert (ours.bos_id, ours.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert ours.special_ids >= set(oracle.all_special_ids)


@settings(max_examples=40, deadline=None)
@given(text=TEXT)
@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen2.5", "gpt2"])
def test_real_tokenizers_stream_whole(shared: Path, name: str, text: str) -> None:
    tokenizer = _load(shared / "tokenizers" / name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert BROKEN in text or BROKEN not in "".join(pieces)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@cache
def _load(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def test_a_rendered_chat_has_one_bos(shared: Path) -> None:
    tokenizer = _load(shared / "tokenizers" / "llama3")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = render_chat(
        tokenizer.chat_template(), messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    ids = tokenizer.encode_chat(text)
    assert text.startswith("<|begin_of_text|>")
    assert ids.count(128000) == 1
    assert tokenizer.encode(text).count(128000) == 2  # what encode_chat is for
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# Files beside the tokenizer


def _folder(path: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.mark.parametrize("adds", [True, False, None])
@pytest.mark.parametrize("own", [True, False])
def test_a_tokenizer_json_decides_about_bos_as_in_transformers(tmp_path: Path, adds: bool | None, own: bool) -> None:
    backend = byte_level()
    if own:
        bos = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=bos)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if adds is None else {"add_bos_token": adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, oracle = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("ab c") == oracle("ab c")["input_ids"]
    assert (ours.encode("ab c")[0] == ours.bos_id) == own


def _llama_like(path: Path, config: dict[str, Any], **files: Any) -> tuple[Tokenizer, Any]:
    """The tokenizer of a folder, ours and transformers'. The class is stated, so that it needs no config.json."""
    texts = {name: json.dumps(value) for name, value in files.items()}
    _folder(path, {"tokenizer_class": "PreTrainedTokenizerFast", **config}, **texts)
    return Tokenizer.load(path), AutoTokenizer.from_pretrained(path)


def test_special_tokens_as_strings_or_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": None}
    tokenizer = Tokenizer.load(_folder(tmp_path, config))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_token) == (None, "</s>")


@pytest.mark.parametrize("decoder", [False, True])
def test_the_special_tokens_map_wins_where_the_config_lists_no_tokens(decoder: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {"added_tokens_decoder": {}} if decoder else {}
    ours, oracle = _llama_like(tmp_path, config, special_tokens_map__json={"eos_token": "<s>"})
    assert ours.eos_token == ("</s>" if decoder else "<s>")
    assert (ours.bos_id, ours.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)


@pytest.mark.parametrize("beside", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_listed_beside_a_tokenizer_json_are_tokens(beside: str, tmp_path: Path) -> None:
    first = byte_level().get_vocab_size()
    listed = {"<|im_start|>": first, "<|im_end|>": first + 1}
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    decoder = {str(index): {"content": token, **flags} for token, index in listed.items()}
    config: dict[str, Any] = {"eos_token": "<|im_end|>"}
    files: dict[str, Any] = {"added_tokens__json": listed}
    if beside == "tokenizer_config.json":
        config, files = {**config, "added_tokens_decoder": decoder}, {}
    ours, oracle = _llama_like(tmp_path, config, **files)
    text = "ab <|im_start|> c<|im_end|>"
    assert ours.encode(text) == oracle(text)["input_ids"]
    assert set(ours.encode(text)) > set(listed.values())
    assert ours.eos_id == oracle.eos_token_id == first + 1


def test_flags_listed_beside_a_tokenizer_json_count(tmp_path: Path) -> None:
    entry = {"content": "</s>", "special": True, "lstrip": False, "rstrip": True, "normalized": False}
    index = byte_level().token_to_id("</s>")
    ours, oracle = _llama_like(tmp_path, {"added_tokens_decoder": {str(index): {**entry, "single_word": False}}})
    assert ours.encode("a</s>  b") == oracle("a</s>  b")["input_ids"] == [*ours.encode("a</s>"), *ours.encode("b")]


def test_a_named_special_token_of_the_plain_vocabulary_is_one(tmp_path: Path) -> None:
    ours, oracle = _llama_like(tmp_path, {"pad_token": "ab", "additional_special_tokens": ["c", "<absent>"]})
    assert ours.special_ids >= {ours.token_to_id("ab"), ours.token_to_id("c")}
    assert ours.decode(ours.encode("abac")) == oracle.decode(ours.encode("abac"), skip_special_tokens=True) == "a"


def test_a_listed_token_that_cannot_get_its_id_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {"content": "<|im_start|>", "special": True}
    tokenizer = Tokenizer.load(_folder(tmp_path, {"added_tokens_decoder": {"9999": entry, "0": {"content": "</s>"}}}))
    assert tokenizer.token_to_id("<|im_start|>") is None
    assert tokenizer.token_to_id("</s>") == byte_level().token_to_id("</s>")
    assert "'<|im_start|>' (9999)" in caplog.text


def test_a_special_token_that_the_vocabulary_lacks_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(_folder(tmp_path, {"bos_token": "<absent>", "eos_token": "</s>"}))
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (None, None, "</s>")
    assert tokenizer.token_to_id("<absent>") is None
    assert "bos_token" in caplog.text
    assert "<absent>" in caplog.text


def test_a_folder_whose_name_is_no_utf8_is_read(tmp_path: Path) -> None:
    """In a locale of another encoding every name beyond ASCII is such a one to libraries that expect UTF-8."""
    folder = tmp_path / os.fsdecode(b"mod\xe8le")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_level().to_str())
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("ab") == tokenizers()[0].encode("ab")
    saved = folder / "saved"
    saved.mkdir()
    tokenizer.save(saved)
    assert Tokenizer.load(saved).encode("ab c") == tokenizer.encode("ab c")


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert Tokenizer.load(_folder(tmp_path, {"chat_template": "one"})).chat_template() == "one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.load(_folder(tmp_path, {"chat_template": named}))
    assert (tokenizer.chat_template(), tokenizer.chat_template(tools=True)) == ("plain", "tools")
    tokenizer = Tokenizer.load(
        _folder(tmp_path, {"chat_template": "one"}, chat_template__json='{"chat_template": "two"}')
    )
    assert (tokenizer.chat_template(), tokenizer.chat_template(tools=True)) == ("two", "two")
    tokenizer = Tokenizer.load(_folder(tmp_path, {"chat_template": "one"}, chat_template__jinja="three\n"))
    assert tokenizer.chat_template() == "three\n"


def test_a_missing_template_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with user_error("template_missing"):
        Tokenizer.load(_folder(tmp_path)).chat_template()
    tokenizer = Tokenizer.load(_folder(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]}))
    with user_error("template_missing"):
        tokenizer.chat_template()


def test_bad_folders(tmp_path: Path) -> None:
    with user_error("file_wrong_kind", "config.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with user_error("tokenizer_missing"):
        Tokenizer.load(tmp_path)
    _folder(tmp_path, {"bos_token": 5})
    with user_error("tokenizer_malformed"):
        Tokenizer.load(tmp_path)
    for text, word in (("{", "tokenizer_malformed"), ("[]", "tokenizer_malformed")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with user_error(word):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with user_error("tokenizer_malformed", "tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_refused() -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with user_error("tokenizer_unsupported"):
        Tokenizer(backend)


@pytest.mark.parametrize("named", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_special_tokens_of_old_llama_files_are_found_within_a_text(tmp_path: Path, named: str) -> None:
    """Their tokenizer.json seeks them in normalized text, where a space belongs to each. transformers 5 does so for the
    class that says nothing of normalization, and not for Llama's."""
    backend = sentencepiece_like()
    old = [AddedToken(token, special=True, normalized=True) for token in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens(old)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    config = {"tokenizer_class": named, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a</s>b", "<s>ab</s>", "</s></s>a"):
        found, wanted = (
            [token for token in each if token in (1, 2)]
            for each in (tokenizer.encode_chat(text), theirs(text, add_special_tokens=False)["input_ids"])
        )
        assert found == wanted, text
    assert tokenizer.specials_respelled == (named == "PreTrainedTokenizerFast")
