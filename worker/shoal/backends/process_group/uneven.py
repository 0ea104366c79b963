"""Collectives over parts of different sizes, on every backend, without padding.

Gloo refuses lists of different sizes for all-gather and all-to-all. Its all-to-all of one tensor
with split sizes accepts them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_proto.errors import ShapeMismatch


def all_gather_uneven(
    outputs: Sequence[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `outputs[rank]` with that rank's tensor. All ranks must pass outputs of the same sizes.

    Raises ShapeMismatch if this rank's own output does not have its tensor's size.
    """
    own_output = outputs[dist.get_rank(group)]
    if own_output.numel() != tensor.numel():
        raise ShapeMismatch(
            "a rank's output does not have the size of its tensor",
            seen=f"{own_output.numel()} elements",
            expected=f"{tensor.numel()} elements",
        )
    all_to_all_uneven(outputs, [tensor] * len(outputs), group)


def all_to_all_uneven(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fill `outputs[rank]` with that rank's `inputs[own rank]`."""
    sent = torch.cat([part.reshape(-1) for part in inputs])
    sizes = [part.numel() for part in outputs]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in inputs], group=group)
    with torch.no_grad():
        for output, part in zip(outputs, torch.split(received, sizes), strict=True):
            output.copy_(part.view(output.shape))


def reduce_scatter_uneven(
    output: Tensor,
    tensor: Tensor,
    sizes: Sequence[int],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `output` with this rank's part of the tensor reduced over all ranks.

    `sizes`: numbers of elements of the ranks' parts; they may differ, and may be 0. Raises
    ShapeMismatch if `sizes` do not add up, or if the output has another size than this rank's part.
    """
    rank, flat = dist.get_rank(group), tensor.reshape(-1)
    if sum(sizes) != flat.numel() or output.numel() != sizes[rank]:
        raise ShapeMismatch(
            "the parts of a reduce-scatter do not fit",
            seen=f"{flat.numel()} elements, an output of {output.numel()} on rank {rank}",
            expected=f"{sum(sizes)} elements, an output of {sizes[rank]}",
        )
    pieces = [piece.contiguous() for piece in torch.split(flat, list(sizes))]
    dist.reduce_scatter(output.view(-1), pieces, op=op, group=group)
