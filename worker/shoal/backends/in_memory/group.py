"""Ranks that are threads of one process: torch.distributed without processes or sockets, for tests
and notebooks. `run_in_memory` (run.py) starts such ranks; seat.py makes the backend "in-memory" of
sessions from them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.backends.in_memory.hub import Complete, Hub, SharedGroup
from shoal.backends.in_memory.worlds import RankWorld, bind, own_world
from shoal.backends.process_group.collectives import CollectiveGroup
from shoal.backends.process_group.pending import CompletedWork, Pending
from shoal.backends.process_group.reductions import reduced
from shoal.torch_private.c10d import HashStore
from shoal_proto.errors import InvalidSpec

PLUGIN = "shoal_in_memory"


class InMemoryGroup(CollectiveGroup):
    """A rank's view of a group. The last rank that calls a collective computes the result for all,
    on its thread. Before the work is complete, callers must not use the tensors. A send copies its
    tensor at once."""

    def __init__(self, shared_group: SharedGroup, rank: int, name: str, timeout_s: float) -> None:
        super().__init__(rank, len(shared_group.ranks), name, timeout_s)
        self.shared_group = shared_group

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return PLUGIN

    def abort(self) -> None:
        self.shared_group.hub.fail(f"rank {self.shared_group.ranks[self.rank()]} aborted")

    def all_reduce_each(self, tensors: list[Tensor], op: Any) -> dist.Work:
        def complete(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                _share(reduced(parts, op), parts)

        return self._post(f"all_reduce({_in_words(op)})", tensors, tensors, complete)

    def reduce_each(self, tensors: list[Tensor], op: Any, root: int) -> dist.Work:
        def complete(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                parts[root].copy_(reduced(parts, op))

        return self._post(f"reduce({_in_words(op)}) to {root}", tensors, tensors, complete)

    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work:
        def complete(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                _share(parts[root], [part for part in parts if part is not parts[root]])

        return self._post(f"broadcast from {root}", tensors, tensors, complete)

    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        def complete(given: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for into, _ in given:
                for rank, (_, contribution) in enumerate(given):
                    for each, tensor in zip(into, contribution, strict=True):
                        _copy(tensor, each[rank])

        whole = [tensor for each in outputs for tensor in each]
        return self._post("all_gather", whole, (outputs, inputs), complete)

    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work:
        def complete(given: list[tuple[list[Tensor], Tensor]]) -> None:
            for into, (_, each) in zip(given[root][0], given, strict=True):
                _copy(each, into)

        return self._post(f"gather to {root}", outputs, (outputs, tensor), complete)

    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work:
        def complete(given: list[tuple[Tensor, list[Tensor]]]) -> None:
            for (into, _), tensor in zip(given, given[root][1], strict=True):
                _copy(tensor, into)

        return self._post(f"scatter from {root}", [output], (output, inputs), complete)

    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        def complete(given: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for rank, (into, _) in enumerate(given):
                for index, output in enumerate(into):
                    _copy(reduced([parts[index][rank] for _, parts in given], op), output)

        return self._post(f"reduce_scatter({_in_words(op)})", outputs, (outputs, inputs), complete)

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        def complete(given: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for rank, (into, _) in enumerate(given):
                for (_, parts), output in zip(given, into, strict=True):
                    _copy(parts[rank], output)

        return self._post("all_to_all", outputs, (outputs, inputs), complete)

    def start_barrier(self) -> dist.Work:
        return self._post("barrier", [], None, lambda given: None)

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        self.shared_group.send(self.rank(), to, tag, tensor)
        return CompletedWork([tensor], self.timeout_s)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        return _Receive(self.shared_group, tensor, (source, self.rank(), tag), self.timeout_s)

    def _post(
        self, kind: str, results: Sequence[Tensor], given: Any, complete: Complete
    ) -> Pending:
        call = self.shared_group.post(self.rank(), kind, given, complete)

        def finish(timeout_s: float) -> None:
            self.shared_group.finish(call, kind, timeout_s)

        return _Posted(results, self.timeout_s, finish, lambda: call.done)


class _Posted(Pending):
    def __init__(
        self,
        tensors: Sequence[Tensor],
        timeout_s: float,
        finish: Callable[[float], None],
        done: Callable[[], bool],
    ) -> None:
        super().__init__(tensors, timeout_s)
        self._finish, self._done = finish, done

    def finish(self, timeout_s: float) -> None:
        self._finish(timeout_s)

    def is_completed(self) -> bool:
        return self._done()


class _Receive(Pending):
    """A receive copies the message to the tensor when the caller waits for it."""

    def __init__(
        self,
        shared_group: SharedGroup,
        tensor: Tensor,
        route: tuple[int | None, int, int],
        timeout_s: float,
    ) -> None:
        super().__init__([tensor], timeout_s)
        self._shared_group = shared_group
        self._source, self._to, self._tag = route
        self._number: int | None = None
        self._received = False
        if self._source is not None:
            self._number = shared_group.next_receive(self._source, self._to, self._tag)

    def finish(self, timeout_s: float) -> None:
        if self._received:
            return
        if self._source is None:
            self._source = self._shared_group.any_source(self._to, self._tag, timeout_s)
            self._number = self._shared_group.next_receive(self._source, self._to, self._tag)
        assert self._number is not None
        message_key = (self._source, self._to, self._tag, self._number)
        self._shared_group.receive(message_key, self._tensors[0], timeout_s)
        self._received = True

    def is_completed(self) -> bool:
        if self._received or self._source is None or self._number is None:
            return self._received
        return self._shared_group.arrived(self._source, self._to, self._tag, self._number)

    def _source_rank(self) -> int:
        assert self._source is not None, "not waited for yet"
        return self._source

    source_rank = _source_rank


def _copy(source: Tensor, target: Tensor) -> None:
    if source.numel() != target.numel() or source.dtype != target.dtype:
        raise ValueError(
            f"an input of {tuple(source.shape)} {source.dtype} does not fit an output of "
            f"{tuple(target.shape)} {target.dtype}"
        )
    target.copy_(source.view(target.shape))


def _share(result: Tensor, targets: Sequence[Tensor]) -> None:
    for target in targets:
        _copy(result, target)


def _in_words(op: Any) -> str:
    return str(op).rpartition(".")[2].lower()


def open_world(hub: Hub, rank: int) -> None:
    """Make this thread a rank of the hub's world, and initialise torch.distributed in it."""
    bind(
        RankWorld(hub, rank),
        lambda: dist.init_process_group(
            backend=PLUGIN,
            store=HashStore(),
            rank=rank,
            world_size=hub.world_size,
            timeout=timedelta(seconds=hub.timeout_s),
        ),
    )


def _create(options: Any, unused: Any) -> InMemoryGroup:
    world = own_world()
    if world is None:
        raise InvalidSpec(
            f"the backend {PLUGIN} serves threads that Shoal runs as ranks",
            fix="Use shoal.run_in_memory(body, world_size).",
        )
    hub = world.hub
    ranks = options.global_ranks_in_group or range(hub.world_size)
    shared_group = hub.join_group(options.group_id, ranks, options.group_rank)
    timeout_s = min(options.timeout.total_seconds(), hub.timeout_s)
    return InMemoryGroup(shared_group, options.group_rank, options.group_id, timeout_s)


dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])
