"""Compressed pushes: the bytes have the documented format, and decode to the twin's values."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.oracles.compression_twins import read_push, to_int8, to_sign
from torch import Tensor

from shoal.compression import COMPRESSIONS, find_compression
from shoal.compression.base import Compression
from shoal.compression.low_rank import PowerSGD, low_rank_matrices
from shoal.compression.push_encoder import PushBlock
from shoal.compression.quantised import Int8, OneBit
from shoal.compression.sparse import TopK
from shoal.embedding.row_codec import RowCodec
from shoal_server.parameters.codecs.codec import new_decoder
from shoal_server.parameters.codecs.rows import decode_rows

ALL: Mapping[str, Compression] = {
    **{name: find_compression(name) for name in COMPRESSIONS},
    "top-k of many": TopK(ratio=0.3),
    "powersgd of rank 2": PowerSGD(rank=2),
    "int8 in long blocks": Int8(block=4096),
}


def blocks_of(*sizes: tuple[int, ...]) -> list[PushBlock]:
    """Blocks that are each one whole parameter."""
    shapes = [torch.Size(size) for size in sizes]
    return [
        PushBlock(parameter=f"p{i}", offset=0, num_elements=shape.numel(), shape=shape)
        for i, shape in enumerate(shapes)
    ]


BLOCKS = blocks_of((40, 30), (7,), (3, 5, 2), (64, 16))


def values_for(blocks: list[PushBlock], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(block.num_elements for block in blocks), generator=generator)


@pytest.mark.parametrize("name", ALL)
def test_server_and_twin_read_what_the_encoder_says_it_wrote(name: str) -> None:
    """Equal to the last bit: the residual is what the server did not get."""
    encoder = ALL[name].push_encoder()
    sizes = [block.num_elements for block in BLOCKS]
    for seed in range(3):
        values = values_for(BLOCKS, seed)
        made = encoder.encode(values.clone(), BLOCKS)
        data = made.data.view(torch.uint8).numpy().tobytes()
        decoder = new_decoder(made.codec, sizes, plain_bytes=1 << 30, shard_id=0)
        assert len(data) == decoder.num_bytes == made.codec.num_bytes
        assert torch.equal(decoder.decode(data), made.decoded)
        np.testing.assert_array_equal(read_push(made.codec, data, sizes), made.decoded.numpy())


@pytest.mark.parametrize(("kind", "rounding"), [(Int8, to_int8), (OneBit, to_sign)])
def test_blocks_are_rounded_as_the_twin_rounds_them(kind: type, rounding: object) -> None:
    values = values_for(blocks_of((10, 16)))
    made = kind(block=16).push_encoder().encode(values, blocks_of((10, 16)))
    expected = np.concatenate([rounding(each) for each in values.numpy().reshape(10, 16)])  # type: ignore[operator]
    np.testing.assert_allclose(made.decoded.numpy(), expected, rtol=1e-6)


def test_top_k_has_the_largest_and_no_other() -> None:
    values = values_for(BLOCKS)
    made = TopK(ratio=0.01).push_encoder().encode(values, BLOCKS)
    number = int(torch.count_nonzero(made.decoded))
    assert number == -(-len(values) // 100)
    smallest = values.abs().topk(number).values[-1]
    expected = torch.where(values.abs() >= smallest, values, 0)
    assert torch.equal(made.decoded, expected)


def test_a_matrix_of_low_rank_is_sent_without_loss() -> None:
    """The matrix of rank 4 is cut into blocks that begin and end within its rows."""
    generator = torch.Generator().manual_seed(1)
    shape = torch.Size([60, 50])
    matrix = torch.randn(60, 4, generator=generator) @ torch.randn(4, 50, generator=generator)
    cuts = [0, 1024, 2048, 3000]
    blocks = [
        PushBlock(parameter="p", offset=a, num_elements=b - a, shape=shape)
        for a, b in pairwise(cuts)
    ]
    made = PowerSGD(rank=4).push_encoder().encode(matrix.reshape(-1), blocks)
    assert [(m.lead, m.rows) for m in made.codec.low_rank] == [(0, 20), (26, 19), (2, 19)]
    assert list(made.codec.columns) == [50]
    assert made.codec.num_bytes < matrix.nbytes / 2
    torch.testing.assert_close(made.decoded, matrix.reshape(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "is_matrix"),
    [((100,), False), ((5, 5), False), ((40, 40), True), ((64, 3, 3), False)],
)
def test_only_matrices_that_become_smaller_are_factorised(
    shape: tuple[int, ...], is_matrix: bool
) -> None:
    assert bool(low_rank_matrices(blocks_of(shape), 8)) == is_matrix


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8"])
def test_rows_are_read_as_they_were_written(kind: str) -> None:
    rows_rc = values_for(blocks_of((9, 12))).view(9, 12)
    rows_rc[3] = 0
    codec = RowCodec(kind)
    data, is_held = codec.encode(rows_rc)
    assert bool(is_held.all())
    assert data.nbytes == 9 * (16 if kind == "int8" else 24)
    seen = decode_rows(codec.message, data.contiguous().numpy().tobytes(), 12)
    if kind == "int8":
        expected = np.stack([to_int8(row) for row in rows_rc.numpy()])
        np.testing.assert_allclose(seen.numpy(), expected, rtol=1e-6)
    else:
        dtype = torch.float16 if kind == "fp16" else torch.bfloat16
        assert torch.equal(seen, rows_rc.to(dtype).float())
