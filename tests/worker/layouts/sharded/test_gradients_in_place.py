"""Gradients that ranks cannot share evenly: laid out for a sum as torch does, but without
padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from shoal.torch_private import fsdp

SHAPES = ((7, 3), (7,), (1, 5), (2, 2, 3), (6, 4))
LayOut = Callable[[list[Tensor], Tensor, int], None]


def laid_out(by: LayOut, world_size: int, gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    rows = [-(-each.size(0) // world_size) * each[:1].numel() for each in gradients]
    summed = torch.full((world_size * sum(rows),), float("nan"), dtype=dtype)
    by(list(gradients), summed, world_size)
    return summed


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_laid_out_as_by_torch(world_size: int, dtype: torch.dtype) -> None:
    gradients = [torch.randn(shape) for shape in SHAPES]
    gradients.append(torch.randn(4, 6).t())
    by_torch = laid_out(fsdp.lay_out_padded, world_size, gradients, dtype)
    own = laid_out(fsdp.lay_out_for_sum, world_size, gradients, dtype)
    assert torch.equal(own, by_torch)
    assert torch.isfinite(own).all(), "what fills up is zero"


def test_fully_shard_pads_no_uneven_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def pads(*_: object) -> None:
        raise AssertionError("gradients were padded")

    monkeypatch.setattr(fsdp, "lay_out_padded", pads)
    gradients = [torch.randn(shape) for shape in SHAPES]
    laid_out(_fsdp_collectives.foreach_reduce_scatter_copy_in, 3, gradients, torch.float32)
    with pytest.raises(AssertionError):
        laid_out(fsdp.lay_out_for_sum, 3, [torch.randn(6, 2)], torch.float32)
