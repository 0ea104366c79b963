"""Codes of blocks, compared with a few lines of plain Python."""

import numpy as np
import pytest
import torch
from support.oracles.compression_twins import to_int8, to_sign
from torch import Tensor

from shoal.compression.codes import Code, Int8Code, OneBitCode
from shoal.compression.sparse import SAMPLE, largest_indices

CODES: dict[str, Code] = {"int8": Int8Code(), "one-bit": OneBitCode()}
TWINS = {"int8": to_int8, "one-bit": to_sign}


def values_of(scale: float, parts: int = 3, size: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(parts, size, generator=generator) * scale


@pytest.mark.parametrize("block", [8, 16, 48])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", CODES)
def test_a_block_decodes_to_what_the_twin_rounds_it_to(name: str, scale: float, block: int) -> None:
    """The coded block has the size that the code announces."""
    code, values = CODES[name], values_of(scale)
    coded = code.encode(values, block)
    assert coded.dtype == torch.uint8
    assert coded.shape == (3, code.num_bytes(48, block))
    expected = [TWINS[name](each) for each in values.numpy().reshape(-1, block)]
    np.testing.assert_allclose(
        code.decode(coded, block).numpy().reshape(-1, block), np.stack(expected), rtol=1e-6
    )


@pytest.mark.parametrize("scale", [1.0, 1e-41, 1e-45, 3e38])
def test_int8_is_never_further_off_than_half_a_step(scale: float) -> None:
    """Holds too if the scale itself is rounded, next to zero, or cannot grow."""
    values = values_of(1.0).clamp(-1, 1) * scale
    decoded = Int8Code().decode(Int8Code().encode(values, 16), 16)
    steps = values.view(-1, 16).abs().amax(1, keepdim=True) / 127
    tiniest = 127 * torch.finfo(torch.float32).smallest_normal * 2**-23
    errors = (decoded - values).view(-1, 16).abs()
    assert bool((errors <= steps / 2 * 1.0001 + tiniest).all())


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zeros(name: str) -> None:
    zeros = torch.zeros(2, 16)
    assert torch.equal(CODES[name].decode(CODES[name].encode(zeros, 8), 8), zeros)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", CODES)
def test_a_non_finite_value_spoils_its_block_and_no_other(name: str, bad: float) -> None:
    values = values_of(1.0)
    values[1, 9] = bad
    decoded = CODES[name].decode(CODES[name].encode(values, 8), 8)
    finite = decoded.isfinite().view(3, -1, 8)
    assert not finite[1, 1].any()
    finite[1, 1] = True
    assert bool(finite.all())


def test_signs_are_packed_as_numpy_packs_them() -> None:
    """The highest bit comes first."""
    values = values_of(1.0, parts=4, size=256)
    codes = OneBitCode().encode(values, 256)[:, 4:]
    assert np.array_equal(codes.numpy(), np.packbits(values.numpy() >= 0, axis=1))


@pytest.mark.parametrize("number", [1, 7, 900, SAMPLE])
@pytest.mark.parametrize("kind", ["spread", "equal", "few", "nan"])
def test_the_largest_are_those_a_sort_finds(kind: str, number: int) -> None:
    """Holds for any content of the sample from which the threshold is guessed."""
    size = 5 * SAMPLE + 3
    magnitudes = torch.rand(size, generator=torch.Generator().manual_seed(1))
    if kind == "equal":
        magnitudes = torch.ones(size)
    elif kind == "few":
        magnitudes[10:] = 0
    elif kind == "nan":
        magnitudes[77] = float("nan")
    places = largest_indices(magnitudes, number)
    assert len(set(places.tolist())) == number
    expected = np.sort(magnitudes.numpy())[::-1][:number] if kind != "nan" else None
    if expected is None:
        assert 77 in places.tolist()
    else:
        assert np.array_equal(np.sort(magnitudes[places].numpy())[::-1], expected)
