"""Tokenizers from GGUF metadata, against those that the metadata was made from, transformers and llama.cpp."""

from __future__ import annotations

import gc
import json
import subprocess
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer as Backend
from transformers import CodeGenTokenizer, CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from attar.text import convert
from attar.text.gguf import tokenizer_from_gguf
from attar.text.gguf_pre import KNOWN
from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.errors import user_error
from tests.text.gguf_metadata import (
    BYTE,
    CONTROL,
    NORMAL,
    TEXTS,
    UNKNOWN,
    K,
    byte_level,
    llama,
    random_texts,
    sentencepiece,
    small_gpt2,
    small_llama,
    trained,
)
from tests.text.test_tokenizer import TEXT

# Names for which llama.cpp approximates the models' own expressions (see gguf_pre.py): equal only in ASCII.
APPROXIMATED = {
    "deepseek-coder", "deepseek-llm", "gpt-4o", "kanana2", "llama4", "minimax-m2", "tekken",
}  # fmt: skip


# Against the tokenizers that the metadata was made from


def both(shared: Path, name: str) -> tuple[Tokenizer, Tokenizer, dict[str, Any]]:
    """(the original, from GGUF, the metadata)"""
    original = Tokenizer.load(shared / "tokenizers" / name)
    if name == "llama2":  # the published tokenizer.json normalizes before it looks for special tokens
        backend = convert.from_model_file(shared / "tokenizers" / name / "tokenizer.model")
        convert.surround(backend, "<s>", None)
        original = Tokenizer(backend, "<s>", "</s>")
    ends = {f"{end}_token_id": i for end, i in (("bos", original.bos_id), ("eos", original.eos_id)) if i is not None}
    if name == "llama2":
        metadata = sentencepiece(shared / "tokenizers" / name / "tokenizer.model")
    else:
        pre, size = {"gpt2": ("gpt-2", None), "qwen2.5": ("qwen2", 151936), "llama3": ("llama-bpe", None)}[name]
        metadata = byte_level(original._backend, pre, size)
    metadata |= {K + key: value for key, value in ends.items()}
    for template in original.chat_templates.values():
        metadata["tokenizer.chat_template"] = template
    return original, tokenizer_from_gguf(metadata), metadata


NAMES = ["gpt2", "qwen2.5", "llama3", "llama2"]
SPECIALS = "<s>a</s> <|begin_of_text|><|eot_id|>\n<|im_start|>user <|im_end|><|endoftext|> <tool_call>x</tool_call>"


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_equal_the_originals(shared: Path, name: str) -> None:
    original, ours, _ = both(shared, name)
    folder = shared / "data" / "text"
    texts = [*TEXTS, SPECIALS, *random_texts(300)]
    texts += [(folder / f"{file}.txt").read_text()[:40_000] for file in ("wiki", "code", "c4", "tinystories")]
    for text in texts:
        ids = ours.encode(text)
        assert ids == original.encode(text)
        assert ours.encode_chat(text) == original.encode_chat(text)
        assert ours.decode(ids, False) == original.decode(ids, False)
    plain = [text for text in TEXTS if "▁" not in text]  # sentencepiece writes spaces so
    for text in plain:
        composed = unicodedata.normalize("NFC", text) if name == "qwen2.5" else text
        assert ours.decode(ours.encode(text)) == composed
    assert (ours.bos_id, ours.eos_id, ours.added_bos) == (original.bos_id, original.eos_id, original.added_bos)
    assert ours.special_ids == original.special_ids
    assert ours.chat_templates == original.chat_templates
    count = original.vocab_size
    assert [ours.id_to_bytes(i) for i in range(count + 9)] == [original.id_to_bytes(i) for i in range(count + 9)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_any_text_survives(shared: Path, name: str, text: str) -> None:
    original, ours = _loaded(shared, name)
    text = text.replace("▁", " ") if name == "llama2" else text
    ids = ours.encode(text)
    assert ids == original.encode(text)
    assert ours.decode(ids) == original.decode(ids)
    if not ours.special_ids.intersection(ours.encode(text, add_special_tokens=False)):  # which texts may spell
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if name == "qwen2.5" else text)


@cache
def _loaded(shared: Path, name: str) -> tuple[Tokenizer, Tokenizer]:
    return both(shared, name)[:2]


def test_a_chat_from_the_metadata_alone(shared: Path) -> None:
    original, ours, _ = both(shared, "llama3")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = render_chat(ours.chat_template(), messages, bos_token=ours.bos_token, eos_token=ours.eos_token)
    assert ours.encode_chat(text) == original.encode_chat(text)
    assert ours.encode_chat(text).count(128000) == 1
    assert ours.eos_ids == {128001, 128008, 128009}  # as the model's generation config has them


def test_the_demo(demo: Path) -> None:
    original = Tokenizer.load(demo)
    ours = tokenizer_from_gguf(byte_level(original._backend, "gpt-2", bos_token_id=0, eos_token_id=0))
    for text in [*TEXTS, *random_texts(200), "a<|endoftext|>b"]:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text), False) == text
    assert (ours.eos_ids, ours.special_ids, ours.vocab_size) == ({0}, {0}, original.vocab_size)


def test_a_vocabulary_of_one_score_merges_in_order_of_ids(shared: Path, stories: Path) -> None:
    """What the converter makes of a tokenizer.json of sentencepiece BPE: every score is -1000."""
    for path in (shared / "tokenizers" / "llama2", stories):
        original = Tokenizer.load(path)
        spec = json.loads((path / "tokenizer.json").read_text())
        tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
        special = {added["id"] for added in spec["added_tokens"]}
        kinds = [CONTROL if i in special else NORMAL for i in range(len(tokens))]
        kinds[0] = UNKNOWN
        kinds = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)]
        pieces = [(token, -1000.0, kind) for token, kind in zip(tokens, kinds, strict=True)]
        ours = tokenizer_from_gguf(llama(pieces, bos_token_id=1, eos_token_id=2))
        text = (shared / "data" / "text" / "tinystories.txt").read_text()[:40_000]
        assert ours.encode(text) == original.encode(text)


# Against transformers, which has some of these pipelines in its own words


@pytest.mark.parametrize(
    ("pre", "oracle"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("phi-2", CodeGenTokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
        ("mpt", GPTNeoXTokenizer),
        ("olmo", GPTNeoXTokenizer),
    ],
)
def test_cutting_equals_transformers(pre: str, oracle: Callable[..., Any]) -> None:
    spec = json.loads(trained().to_str())["model"]
    merges = [tuple(merge) for merge in spec["merges"]]
    theirs = oracle(vocab=spec["vocab"], merges=merges)._tokenizer
    ours = tokenizer_from_gguf(byte_level(trained(), pre))
    for text in [*TEXTS, *random_texts(300)]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


def test_falcon_cuts_as_its_tokenizer_json() -> None:
    """llama.cpp's pieces are others where a number follows a space, which Falcon's vocabulary does not show."""
    steps = [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
    ]
    spec = json.loads(trained().to_str()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    theirs = Backend.from_str(json.dumps(spec))
    ours = tokenizer_from_gguf(byte_level(trained(), "falcon"))
    for text in [*TEXTS, *random_texts(300)]:
        assert ours.encode(text) == theirs.encode(text).ids


def test_every_way_of_cutting_shows_in_the_ids() -> None:
    """So that the comparisons above and below can fail."""
    texts = [*TEXTS, *random_texts(300)]
    behaviours = {replace(behaviour, whole=False, bos=False): name for name, behaviour in KNOWN.items()}
    seen = {}
    for behaviour, name in behaviours.items():
        tokenizer = tokenizer_from_gguf(byte_level(trained(), name, add_bos_token=False))
        key = tuple(tuple(tokenizer.encode(text)) for text in texts)
        assert key not in seen, (name, seen[key])
        seen[key] = name
        assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts if not behaviour.nfc)


# Against llama.cpp

PEER = ROOT / ".venv-llamacpp" / "bin" / "python"


def llama_cpp(cases: list[tuple[dict[str, Any], list[str]]]) -> list[dict[str, Any]]:
    if not PEER.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    request = json.dumps([{"metadata": metadata, "texts": texts} for metadata, texts in cases])
    program = Path(__file__).with_name("llamacpp_tokens.py")
    done = subprocess.run([PEER, program], input=request, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_every_name_cuts_as_llama_cpp_does() -> None:
    texts = [*TEXTS, *random_texts(300)]
    files = {name: byte_level(trained(), name, add_bos_token=False) for name in KNOWN if name != "falcon"}
    for (name, metadata), answer in zip(
        files.items(), llama_cpp([(each, texts) for each in files.values()]), strict=True
    ):
        tokenizer = tokenizer_from_gguf(metadata)
        for text, ids in zip(texts, answer["ids"], strict=True):
            if (name in APPROXIMATED and not text.isascii()) or (
                KNOWN[name].nfc and not unicodedata.is_normalized("NFC", text)
            ):
                continue
            assert tokenizer.encode(text) == ids, (name, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_published_vocabularies_equal_llama_cpp(shared: Path, name: str) -> None:
    _, ours, metadata = both(shared, name)
    code = (shared / "data" / "text" / "code.txt").read_text()[:20_000]
    specials = SPECIALS.removeprefix("<s>a</s>") if name == "qwen2.5" else SPECIALS  # </s> is an end for llama.cpp
    texts = [*TEXTS, specials, *random_texts(100), code]
    texts = [text for text in texts if unicodedata.is_normalized("NFC", text)] if name == "qwen2.5" else texts
    (answer,) = llama_cpp([(metadata, texts)])
    assert [ours.encode(text) for text in texts] == answer["ids"]
    if name in ("llama2", "qwen2.5"):  # elsewhere llama.cpp takes spaces before stops away
        space = " " if name == "llama2" else ""  # the prefix, which llama.cpp leaves behind a BOS
        assert [ours.decode(ids) for ids in answer["ids"]] == [text.removeprefix(space) for text in answer["text"]]
    others = {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "</s>"} if name == "qwen2.5" else set()
    assert ours.eos_ids == set(answer["ends"]) - {ours.token_to_id(token) for token in others}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (None, None)])
def test_flags_of_a_small_vocabulary_equal_llama_cpp(prefix: bool, bos: bool | None, eos: bool | None) -> None:
    more: dict[str, Any] = {"add_space_prefix": prefix, "bos_token_id": 1, "eos_token_id": 2}
    more |= {} if bos is None else {"add_bos_token": bos, "add_eos_token": eos}
    metadata = small_llama(**more)
    texts = [*TEXTS, "the in ab</s> ab<tool>x    y <|im_end|> the", "ab", "<unk>a"]
    ours = tokenizer_from_gguf(metadata)
    (answer,) = llama_cpp([(metadata, texts)])
    assert [ours.encode(text) for text in texts] == answer["ids"]
    assert ours.eos_ids == set(answer["ends"])


# Flags, types and ids


def test_bos_and_eos_are_added_as_the_flags_say() -> None:
    end = len(small_gpt2()[K + "tokens"]) - 4
    for pre, usual in (("gpt-2", False), ("llama-bpe", True), ("tekken", True)):
        plain = tokenizer_from_gguf(small_gpt2(pre)).encode("ab")
        ids = {"bos_token_id": end, "eos_token_id": end + 1}
        assert tokenizer_from_gguf(small_gpt2(pre, **ids)).encode("ab") == [end] * usual + plain
        for bos in (True, False):
            for eos in (True, False):
                both = tokenizer_from_gguf(small_gpt2(pre, **ids, add_bos_token=bos, add_eos_token=eos))
                assert both.encode("ab") == [end] * bos + plain + [end + 1] * eos
                assert both.encode("ab", add_special_tokens=False) == plain


@pytest.mark.parametrize("token", ["$0", "$A7", "a:1:2", "<|x:y|>", "a b"])
def test_bos_may_be_spelled_anyhow(token: str) -> None:
    metadata = small_gpt2(bos_token_id=len(small_gpt2()[K + "tokens"]), add_bos_token=True)
    metadata[K + "tokens"].append(token)
    metadata[K + "token_type"].append(CONTROL)
    ours = tokenizer_from_gguf(metadata)
    assert ours.encode("zz")[0] == ours.bos_id == ours.added_bos
    assert ours.decode(ours.encode("zz")) == "zz"


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "padding", "seperator", "image"])
@pytest.mark.parametrize("wrong", [-1, 2**32 - 1, 128256])
def test_an_id_that_is_no_token_is_not_used(name: str, wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    """As in llama.cpp: -1 as u32, or an id beyond the vocabulary."""
    ours, expected = (tokenizer_from_gguf(small_gpt2(**more)) for more in ({f"{name}_token_id": wrong}, {}))
    assert ours.encode("zz<|im_end|>") == expected.encode("zz<|im_end|>")
    assert (ours.bos_id, ours.eos_ids) == (expected.bos_id, expected.eos_ids)
    assert f"{name}_token_id" in caplog.text


def test_a_llama_whose_ids_are_no_tokens_has_the_usual_ones() -> None:
    ours = tokenizer_from_gguf(small_llama() | {K + "bos_token_id": 2**32 - 1, K + "eos_token_id": 2**32 - 1})
    expected = tokenizer_from_gguf(small_llama())
    assert (ours.bos_id, ours.eos_id, ours.encode("ab")) == (expected.bos_id, expected.eos_id, expected.encode("ab"))


@pytest.mark.parametrize("end", ["bos", "eos"])
def test_no_token_is_added_that_the_file_does_not_name(end: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = tokenizer_from_gguf(small_gpt2(**{f"add_{end}_token": True}))
    assert ours.encode("zz") == tokenizer_from_gguf(small_gpt2()).encode("zz")
    assert f"add_{end}_token is true" in caplog.text


def test_types_decide_what_is_shown_and_found_whole() -> None:
    ours = tokenizer_from_gguf(small_gpt2(eos_token_id=300))
    count = len(small_gpt2()[K + "tokens"])
    end, turn, message, tool = range(count - 4, count)
    assert ours.encode("<tool_call><|im_end|>") == [tool, turn]
    assert ours.decode([tool, turn]) == "<tool_call>"
    assert ours.special_ids == {end, turn, message, 300}
    assert ours.eos_ids == {end, turn, message, 300}


def test_the_end_of_a_message_is_no_end_of_a_turn() -> None:
    """gpt-oss: <|end|> closes the analysis, <|return|> the answer."""
    backend = Backend.from_str(trained().to_str())
    backend.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    ours = tokenizer_from_gguf(byte_level(backend, "gpt-4o"))
    assert ours.eos_ids == {ours.token_to_id("<|return|>"), ours.token_to_id("<|call|>")}


def test_every_declared_end_is_one() -> None:
    ours = tokenizer_from_gguf(small_gpt2(eos_token_id=5, eot_token_id=6, eom_token_id=7))
    assert ours.eos_ids >= {5, 6, 7}
    assert ours.eos_id == 5
    assert Tokenizer(trained(), eos_token="a").eos_ids == {trained().token_to_id("a")}
    assert Tokenizer(trained()).eos_ids == frozenset()


def test_a_word_that_is_a_token_is_taken_whole_where_the_name_says_so() -> None:
    metadata = small_gpt2(add_bos_token=False)
    metadata[K + "tokens"].append("zqzq")  # no merge makes it
    metadata[K + "token_type"].append(NORMAL)
    last = len(metadata[K + "tokens"]) - 1
    for pre, whole in (("llama-bpe", True), ("dbrx", False)):
        assert (tokenizer_from_gguf(metadata | {K + "pre": pre}).encode("zqzq") == [last]) == whole


def test_special_tokens_of_phi3_take_the_spaces_behind_them() -> None:
    metadata = small_llama(add_bos_token=False)
    for architecture, spaces in (("llama", 1), ("phi3", 0)):
        ours = tokenizer_from_gguf(metadata | {"general.architecture": architecture})
        assert len(ours.encode("<|im_end|>\n")) == 1 + 2 * spaces  # the prefix and the line's end
        assert len(ours.encode("<s>\n")) == 3


def test_templates_by_name() -> None:
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    ours = tokenizer_from_gguf(small_gpt2() | named | {"tokenizer.chat_templates": ["tool_use"]})
    assert (ours.chat_template(), ours.chat_template(tools=True)) == ("plain", "tools")
    with user_error("template_missing"):
        tokenizer_from_gguf(small_gpt2()).chat_template()


def test_garbage_is_collected_again_afterwards() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            tokenizer_from_gguf(small_gpt2())
            with user_error("tokenizer_missing"):
                tokenizer_from_gguf({})
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
