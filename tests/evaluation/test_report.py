"""`attar.evaluate` from what a user passes: folders, decoders, texts, files, ids, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attar.evaluation.report import evaluate
from attar.model.decoder import Decoder
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

Make = Callable[..., Decoder]
STORY = "Once upon a time there was a little girl who liked to play in the garden. One day she found a red ball."
LOSS = 1e-5
NOTHING = 1e-9  # nats: one product is in another order


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """One token a letter; a post-processor that adds BOS."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors

    vocabulary = {"<s>": 0, "<unk>": 1} | {chr(97 + i): 2 + i for i in range(26)}
    backend = Backend(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return Tokenizer(backend, "<s>", None)


def test_a_folder_and_a_text(stories: Path, tmp_path: Path) -> None:
    """TinyStories: perplexity of a story equals transformers', window by window with the tokenizer's BOS in front."""
    transformers = pytest.importorskip("transformers")
    told: list[tuple[str, int, int]] = []
    text = tmp_path / "story.txt"
    text.write_text(STORY)
    report = evaluate(str(stories), against=stories, text=text, context=16, progress=lambda *seen: told.append(seen))
    assert {stage for stage, _, _ in told} == {"loading", "evaluating"}
    assert told[-1] == ("evaluating", report.tokens, report.tokens)
    tokenizer = Tokenizer.load(stories)
    bos = tokenizer.added_bos
    ids = tokenizer.encode(STORY, add_special_tokens=False)
    peer = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32).eval()
    total = 0.0
    starts = range(0, len(ids), 16) if bos is not None else range(1, len(ids), 16)
    for start in starts:
        wanted = ids[start : start + 16]
        inputs = [bos, *wanted[:-1]] if bos is not None else ids[start - 1 : start + 15][: len(wanted)]
        with torch.no_grad():
            logits = peer(torch.tensor([inputs])).logits[0]
        total += torch.nn.functional.cross_entropy(logits.double(), torch.tensor(wanted), reduction="sum").item()
    assert report.tokens == len(ids) - (bos is None)
    loss = torch.tensor(total / report.tokens).exp().item()
    assert report.to_dict()["ppl"] == pytest.approx(loss, rel=LOSS * 10)
    assert report.to_dict()["kl_mean"] == 0.0
    assert report.to_dict()["top1"] == 1.0
    assert report.bytes == pytest.approx(len(STORY), abs=2)


def test_a_decoder_and_a_file(tiny_decoder: Make, letters: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("thequickbrownfox")
    report = evaluate(tiny_decoder(0, vocab=28), text=tmp_path / "text.txt", tokenizer=letters, context=8)
    assert report.tokens == 16
    assert report.protocol.bos == 0
    assert report.bytes == 16
    named = str(tmp_path / "text.txt")
    assert evaluate(tiny_decoder(0, vocab=28), text=named, tokenizer=letters, max_tokens=5).tokens == 5


def test_token_sequences_are_taken_as_they_are(tiny_decoder: Make) -> None:
    model = tiny_decoder(0)
    report = evaluate(model, against=tiny_decoder(1), tokens=[[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_tokens=7)
    assert report.tokens == 4  # two whole sequences
    assert report.protocol.bos is None
    assert report.bytes is None
    assert report.to_dict()["kl_mean"] > 0


def test_input_that_is_refused(tiny_decoder: Make, letters: Tokenizer, tmp_path: Path) -> None:
    model = tiny_decoder(0, vocab=28)
    with user_error("option_missing"):
        evaluate(model)
    with user_error("text_empty"):
        evaluate(model, tokens=[])
    with user_error("vocabulary_mismatch"):
        evaluate(model, against=tiny_decoder(0), tokens=[[1, 2, 3]])
    with user_error("name_unknown"):
        evaluate(model, tokens=[[1, 2]], dtype="float8")
    with user_error("option_out_of_range"):
        evaluate(model, tokens=[[1, 2]], max_tokens=1)
    (tmp_path / "one.txt").write_bytes(b"a")
    with user_error("text_too_short"):
        evaluate(model, text=tmp_path / "one.txt", tokenizer=letters)
    with user_error("tokenizer_missing"):
        evaluate(model, text=tmp_path / "one.txt")
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "binary.txt").write_bytes(b"abc\xff")
    with user_error("text_empty", "empty.txt"):
        evaluate(model, text=tmp_path / "empty.txt", tokenizer=letters)
    with user_error("text_not_utf8"):
        evaluate(model, text=tmp_path / "binary.txt", tokenizer=letters)
    with user_error("file_not_found"):
        evaluate(model, text=str(tmp_path / "absent.txt"), tokenizer=letters)


def test_what_keeping_keys_and_values_so_costs(tiny_decoder: Make) -> None:
    """Against the model itself, keys and values as they are; several calls of a window, and blocks within it."""
    decoder = tiny_decoder()
    decoder.config = replace(decoder.config, context=200)
    ids = torch.randint(0, 97, (3, 150), generator=torch.Generator().manual_seed(0)).tolist()
    found = {kv: evaluate(decoder, tokens=ids, kv=kv, context=150) for kv in ("float32", "int8", "fp8", "int4")}
    cost = {kv: report.figures["kl_mean"].value for kv, report in found.items()}
    assert cost["float32"] <= NOTHING
    assert cost["float32"] < cost["int8"] < cost["fp8"] < cost["int4"] < 1.0
    assert found["int4"].protocol.context == 150
    assert evaluate(decoder, tokens=ids, kv="int8").protocol.context == decoder.config.context
    with user_error("kv_unknown"):
        evaluate(decoder, tokens=ids, kv="q4_0")
    with user_error("kv_unsupported"):
        evaluate(decoder, tokens=ids, kv="kivi2")
    with user_error("kv_unsupported"):
        evaluate(decoder, tokens=ids, kv="kivi2-published")  # groups of 32 columns, too


def test_a_format_as_published(demo: Path) -> None:
    """It is measured beside what is served, and its bits are told, with what calibration adds."""
    ids = [torch.randint(0, 4000, (200,), generator=torch.Generator().manual_seed(0)).tolist()]
    found = {kv: evaluate(demo, tokens=ids, kv=kv, context=200) for kv in ("kivi4-published", "kivi2-published")}
    four, two = (report.figures["kl_mean"].value for report in found.values())
    assert NOTHING < four < two
    cache = found["kivi2-published"].cache
    assert cache is not None
    assert cache.stored == pytest.approx(3 + 13 * 96 / 200)
    assert cache.shared == 0
    assert "kivi2-published: 9.240 bits" in found["kivi2-published"].table()
    assert found["kivi2-published"].to_dict()["kv_cache"]["context"] == 200
