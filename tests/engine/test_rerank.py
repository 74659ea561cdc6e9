"""A causal reranker's scores: two tokens' logits, equal to transformers' on random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend

from attar.engine.llm.llm import LLM
from attar.errors import UserError
from attar.protocol.request import SamplingParams
from attar.text.forms.infill import Infill
from attar.text.forms.rerank import Reranker, score
from attar.text.literal import LiteralChat
from attar.text.tokenizer import Tokenizer


def test_scores_are_transformers(demo: Path, tmp_path: Path) -> None:
    backend = Backend.from_str(Tokenizer.load(demo)._backend.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    backend.add_tokens(["<think>", "</think>", "yes", "no"])
    Tokenizer(backend, None, "<|endoftext|>").save(tmp_path)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=backend.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        initializer_range=0.3, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    llm = LLM(tmp_path, activations="exact", verify=False)
    reranker = Reranker.of(llm.tokenizer, LiteralChat(llm.tokenizer).text_ids)
    assert reranker is not None
    words = (reranker.no, reranker.yes)
    prompts = [list(reranker.ids("a pet", text)) for text in ("a cat", "a car and a road", "the dog barks")]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=words))
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt])).logits[0, -1, list(words)].double()
        assert answer.logprobs is not None
        (_, no), (_, yes) = answer.logprobs[0].top
        assert yes - no == pytest.approx((logits[1] - logits[0]).item(), abs=1e-3)
        found.append(score(no, yes))
        assert found[-1] == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-3)
    assert len(set(found)) == 3
    assert llm.rerank("a pet", ("a cat", "a car and a road", "the dog barks")) == found
    infill = Infill.of(llm.tokenizer, LiteralChat(llm.tokenizer).text_ids)
    assert infill is not None
    params = SamplingParams(max_tokens=8, temperature=0, seed=0)
    middle = llm.infill("a cat", "a dog", params)
    wanted = replace(params, stop_token_ids=infill.ends)
    assert [middle] == llm.generate([infill.ids("a cat", "a dog")], wanted)


def test_other_models_neither_rerank_nor_fill_gaps(demo: Path) -> None:
    llm = LLM(demo)
    calls: list[Callable[[], object]] = [lambda: llm.rerank("a", ["b"]), lambda: llm.infill("a", "b")]
    for call in calls:
        with pytest.raises(UserError) as error:
            call()
        assert error.value.code == "feature_unsupported"
