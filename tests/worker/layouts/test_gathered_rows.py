"""Gathering rows of ranks with unequal numbers of them, and the gradients that come back."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support.collectives.late_groups import late_groups
from torch import Tensor

from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.gathered_rows import UNKNOWN, RowGathers, Share
from shoal_proto.errors import InvalidSpec

SIZES = (2, 0, 1)
"""Samples by rank; a rank without samples has one row all the same."""
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.bool),
]


WAYS = [True, False]
"""True: messages from rank to rank. False: a collective, as for rows on a GPU."""


def gathers_of(
    rank: int, sizes: tuple[int, ...] = SIZES, *, by_messages: bool = True
) -> RowGathers:
    names = [f"m{each}" for each in range(dist.get_world_size())]
    share = Share(index=rank, num_samples=sizes[rank])
    assert dist.group.WORLD is not None
    return RowGathers(
        *(dist.group.WORLD, names, share, 7, lambda _: nullcontext()),
        by_messages=by_messages,
    )


def rows_of(rank: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(max(SIZES[rank], 1), 2, 3, generator=torch.Generator().manual_seed(rank))
    return (drawn * 8).to(dtype)


def gathered(dtype: torch.dtype, by_messages: bool = True) -> None:
    rank = dist.get_rank()
    gathers = gathers_of(rank, by_messages=by_messages)
    # Memory in another order than the shape says.
    own = rows_of(rank, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    trains = dtype.is_floating_point or dtype.is_complex
    own.requires_grad_(trains)
    every = gathers.gather(own)
    expected = torch.cat([rows_of(each, dtype)[: SIZES[each]] for each in range(3)])
    assert every.dtype == dtype
    assert torch.equal(every, expected)
    if trains:
        asked = [torch.arange(18).reshape(3, 2, 3).to(dtype) * (each + 1) for each in range(3)]
        every.backward(asked[rank])  # type: ignore[no-untyped-call]
        first = sum(SIZES[:rank])
        assert own.grad is not None
        assert own.grad.dtype == dtype
        wanted = sum(each[first : first + SIZES[rank]] for each in asked)
        assert torch.equal(own.grad[: SIZES[rank]], wanted)  # type: ignore[arg-type]
        assert not own.grad[SIZES[rank] :].any()
    gathers.close()


@pytest.mark.parametrize("by_messages", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_in_order_and_gradients_are_summed(dtype: torch.dtype, by_messages: bool) -> None:
    run_in_memory(gathered, 3, dtype, by_messages)


def halves(by_messages: bool) -> None:
    own = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    every = gathers_of(dist.get_rank(), (1, 1, 1), by_messages=by_messages).gather(own)
    asked = (256.0, 1.0, 1.0)[dist.get_rank()]
    (every * asked).sum().backward()
    assert own.grad is not None
    assert float(own.grad) == 258.0


@pytest.mark.parametrize("by_messages", WAYS)
def test_gradients_in_bfloat16_are_rounded_once(by_messages: bool) -> None:
    """The sum 256 + 1 is 256 in bfloat16, and 256 + 2 is 258."""
    run_in_memory(halves, 3, by_messages)


Tensors = Callable[[int], Tensor]
REFUSED: dict[str, tuple[Tensors, str]] = {
    "shape": (lambda rank: torch.ones(1, 2 + rank % 2), r"different rows.*m0.*\(2,\).*m1.*\(3,\)"),
    "dtype": (
        lambda rank: torch.ones(1, 2, dtype=(torch.float32, torch.float16)[rank % 2]),
        "different rows.*float32.*float16",
    ),
    "gradients": (
        lambda rank: torch.ones(1, 2, requires_grad=rank == 1),
        "different rows.*without gradients.*with gradients",
    ),
    "rows": (
        lambda rank: torch.ones(1 + rank, 2),
        "more or fewer rows than.*m1: 2 rows for 1 samples",
    ),
}


def refused(make: Tensors, words: str, sizes: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    with pytest.raises(InvalidSpec, match=words):
        gathers_of(rank, sizes).gather(make(rank))


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_do_not_fit_together_are_refused_on_all_ranks(what: str) -> None:
    run_in_memory(refused, 2, *REFUSED[what], (1, 1))


def test_unequal_rows_of_batches_of_the_scripts_own_are_refused() -> None:
    """Members' losses have equal weights there, whatever their numbers of rows."""
    words = "unequal numbers of rows.*m0: 1 rows, each.*m1: 2 rows"
    run_in_memory(refused, 2, lambda rank: torch.ones(1 + rank, 2), words, (UNKNOWN, UNKNOWN))


@pytest.mark.parametrize("value", [1.0, torch.ones(()), torch.eye(2).to_sparse()], ids=str)
def test_values_without_rows_are_refused(value: Tensor) -> None:
    def alone() -> None:
        with pytest.raises(InvalidSpec, match="something without rows"):
            gathers_of(0).gather(value)

    run_in_memory(alone, 1)


def behind_its_step() -> None:
    gathers = gathers_of(dist.get_rank(), (1, 1))
    every = gathers.gather(torch.ones(1, 2, requires_grad=True))
    gathers.close()
    with pytest.raises(InvalidSpec, match="after the step"):
        every.sum().backward()


def test_a_backward_pass_after_the_step_is_refused() -> None:
    run_in_memory(behind_its_step, 2)


def by_torch(same: bool) -> None:
    rank = dist.get_rank()
    own = torch.ones(1 if same else 1 + rank)
    outputs = [torch.empty_like(own) for _ in range(2)]
    gathers = gathers_of(rank, (1, 2))
    if same:
        gathers.check_own(outputs, own)
        return
    with pytest.raises(InvalidSpec, match=r"m0: .*\(1,\).*m1: .*\(2,\).*session.gather"):
        gathers.check_own(outputs, own)


@pytest.mark.parametrize("same", [True, False])
def test_torchs_own_gathering_is_refused_if_sizes_differ(same: bool) -> None:
    """A script that pads its tensors is not refused."""
    run_in_memory(by_torch, 2, same)


def test_gathering_waits_for_rows_whose_messages_seem_done_earlier() -> None:
    """NCCL's messages seem done before their data have arrived. No two ranks wait for each other to
    receive."""
    with late_groups():
        run_in_memory(gathered, 3, torch.float32, timeout_s=10.0)
