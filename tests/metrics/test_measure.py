"""`measure` and its report: transformers' loss as the oracle, the protocol in words, and input that is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from attar.metrics.measure import SHOWN, measure
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]
LOSS = 1e-5  # relative: two implementations in float32
IDS = [(7 * i * i + 3) % 97 for i in range(50)]


class Letters:
    """A tokenizer whose token i is i % 3 + 1 bytes long; 0 is special."""

    special_ids = frozenset({0})

    def id_to_bytes(self, index: int) -> bytes:
        return b"x" * (index % 3 + 1)


def test_loss_equals_transformers(tiny_decoder: Make) -> None:
    transformers = pytest.importorskip("transformers")
    decoder = tiny_decoder(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=3,
        intermediate_size=128, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=10000.0,
    )  # fmt: skip
    peer = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": decoder.embedding.table, "lm_head.weight": decoder.embedding.table}
    state["model.norm.weight"] = decoder.final_norm.weight
    for i, block in enumerate(decoder.blocks):
        state |= {f"{linear.name}.weight": linear.weight for linear in block.linears()}  # type: ignore[dict-item]
        state[f"model.layers.{i}.input_layernorm.weight"] = block.attention_norm.weight
        state[f"model.layers.{i}.post_attention_layernorm.weight"] = block.feed_forward_norm.weight
    peer.load_state_dict(state)
    with torch.no_grad():
        loss = peer(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.item()
    report = measure(decoder, IDS)
    assert report.figures["ppl"].value == pytest.approx(math.exp(loss), rel=LOSS)
    assert report.tokens == 49


def test_report_for_machines(tiny_decoder: Make) -> None:
    base, model = tiny_decoder(0), tiny_decoder(0, scheme="w4g32")
    report = measure(model, IDS, base=base, bos=1, context=10, bytes_of=Letters())  # type: ignore[arg-type]
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert value["tokens"] == 50
    assert value["protocol"] | {"counted": 0, "intervals": 0} == {
        "context": 10, "stride": 10, "bos": 1, "windows": 5, "counted": 0, "intervals": 0,
    }  # fmt: skip
    assert value["protocol"]["counted"] == "every token once"
    size = sum(i % 3 + 1 for i in IDS if i)
    assert value["bytes"] == size
    assert value["bits_per_byte"] == pytest.approx(math.log2(value["ppl"]) * 50 / size)
    for name in set(SHOWN) - {"kl_max", "greedy"}:
        low, high = value["intervals"][name]
        assert low <= value[name] <= high
    assert 0 < value["kl_p50"] <= value["kl_p99"] <= value["kl_p999"] <= value["kl_max"]
    assert measure(model, IDS, base=base, bos=1, context=10).to_dict()["intervals"] == report.to_dict()["intervals"] | {
        "bits_per_byte": None
    }


def test_report_for_people(tiny_decoder: Make) -> None:
    text = measure(tiny_decoder(0), IDS, context=10, stride=5).table()
    assert "perplexity" in text
    assert "KL" not in text
    assert "49 tokens in 9 windows of 10, stride 5, no BOS" in text
    assert "but the first of each text, by the first window that holds it" in text


def test_sequences_are_cut_each_for_itself(tiny_decoder: Make) -> None:
    model = tiny_decoder(0)
    both = measure(model, [IDS[:20], IDS[20:30]]).measurement
    first, second = measure(model, IDS[:20]).measurement, measure(model, IDS[20:30]).measurement
    assert both.nll.tolist() == [*first.nll, *second.nll]
    assert both.window.tolist() == [0] * 19 + [1] * 9


def test_context_defaults_to_what_both_models_support(tiny_decoder: Make) -> None:
    assert measure(tiny_decoder(0, layers=1), IDS * 2).protocol.context == 64


def test_bad_input_is_named(tiny_decoder: Make) -> None:
    model = tiny_decoder(0, layers=1)
    with user_error("text_empty"):
        measure(model, [])
    with user_error("text_too_short"):
        measure(model, [4])
    with user_error("token_out_of_vocabulary"):
        measure(model, [1, 97])
    with user_error("context_exceeded"):
        measure(model, IDS, context=65)
    with user_error("vocabulary_mismatch"):
        measure(model, IDS, base=tiny_decoder(0, layers=1, vocab=90))


def test_nan_weights_are_named(tiny_decoder: Make) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    broken = tiny_decoder(0, layers=1, tensors={name: torch.full((64, 128), torch.nan)})
    with user_error("not_finite"):
        measure(broken, IDS)
