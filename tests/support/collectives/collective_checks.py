"""Guarantees of every backend, checked on each rank of an initialised world.

After each check, passed or failed, the ranks meet in a barrier, so a failure does not affect the
next check.
"""

import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from shoal.torch_private.c10d import all_gather_single, reduce_scatter_single
from shoal_proto.errors import InvalidSpec

CHECKS: dict[str, Callable[[torch.device], None]] = {}
ReduceOp = dist.ReduceOp
UNTAGGED = {
    "messages_arrive_in_the_order_sent_and_by_their_tags",
    "a_message_from_any_sender_names_its_sender",
}
"""Checks that do not apply to backends that match a message by its sender alone."""
ENDS_OLD_GLOO = "reduce_scatter_of_a_whole_that_does_not_divide_is_refused"
"""Check in which torch's own Gloo before 2.11 ends the process instead of raising."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GUARD = -77.0
IS_OLD_TORCH = TorchVersion(torch.__version__) < "2.11"


def check(body: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CHECKS[body.__name__] = body
    return body


def run_checks(device: str = "cpu") -> dict[str, str]:
    """Run the checks. Returns the traceback of each on this rank, by name; empty if it passed."""
    found = {}
    for name, body in CHECKS.items():
        if name == ENDS_OLD_GLOO and dist.get_backend() == "gloo" and IS_OLD_TORCH:
            continue
        try:
            body(torch.device(device))
            found[name] = ""
        except Exception:  # noqa: BLE001 - the test shows it
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def equal(seen: Tensor, expected: object) -> None:
    wanted = torch.as_tensor(expected, dtype=seen.dtype, device=seen.device)
    assert torch.equal(seen, wanted), f"saw {seen}, expected {wanted}"


# --- reductions ---


@check
def all_reduce_sums_averages_and_finds_the_extremes(device: torch.device) -> None:
    rank, size = place()
    values = [[r + 1, 10 * r - 5] for r in range(size)]
    first, second = zip(*values, strict=True)
    for op, reduce in (
        (ReduceOp.SUM, sum),
        (ReduceOp.MIN, min),
        (ReduceOp.MAX, max),
        (ReduceOp.AVG, lambda each: sum(each) / size),
    ):
        tensor = torch.tensor(values[rank], dtype=torch.float32, device=device)
        dist.all_reduce(tensor, op=op)
        equal(tensor, [reduce(first), reduce(second)])


@check
def all_reduce_knows_each_kind_of_number(device: torch.device) -> None:
    rank, size = place()
    for dtype in (*FLOATS, torch.int64, torch.int32, torch.uint8):
        tensor = torch.full((5,), rank + 1, dtype=dtype, device=device)
        dist.all_reduce(tensor)
        equal(tensor, [size * (size + 1) // 2] * 5)


@check
def a_sum_of_truth_values_is_true_where_any_of_them_is(device: torch.device) -> None:
    if dist.get_backend() == "gloo":
        return  # torch's Gloo refuses truth values
    rank, _ = place()
    tensor = torch.tensor([rank == 0, True, False], device=device)
    dist.all_reduce(tensor)
    assert tensor.view(torch.uint8).tolist() == [1, 1, 0], "and each is one byte, 0 or 1"


@check
def an_average_of_whole_numbers_is_refused(device: torch.device) -> None:
    if dist.get_backend() in ("gloo", "nccl"):
        return  # torch's own round or refuse it, by backend
    tensor = torch.ones(3, dtype=torch.int64, device=device)
    try:
        dist.all_reduce(tensor, op=ReduceOp.AVG)
    except (InvalidSpec, dist.DistBackendError) as error:
        assert "avg of torch.int64" in str(error)
    else:
        raise AssertionError(f"saw {tensor}")


@check
def all_reduce_of_disjoint_shards_does_not_mix_them_up(device: torch.device) -> None:
    """Fill this rank's part of a buffer of zeros; the sum keeps every rank's part unchanged."""
    rank, size = place()
    whole = torch.arange(3 * size, dtype=torch.float32, device=device) + 1
    buffer = torch.zeros_like(whole)
    own = slice(3 * rank, 3 * rank + 3)
    buffer[own] = whole[own]
    dist.all_reduce(buffer)
    equal(buffer, whole)


@check
def all_reduce_gives_every_rank_the_same_bits(device: torch.device) -> None:
    rank, size = place()
    tensor = torch.rand(1000, generator=torch.Generator().manual_seed(rank)).to(device)
    dist.all_reduce(tensor)
    copies = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(copies, tensor)
    assert all(torch.equal(copy, tensor) for copy in copies)


@check
def a_reduction_without_waiting_is_complete_once_it_is_waited_for(device: torch.device) -> None:
    rank, size = place()
    tensors = [torch.full((4,), float(rank + i), device=device) for i in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        equal(tensor, [float(size * i + size * (size - 1) // 2)] * 4)


@check
def reduce_leaves_the_result_on_the_root(device: torch.device) -> None:
    rank, size = place()
    for root in range(size):
        tensor = torch.full((2,), float(rank + 1), device=device)
        dist.reduce(tensor, dst=root)
        if rank == root:
            equal(tensor, [size * (size + 1) / 2] * 2)


# --- gathering ---


@check
def all_gather_gives_every_rank_all_parts_in_the_order_of_ranks(device: torch.device) -> None:
    rank, size = place()
    own = torch.tensor([[float(rank), float(-rank)]], device=device)
    parts = [torch.empty(1, 2, device=device) for _ in range(size)]
    dist.all_gather(parts, own)
    whole = torch.empty(size, 2, device=device)
    all_gather_single(whole, own)
    for r, part in enumerate(parts):
        equal(part, [[float(r), float(-r)]])
    equal(whole, [[float(r), float(-r)] for r in range(size)])


@check
def all_gather_in_place_keeps_the_parts_of_others(device: torch.device) -> None:
    """Gather with an input that is a part of the output, as `fully_shard` does."""
    rank, size = place()
    whole = torch.full((2 * size,), GUARD, device=device)
    own = whole[2 * rank : 2 * rank + 2]
    own.fill_(float(rank))
    all_gather_single(whole, own)
    equal(whole, [float(i // 2) for i in range(2 * size)])


@check
def gather_and_scatter_are_each_others_inverse(device: torch.device) -> None:
    rank, size = place()
    root = size - 1
    own = torch.tensor([float(rank), 2.0], device=device)
    parts = [torch.empty(2, device=device) for _ in range(size)] if rank == root else None
    dist.gather(own, parts, dst=root)
    back = torch.empty(2, device=device)
    dist.scatter(back, parts, src=root)
    equal(back, [float(rank), 2.0])
    if parts is not None:
        for r, part in enumerate(parts):
            equal(part, [float(r), 2.0])


@check
def objects_reach_every_rank(device: torch.device) -> None:
    rank, size = place()
    seen: list[object] = [None] * size
    dist.all_gather_object(seen, {"rank": rank, "text": "x" * (10 * rank)})
    values: list[object] = [("from", rank)] if rank == 1 else [None]
    dist.broadcast_object_list(values, src=1)
    assert seen == [{"rank": r, "text": "x" * (10 * r)} for r in range(size)]
    assert values == [("from", 1)]


# --- scattering ---


@check
def reduce_scatter_leaves_each_rank_its_part_of_the_sum(device: torch.device) -> None:
    rank, size = place()
    for op, factor in ((ReduceOp.SUM, size * (size + 1) / 2), (ReduceOp.AVG, (size + 1) / 2)):
        whole = (rank + 1) * torch.arange(1.0, 2 * size + 1, device=device)
        single, listed = torch.empty(2, device=device), torch.empty(2, device=device)
        reduce_scatter_single(single, whole, op=op)
        dist.reduce_scatter(listed, list(whole.split(2)), op=op)
        expected = [(2 * rank + 1) * factor, (2 * rank + 2) * factor]
        equal(single, expected)
        equal(listed, expected)


@check
def reduce_scatter_of_sizes_that_do_not_divide_scatters_no_padding(device: torch.device) -> None:
    """Sizes with a remainder, and an empty part; memory beside an output stays unchanged."""
    rank, size = place()
    even = [2 + (r < 1) for r in range(size)]
    for sizes in (even, [0, *range(1, size)]):
        total, start = sum(sizes), sum(sizes[:rank])
        whole = (rank + 1) * torch.arange(1.0, total + 1, device=device)
        buffer = torch.full((sizes[rank] + 2,), GUARD, device=device)
        dist.reduce_scatter(buffer[1:-1], list(whole.split(sizes)))
        factor = size * (size + 1) / 2
        parts = [factor * (start + i + 1) for i in range(sizes[rank])]
        equal(buffer, [GUARD, *parts, GUARD])


@check
def reduce_scatter_of_a_whole_that_does_not_divide_is_refused(device: torch.device) -> None:
    """Raise on every rank without a message, so that the group still works afterwards."""
    _, size = place()
    output = torch.full((2,), GUARD, device=device)
    refused = False
    try:
        reduce_scatter_single(output, torch.ones(2 * size + 1, device=device))
    except Exception:  # noqa: BLE001 - each backend has a class of its own
        refused = True
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    assert refused
    equal(output, [GUARD, GUARD])
    equal(tensor, [size])


@check
def all_to_all_sends_each_rank_the_parts_for_it(device: torch.device) -> None:
    rank, size = place()
    given = torch.tensor([[rank, r] for r in range(size)], device=device)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    equal(taken, [[r, rank] for r in range(size)])


@check
def all_to_all_takes_parts_of_different_sizes(device: torch.device) -> None:
    """Send r + s elements from rank r to rank s, so none from rank 0 to itself."""
    rank, size = place()
    given_sizes, taken_sizes = [rank + s for s in range(size)], [r + rank for r in range(size)]
    given = torch.tensor([10.0 * rank + s for s in range(size)], device=device)
    taken = torch.full((sum(taken_sizes),), GUARD, device=device)
    sent = given.repeat_interleave(torch.tensor(given_sizes, device=device))
    dist.all_to_all_single(taken, sent, taken_sizes, given_sizes)
    equal(taken, [10.0 * r + rank for r in range(size) for _ in range(r + rank)])


# --- one to all, and all at once ---


@check
def broadcast_reaches_every_rank_from_any_root(device: torch.device) -> None:
    rank, size = place()
    for root in range(size):
        for dtype in (*FLOATS, torch.bool):
            tensor = torch.full((3,), rank == root, device=device).to(dtype)
            dist.broadcast(tensor, src=root)
            equal(tensor, [1, 1, 1])


@check
def no_rank_passes_a_barrier_before_all_have_reached_it(device: torch.device) -> None:
    _, size = place()
    came_s = time.monotonic()
    dist.barrier()
    passed_s = time.monotonic()
    times: list[tuple[float, float]] = [(0.0, 0.0)] * size
    dist.all_gather_object(times, (came_s, passed_s))
    assert max(came for came, _ in times) <= min(passed for _, passed in times)


# --- messages ---


@check
def a_message_passes_around_the_ring(device: torch.device) -> None:
    rank, size = place()
    tensor = torch.zeros(3, device=device)
    if rank == 0:
        dist.send(tensor + 1, 1)
        dist.recv(tensor, size - 1)
    else:
        dist.recv(tensor, rank - 1)
        dist.send(tensor + 1, (rank + 1) % size)
    equal(tensor, [float(rank if rank else size)] * 3)


@check
def all_may_send_before_they_receive(device: torch.device) -> None:
    """Send messages that exceed a socket's buffer on all ranks first, as 1F1B does."""
    rank, size = place()
    after, before = (rank + 1) % size, (rank - 1) % size
    given = torch.full((300_000,), float(rank), device=device)
    taken = torch.empty_like(given)
    sending = dist.isend(given, after)
    receiving = dist.irecv(taken, before)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    sending.wait()
    equal(taken, torch.full((300_000,), float(before)))


@check
def messages_arrive_in_the_order_sent_and_by_their_tags(device: torch.device) -> None:
    rank, _ = place()
    if rank == 0:
        works = [
            dist.isend(torch.tensor([value], device=device), 1, tag=tag)
            for tag, value in ((1, 10.0), (2, 20.0), (1, 11.0))
        ]
        for work in works:
            assert work is not None
            work.wait()
    if rank == 1:
        taken = {}
        for name, tag in (("third", 2), ("first", 1), ("second", 1)):
            taken[name] = torch.zeros(1, device=device)
            dist.recv(taken[name], 0, tag=tag)
        seen = {name: float(tensor) for name, tensor in taken.items()}
        assert seen == {"first": 10.0, "second": 11.0, "third": 20.0}


@check
def a_message_from_any_sender_names_its_sender(device: torch.device) -> None:
    rank, size = place()
    if rank:
        dist.send(torch.tensor([float(rank)], device=device), 0)
        return
    came = {}
    for _ in range(size - 1):
        tensor = torch.zeros(1, device=device)
        source = dist.recv(tensor)
        came[source] = float(tensor)
    assert came == {r: float(r) for r in range(1, size)}


@check
def a_batch_of_messages_goes_both_ways_at_once(device: torch.device) -> None:
    rank, size = place()
    taken = [torch.full((2,), GUARD, device=device) for _ in range(size)]
    operations = []
    for peer in range(size):
        if peer != rank:
            given = torch.tensor([float(rank), float(peer)], device=device)
            operations.append(dist.P2POp(dist.isend, given, peer))
            operations.append(dist.P2POp(dist.irecv, taken[peer], peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer in range(size):
        equal(taken[peer], [GUARD] * 2 if peer == rank else [float(peer), float(rank)])


# --- groups ---


@check
def a_group_of_some_ranks_counts_only_them(device: torch.device) -> None:
    """Make two disjoint groups, and one that has a rank of each."""
    rank, size = place()
    members = [list(range(0, size, 2)), list(range(1, size, 2))]
    halves = [dist.new_group(ranks) for ranks in members]
    ends = dist.new_group([0, size - 1])
    own = members[rank % 2]
    tensor = torch.tensor([float(rank + 1)], device=device)
    dist.all_reduce(tensor, group=halves[rank % 2])
    equal(tensor, [float(sum(r + 1 for r in own))])
    assert dist.get_rank(halves[rank % 2]) == own.index(rank)
    assert dist.get_rank(halves[1 - rank % 2]) == -1
    if rank in (0, size - 1):
        value = torch.tensor([float(rank)], device=device)
        dist.broadcast(value, src=size - 1, group=ends)
        equal(value, [float(size - 1)])
        dist.destroy_process_group(ends)


@check
def groups_of_the_same_ranks_do_not_mix_their_messages(device: torch.device) -> None:
    rank, size = place()
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    tensors = [torch.full((2,), float(rank * 10**i), device=device) for i in range(2)]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, groups, strict=True)
    ]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        equal(tensor, [float(10**i * size * (size - 1) // 2)] * 2)
