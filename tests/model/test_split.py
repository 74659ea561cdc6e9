"""Who keeps what: every row and column of every linear once, and what cannot be shared refused with what would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attar.formats.scheme import Scheme
from attar.model.config import Experts, ModelConfig, Names
from attar.model.shapes import shape
from attar.model.split import Cut, Share, Split, split, stage_layers
from attar.plan.costs import Matrix, matrices
from tests.errors import user_error

LLAMA = shape("llama-3.2-1b")  # 32 heads of 64 that share 8 key-value heads; 16 layers; tied
FUSED = replace(LLAMA, names=Names(qkv=("qkv",), gate_up=("gate_up",)))
MIXTURE = replace(LLAMA, experts=Experts(3, 2, 512, True, 256), sparse=(True,) * 8 + (False,) * 8)


def parts(config: ModelConfig, tp: int, pp: int = 1, scheme: str | None = None) -> list[Split]:
    stored = None if scheme is None else Scheme.parse(scheme)
    schemes = {each.name: stored if each.compressible else None for each in matrices(config)}
    return [split(config, share, schemes) for share in Share(0, tp, pp).every()]


def kept(each: Matrix, cut: Cut | None) -> set[tuple[str, int]]:
    if cut is None:
        return {("row", i) for i in range(each.rows)}
    if cut.columns is not None:
        return {("column", i) for i in range(*cut.columns)}
    return {("row", i) for start, stop in cut.rows or () for i in range(start, stop)}


@pytest.mark.parametrize("config", [LLAMA, FUSED, MIXTURE], ids=["llama", "fused", "mixture"])
@pytest.mark.parametrize("tp, pp", [(2, 1), (8, 1), (1, 3), (2, 2)])
def test_everything_is_kept_once(config: ModelConfig, tp: int, pp: int) -> None:
    found = parts(config, tp, pp)
    assert [layer for part in found[::tp] for layer in part.layers] == list(range(config.layers))
    for each in matrices(config):
        layer = None if each.part == "head" else int(each.name.split(".")[2])
        having = [part for part in found if (layer in part.layers if layer is not None else part.vocabulary)]
        sets = [kept(each, part.cuts.get(each.name)) for part in having]
        whole = {("column", i) for i in range(each.columns)} if ("column", 0) in sets[0] else kept(each, None)
        assert set.union(*sets) == whole
        once = sum(map(len, sets)) == len(whole)
        alike = all(part.cuts.get(each.name) is None for part in having)  # routers, and what one process has alone
        assert once or alike, each.name
        assert sum(part.cuts.get(each.name, Cut()).bias for part in having if ("column", 0) in sets[0]) in (0, 1)


def test_a_part_is_a_model_of_fewer_heads_and_layers() -> None:
    part = parts(LLAMA, 4, 2)[5]  # the second of the second stage
    own = part.own
    assert (own.heads, own.kv_heads, own.head_dim, own.intermediate, own.layers) == (8, 2, 64, 2048, 8)
    assert (own.vocab_size, own.context, own.scale) == (LLAMA.vocab_size, LLAMA.context, LLAMA.scale)
    assert part.vocabulary is None


def test_heads_stay_with_the_key_value_head_that_they_read() -> None:
    for part in parts(LLAMA, 16):
        at = "model.layers.0.self_attn."
        ((first, last),) = part.cuts[at + "q_proj"].rows or ()
        ((start, _),) = part.cuts[at + "k_proj"].rows or ()
        assert part.own.kv_heads == 1
        assert {row // 64 * LLAMA.kv_heads // LLAMA.heads for row in range(first, last)} == {start // 64}
        assert part.cuts[at + "v_proj"] == part.cuts[at + "k_proj"]


def test_longer_stages_come_first() -> None:
    assert [len(stage_layers(16, share)) for share in Share(0, 1, 3).every()] == [6, 5, 5]


@pytest.mark.parametrize(
    "tp, pp, scheme, sentence",
    [
        (3, 1, None, "parallel_indivisible"),
        (1, 17, None, "parallel_indivisible"),
        (0, 1, None, "option_out_of_range"),
        (32, 1, "w4g128", "parallel_indivisible"),
        (2, 1, "nf4", "parallel_unsupported"),
        (2, 1, "lut4-s45", "parallel_unsupported"),
    ],
)
def test_what_cannot_be_shared_is_refused(tp: int, pp: int, scheme: str | None, sentence: str) -> None:
    with user_error(sentence):
        parts(LLAMA, tp, pp, scheme)


def test_stages_need_nothing_of_a_scheme() -> None:
    assert not any(part.cuts for part in parts(LLAMA, 1, 4, "nf4"))


def test_key_value_heads_and_widths_that_do_not_divide() -> None:
    with user_error("parallel_indivisible"):
        parts(replace(LLAMA, heads=24, kv_heads=12), 8)
    with user_error("parallel_indivisible"):
        parts(replace(LLAMA, intermediate=8191), 2)
    with user_error("parallel_indivisible"):
        parts(replace(LLAMA, vocab_size=16), 2)
