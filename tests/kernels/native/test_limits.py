"""What a machine can do at best. Speeds are not asserted: that the loops do the work they claim is."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from attar import _native
from attar.kernels.native import extension, limits

LEVELS = _native.levels()
at_every_level = pytest.mark.parametrize("level", LEVELS)


@at_every_level
def test_every_byte_is_read_on_any_number_of_threads(level: str) -> None:
    arena, size = _native.Arena(), 5 * 4096
    memory = arena.allocate(size)
    bytes_of = (ctypes.c_uint8 * size).from_address(memory)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert _native.read_all(arena, memory, size, level) == 0
            for at in (0, 255, 4096, 3 * 4096 + 77, size - 1):
                bytes_of[at] = 1
                assert _native.read_all(arena, memory, size, level) != 0, (threads, at)
                bytes_of[at] = 0
    finally:
        torch.set_num_threads(before)


@at_every_level
def test_work_is_counted_by_rounds_and_threads(level: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _native.multiply_int8(1000, False, level)
        assert one == 1000 * _native.multiply_int8(1, False, level) > 0
        torch.set_num_threads(2)
        assert _native.multiply_int8(1000, False, level) == 2 * one
    finally:
        torch.set_num_threads(before)


def test_impossible_work_is_refused() -> None:
    arena = _native.Arena()
    for size in (-4096, 4095, 1):
        with pytest.raises(ValueError, match="whole pages"):
            _native.read_all(arena, 0, size, "portable")
    for rounds in (-1, 1 << 41):
        with pytest.raises(ValueError, match="impossible number of rounds"):
            _native.multiply_int8(rounds, False, "portable")
    with pytest.raises(ValueError, match="tiles take the amx level"):
        _native.multiply_int8(1, True, "portable")


def test_limits_are_measured_of_the_level_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ", 1 << 20)
    for level in LEVELS:
        monkeypatch.setattr(extension, "cpu_level", lambda level=level: level)
        found = limits.measure()
        assert found.read_gb_s > 0
        assert found.int8_gops > 0
        assert (found.tile_gops is not None) == (level == "amx")


def test_memory_of_an_arena_is_zero_aligned_and_never_shared() -> None:
    arena = _native.Arena()
    pieces = [(arena.allocate(size), size) for size in (1, 63, 64, 65, 4096, 40 << 20, 1)]
    for at, size in pieces:
        assert at % 64 == 0
        assert not any(ctypes.string_at(at, min(size, 4096)))
    ends = sorted((at, at + size) for at, size in pieces)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert arena.bytes == sum(-(-size // 64) * 64 for _, size in pieces)
    for size in (-1, 1 << 50):
        with pytest.raises(MemoryError):
            arena.allocate(size)
