"""The reference of rotation and attention against naive formulas in float64, and of pages against plain tensors."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from attar.kernels import ops, ref_attention
from attar.kernels.operands import AttentionForm
from attar.kernels.ref_spans import spans_of
from attar.kv import eight_bits
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.kv.schemes import scheme
from tests.errors import user_error

FLOAT32 = 2e-6  # of values around 1, sums of a few hundred terms
GRADIENT = 4 * FLOAT32  # through a softmax and two products
BFLOAT16 = 2**-7  # two roundings to 8 bits
INT8 = 1 / 254  # of a head's largest: half a code
FP8 = 2**-4  # of the number: half a step of three bits of fraction


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor, tolerance: float = FLOAT32) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected.double()).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


# rope


@pytest.mark.parametrize("turned", [8, 6, 2])
def test_rope(turned: int) -> None:
    x, angle = randn(4, 3, 8), randn(4, turned // 2, seed=1) * 5
    expected = x.double().clone()
    for n in range(4):
        for h in range(3):
            for i in range(turned // 2):
                first, second = x[n, h, i].double(), x[n, h, i + turned // 2].double()
                c, s = math.cos(angle[n, i]), math.sin(angle[n, i])
                expected[n, h, i] = first * c - second * s
                expected[n, h, i + turned // 2] = second * c + first * s
    close(ops.rope(x, angle.cos(), angle.sin()), expected)


# attention


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, key_at: Tensor, form: AttentionForm, images: list[range] | None = None
) -> Tensor:
    """One sequence: q [T, H, D], k and v [S, G, D]. Positions of an image see each other."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        distance = at[t] - key_at
        sees = [s for s, d in enumerate(distance.tolist()) if d >= 0 and (form.window is None or d < form.window)]
        for image in images or []:
            sees = sorted({*sees, *image}) if int(at[t]) in image else sees
        for h in range(form.heads):
            g = h * form.kv_heads // form.heads
            scores = torch.stack([q[t, h].double() @ k[s, g].double() * form.scale for s in sees])
            if form.soft_cap is not None:
                scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
            weights = (scores - scores.max()).exp()
            out[t, h] = (weights / weights.sum()) @ v[sees, g].double()
    return out.flatten(1)


FORMS = [
    AttentionForm(4, 4, 8, 8**-0.5),
    AttentionForm(4, 2, 8, 0.7),
    AttentionForm(4, 1, 8, 0.7, soft_cap=1.5),
    AttentionForm(4, 2, 8, 0.7, window=3),
    AttentionForm(4, 2, 8, 0.7, window=1),
    AttentionForm(4, 2, 8, 0.7, window=100),
    AttentionForm(6, 2, 8, 0.7, window=4, soft_cap=1.5),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [2, 512])
def test_attention(form: AttentionForm, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole prompt, the rest of one, one token, a sequence that sits out, and keys with gaps and out of order."""
    monkeypatch.setattr(ref_attention, "QUERY_TILE", tile)
    spans = [(0, 7, 7), (4, 9, 9), (11, 12, 12), (3, 3, 3)]
    at = [torch.arange(first, end) for first, end, _ in spans] + [torch.tensor([6, 9])]
    key_at = [torch.arange(keys) for *_, keys in spans] + [torch.tensor([9, 0, 6, 2])]
    q = [randn(len(a), form.heads, 8, seed=i) * 2 for i, a in enumerate(at)]
    k, v = ([randn(len(a), form.kv_heads, 8, seed=s + i) for i, a in enumerate(key_at)] for s in (10, 20))
    ours = ops.attention(torch.cat(q), k, v, at, key_at, form)
    close(ours, torch.cat([naive_attention(*one, form) for one in zip(q, k, v, at, key_at, strict=True)]))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_image_see_each_other(form: AttentionForm) -> None:
    """Sequences of equal and of different lengths, an image at the front, and gradients."""
    images = [[range(2, 7)], [range(2), range(4, 9)], []]
    for lengths in ((9, 9, 9), (9, 11, 4)):
        at = [torch.arange(length) for length in lengths]
        q, k, v = (
            [randn(length, heads, 8, seed=seed + i).requires_grad_() for i, length in enumerate(lengths)]
            for seed, heads in ((0, form.heads), (10, form.kv_heads), (20, form.kv_heads))
        )
        pairs = zip(lengths, images, strict=True)
        spans = torch.cat([spans_of([(each.start, each.stop) for each in own], 0, n) for n, own in pairs])
        keys, values = (torch.stack(each) if len(set(lengths)) == 1 else each for each in (k, v))
        found = ops.attention(torch.cat(q), keys, values, at, at, form, spans)
        each = zip(q, k, v, at, at, [form] * 3, images, strict=True)
        wanted = torch.cat([naive_attention(*one) for one in each])
        close(found.detach(), wanted.detach())
        weights, leaves = randn(*found.shape, seed=7), [*q, *k, *v]
        ours, theirs = (torch.autograd.grad((out * weights).sum(), leaves) for out in (found, wanted))
        for one, other in zip(ours, theirs, strict=True):
            close(one, other, GRADIENT)


@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_sequence_does_not_depend_on_its_neighbours(form: AttentionForm) -> None:
    at = [torch.arange(5), torch.arange(8)]
    q = [randn(len(a), form.heads, 8, seed=i) for i, a in enumerate(at)]
    k, v = ([randn(len(a), form.kv_heads, 8, seed=s + i) for i, a in enumerate(at)] for s in (10, 20))
    together = ops.attention(torch.cat(q), k, v, at, at, form).split([5, 8])
    for i, rows in enumerate(together):
        assert torch.equal(rows, ops.attention(q[i], k[i : i + 1], v[i : i + 1], at[i : i + 1], at[i : i + 1], form))


@pytest.mark.parametrize("form", FORMS)
def test_attention_in_bfloat16(form: AttentionForm) -> None:
    at = torch.arange(9)
    q, k, v = (randn(9, heads, 8, seed=heads).bfloat16() for heads in (form.heads, form.kv_heads, form.kv_heads))
    ours = ops.attention(q, [k], [v], [at], [at], form)
    assert ours.dtype == torch.bfloat16
    close(ours, naive_attention(q, k, v, at, at, form), BFLOAT16)


MEMORY = """
import torch
from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:  # getrusage begins with what the parent had
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
n, form = {n}, AttentionForm(1, 1, 8, 1.0{window})
q, k, v = (torch.randn(n, 1, 8) for _ in range(3))
at = torch.arange(n)
ref_attention.attention(q[:64], [k[:64]], [v[:64]], [at[:64]], [at[:64]], form)
before = peak()
with torch.inference_mode():
    ref_attention.attention(q, [k], [v], [at], [at], form)
print(peak() - before)
"""


@pytest.mark.parametrize("window", ["", ", window=64"])
def test_attention_never_holds_a_square(window: str) -> None:
    """Of 4096 x 4096 the distances would be 128 MiB and the scores 64 MiB; what grows with the keys is some 50."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the peak of a process's memory is read from /proc")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(n=4096, window=window)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) << 10 < 80 << 20


def test_causality() -> None:
    """Later keys and values change nothing earlier."""
    form, at = AttentionForm(4, 2, 8, 0.7), torch.arange(10)
    q, k, v = randn(10, 4, 8), randn(10, 2, 8, seed=1), randn(10, 2, 8, seed=2)
    k2, v2 = k.clone(), v.clone()
    k2[6:], v2[6:] = 50.0, -50.0
    a, b = (ops.attention(q, [keys], [values], [at], [at], form) for keys, values in ((k, v), (k2, v2)))
    assert torch.equal(a[:6], b[:6])
    assert not torch.allclose(a[6:], b[6:])


# pages


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("size", [8, 33, 64])
def test_what_is_written_to_pages_is_read_back(kv: str, size: int) -> None:
    pages = PagedKV.zeros(5, 32, 3, size, scheme(kv))
    k, v = randn(50, 3, size, seed=1), randn(50, 3, size, seed=2)
    table = torch.tensor([3, 1])
    at = torch.arange(50)
    ref_attention.write_pages(k, v, pages, table[at // 32] * 32 + at % 32)
    for ours, stored in zip(ref_attention.read_pages(pages, table, torch.float32), (k, v), strict=True):
        assert ours.shape == (64, 3, size)
        assert not ours[50:].any()
        if kv == "int8":
            assert ((ours[:50] - stored).abs() <= (INT8 + 1e-6) * stored.abs().amax(-1, keepdim=True)).all()
        elif kv == "fp8":
            assert ((ours[:50] - stored).abs() <= FP8 * stored.abs() + 1e-5).all()
        else:
            assert torch.equal(ours[:50], stored.to(getattr(torch, kv)).float())
    several = ref_attention.read_pages(pages, torch.tensor([[3, 1], [0, 3]]), torch.float32)
    assert torch.equal(several[0][0], ref_attention.read_pages(pages, table, torch.float32)[0])
    assert torch.equal(several[1][1, 32:], several[1][0, :32])
    untouched = [0, 2, 4]
    assert not pages.keys[untouched].any()
    assert not pages.values[untouched].any()


def test_a_head_that_is_not_finite_shows() -> None:
    x = torch.tensor([[1.0, -2.0], [math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0]])
    codes, scale = eight_bits.quantize_head(x)
    assert codes[0].tolist() == [64, -127]
    assert scale.isnan().tolist() == [False, True, True, False]
    assert codes[3].tolist() == [0, 0]


@pytest.mark.parametrize("block", [0, 8, 24])
def test_blocks_are_whole_runs(block: int) -> None:
    with pytest.raises(ValueError, match="a multiple of 16 slots"):
        PagedKV.zeros(2, block, 1, 8, scheme("float32"))
    with user_error("kv_unknown"):
        scheme("float16")


def test_pages_with_a_tree_of_guesses() -> None:
    """Three rows after five slots, two of them children of the first: these do not see each other."""
    form = AttentionForm(4, 2, 8, 0.7, window=6)
    pages = PagedKV.zeros(1, 16, 2, 8, scheme("float32"))
    k, v, q = randn(8, 2, 8, seed=1), randn(8, 2, 8, seed=2), randn(3, 4, 8, seed=3)
    ref_attention.write_pages(k, v, pages, torch.arange(8))
    at = torch.tensor([5, 6, 6], dtype=torch.int32)
    place = AttentionMetadata(
        torch.tensor([0, 3]), torch.tensor([8]), torch.tensor([[0]]), at, torch.arange(5, 8),
        tree=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).flatten(),
    )  # fmt: skip
    ours, mass = ref_attention.paged_attention(q, pages, place, form, want_mass=True)
    for row, seen in enumerate([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]):
        key_at = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])[seen]
        close(ours[row, None], naive_attention(q[row, None], k[seen], v[seen], at[row, None], key_at, form))
    assert mass is not None
    close(mass.sum(-1), torch.full((1, 2), 6.0))  # three rows times two heads a group


def test_keys_that_are_rotated_when_read_are_taken_for_no_others() -> None:
    pages = PagedKV.zeros(1, 16, 2, 8, scheme("float32"))
    pages.keys_rotated = False
    at = torch.zeros(1, dtype=torch.int32)
    place = AttentionMetadata(torch.tensor([0, 1]).int(), torch.ones(1).int(), torch.zeros(1, 1).int(), at, at.long())
    q, k, v = randn(1, 4, 8), randn(1, 2, 8), randn(1, 2, 8)
    with pytest.raises(AssertionError, match="written as they are"):
        ops.write_kv(q, k, v, pages, place)
    with pytest.raises(AssertionError, match="as it reads them"):
        ops.paged_attention(q, pages, place, AttentionForm(4, 2, 8, 1.0))
