"""Differences of two versions: exact for all bit patterns, and small if little has changed."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal_difference import codec
from shoal_proto.errors import MalformedMessage

Shorts = npt.NDArray[np.uint16]


def encoded(base: bytes, target: bytes, *elements: tuple[int, int]) -> bytes:
    return b"".join(codec.encode(base, target, elements or [(2, len(base))]))


def applied(base: bytes, difference: bytes) -> bytes:
    into = bytearray(len(base))
    codec.apply(base, difference, memoryview(into))
    return bytes(into)


def adam_step(num: int, rate: float) -> tuple[Shorts, Shorts]:
    """Weights in bf16 before and after an update of about `rate` each of float32 master weights."""
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(num, np.float32) * np.float32(0.028)
    update = np.clip(draw.standard_normal(num, np.float32), -3, 3) * np.float32(rate)
    return bf16(weights), bf16(weights + update)


def bf16(values: npt.NDArray[np.float32]) -> Shorts:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("size", codec.SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_all_bit_patterns_are_restored(size: int, seed: int) -> None:
    """NaN, infinities and both zeros are included."""
    base = np.arange(65536, dtype=np.uint16)
    target = np.random.default_rng(seed).permutation(base)
    target[::3] = base[::3]
    target[0x0000], target[0x8000] = 0x8000, 0x0000
    difference = encoded(base.tobytes(), target.tobytes(), (size, 131072))
    assert applied(base.tobytes(), difference) == target.tobytes()


@pytest.mark.parametrize("start", [0x0000, 0x7F80, 0x7FFF, 0x8000, 0xFF80, 0xFFFF])
def test_one_pattern_may_change_into_any_other(start: int) -> None:
    base = np.full(65536, start, np.uint16)
    target = np.arange(65536, dtype=np.uint16)
    difference = encoded(base.tobytes(), target.tobytes())
    assert applied(base.tobytes(), difference) == target.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 65533, 65534, 65535, 65536, 131070, 300_000])
def test_gaps_of_any_length_are_kept(gap: int) -> None:
    """Gaps follow each other, and are at the beginning and at the end."""
    base = np.zeros(3 * gap + 7, np.uint16)
    target = base.copy()
    for position in (gap, 2 * gap + 1, 3 * gap + 2, len(base) - 1):
        target[position] = 1 + position % 7
    difference = encoded(base.tobytes(), target.tobytes())
    assert applied(base.tobytes(), difference) == target.tobytes()


@given(st.binary(max_size=400), st.data())
def test_any_bytes_are_restored(base: bytes, data: st.DataObject) -> None:
    target = bytearray(base)
    for position in data.draw(st.lists(st.integers(0, max(len(base) - 1, 0)), max_size=20)):
        if base:
            target[position] = data.draw(st.integers(0, 255))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(base)), max_size=4)))
    bounds = [0, *cuts, len(base)]
    elements = [
        (data.draw(st.sampled_from(codec.SIZES)), stop - start) for start, stop in pairwise(bounds)
    ]
    difference = b"".join(codec.encode(base, target, elements))
    assert applied(base, difference) == target


def test_spans_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SPAN_BYTES", 1024)
    base, target = adam_step(10_001, 1e-5)
    difference = encoded(base.tobytes(), target.tobytes())
    assert applied(base.tobytes(), difference) == target.tobytes()


def test_unchanged_elements_take_no_space() -> None:
    base = bytes(10_000_000)
    assert len(encoded(base, base)) < 100


def test_an_update_of_few_weights_takes_half_as_much_as_xor_and_zstd() -> None:
    base, target = adam_step(4 * 1024 * 1024, 3e-7)
    assert 0.008 < np.mean(base != target) < 0.010
    difference = encoded(base.tobytes(), target.tobytes())
    xor = zstandard.ZstdCompressor(level=1).compress((base ^ target).tobytes())
    assert len(difference) <= base.nbytes / 140
    assert len(difference) <= 0.55 * len(xor)
    assert applied(base.tobytes(), difference) == target.tobytes()


def test_nan_payloads_and_signs_of_zeros_are_kept() -> None:
    base = np.array([0x7FC0, 0x7FC1, 0xFFC0, 0x0000, 0x8000, 0x7F80], np.uint16)
    target = np.array([0x7FC1, 0xFFC0, 0x7F81, 0x8000, 0x0000, 0xFF80], np.uint16)
    difference = encoded(base.tobytes(), target.tobytes())
    assert applied(base.tobytes(), difference) == target.tobytes()


def test_a_length_that_is_no_multiple_of_the_element_is_refused() -> None:
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        encoded(bytes(6), bytes(6), (2, 4))


BASE, TARGET = (each.tobytes() for each in adam_step(50_000, 1e-5))
DIFFERENCE = encoded(BASE, TARGET)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"x" + whole[1:],
        lambda whole: whole[:-1],
        lambda whole: whole + whole[8:],
        lambda whole: whole[: len(whole) // 2],
    ],
    ids=["nothing", "beginning", "cut", "twice", "half"],
)
def test_an_invalid_difference_is_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(MalformedMessage, match="not a difference"):
        applied(BASE, damage(DIFFERENCE))


def test_a_difference_of_another_size_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="not a difference"):
        applied(BASE[:-2], DIFFERENCE)


@given(st.integers(0, len(DIFFERENCE) - 1), st.integers(1, 255))
def test_a_damaged_difference_gives_only_bytes_or_a_refusal(position: int, change: int) -> None:
    """The caller compares digests of the result; it must not get another exception, or crash."""
    damaged = bytearray(DIFFERENCE)
    damaged[position] ^= change
    with suppress(MalformedMessage):
        assert len(applied(BASE, bytes(damaged))) == len(BASE)
