"""Figures of the strategies "ddp" and "zero1", from shapes alone."""

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.layouts.zero1 import ALIGNMENT_BYTES, MAX_MESSAGE_BYTES, partition
from shoal.model.tied_tensors import persistent_buffers
from shoal.planning.figures import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Collective,
    GroupFigures,
    Plan,
    PlanInput,
    RankFigures,
)
from shoal.torch_private.c10d import bucket_assignment

NOTE = "buckets are those from the second step on: torch learns their order in the first"


class ReplicatedFigures:
    """Computation of the plan for whole parameters, with gradients all-reduced in DDP's buckets."""

    def __init__(
        self, subject: PlanInput, bucket_mb: float, *, find_unused_parameters: bool = False
    ) -> None:
        self._subject = subject
        self._n = subject.world_size
        self._trained = {n: p for n, p in subject.parameters.items() if p.requires_grad}
        self._finds_unused = find_unused_parameters
        # Without the search for unused parameters, torch builds buckets in the order of gradients.
        names = list(self._trained) if find_unused_parameters else list(reversed(self._trained))
        buckets = _buckets([self._trained[name] for name in names], bucket_mb)
        self._buckets = [[names[index] for index in bucket] for bucket in buckets]

    def ddp(self, notes: tuple[str, ...] = ()) -> Plan:
        state = self._subject.state_bytes(
            {name: tuple(p.shape) for name, p in self._subject.parameters.items()}
        )
        held = sum(parameter.nbytes for parameter in self._subject.parameters.values())
        rank = self._rank(held, state, (*self._reduced(), *self._shared()))
        return self._plan("ddp", (rank,) * self._n, notes)

    def zero1(self, notes: tuple[str, ...] = ()) -> Plan:
        owners = partition([p.nbytes for p in self._trained.values()], self._n)
        owned = [
            {
                name: p
                for owner, (name, p) in zip(owners, self._trained.items(), strict=True)
                if owner == rank
            }
            for rank in range(self._n)
        ]
        memory = [sum(map(_aligned, parameters.values())) for parameters in owned]
        frozen = sum(p.nbytes for p in self._subject.parameters.values() if not p.requires_grad)
        updates = Collective(
            kind="broadcast",
            when=UPDATE,
            calls=sum(-(-size // MAX_MESSAGE_BYTES) for size in memory),
            num_bytes=sum(memory),
        )
        ranks = [
            self._rank(
                sum(memory) + frozen,
                self._subject.state_bytes({name: tuple(p.shape) for name, p in held.items()}),
                (*self._reduced(), *self._shared(), updates),
            )
            for held in owned
        ]
        return self._plan("zero1", ranks, notes)

    def _rank(
        self, parameters: int, optimizer: int, collectives: tuple[Collective, ...]
    ) -> RankFigures:
        gradients = sum(parameter.nbytes for parameter in self._trained.values())
        return RankFigures(
            parameters=parameters,
            parameters_peak=parameters,
            gradients=gradients,
            gradients_peak=gradients,
            optimizer=optimizer,
            collectives=collectives if self._n > 1 else (),
        )

    def _reduced(self) -> tuple[Collective, ...]:
        buffers = list(self._subject.model.buffers())
        sent = Collective(
            kind="broadcast",
            when=FORWARD,
            calls=len({buffer.dtype for buffer in buffers}),
            num_bytes=sum(buffer.nbytes for buffer in buffers),
        )
        # A 32-bit flag for each parameter says if it was used.
        flags = 4 * len(self._trained) if self._finds_unused else 0
        reduced = Collective(
            kind="all_reduce",
            when=BACKWARD,
            calls=len(self._buckets) + self._finds_unused,
            num_bytes=sum(parameter.nbytes for parameter in self._trained.values()) + flags,
        )
        return (sent, reduced) if buffers else (reduced,)

    def _shared(self) -> tuple[Collective, ...]:
        num_bytes = sum(each.nbytes for each in persistent_buffers(self._subject.model).values())
        sent = Collective(kind="broadcast", when=UPDATE, calls=1, num_bytes=num_bytes)
        return (sent,) if num_bytes else ()

    def _plan(self, strategy: str, ranks: Sequence[RankFigures], notes: tuple[str, ...]) -> Plan:
        return Plan(
            strategy=strategy,
            groups=tuple(
                GroupFigures(
                    title=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
                    num_parameters=len(names),
                    num_bytes=sum(self._trained[name].nbytes for name in names),
                )
                for names in self._buckets
            ),
            ranks=tuple(ranks),
            notes=(NOTE, *notes),
        )


def _buckets(parameters: list[Tensor], bucket_mb: float) -> list[list[int]]:
    if not parameters:
        return []
    cap = int(bucket_mb * 1024 * 1024)
    sparse = [False] * len(parameters)
    indices: list[list[int]]
    indices, _ = bucket_assignment(parameters, [cap, cap], sparse)
    return indices


def _aligned(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
