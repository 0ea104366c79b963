"""The publisher of a series: one local copy in the trainer's time, all else in the background."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.layouts.base import shard_of
from shoal.state.shards import TensorShard
from shoal.weights.pieces import HeldTensor, HeldWeights, RankPart, check_dtype, part_of
from shoal.weights.version import WeightVersion
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    PublicationAbandoned,
    ShoalError,
)
from shoal_proto.numbers_given import as_index
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.v1 import weights_pb2

log = structlog.get_logger(__name__)

IN_FLIGHT = 2
"""Publications of several ranks that may be on their way at once. The next one waits for the
oldest: memory is bounded, and every rank waits at the same one."""
ORDER_S = 1.0
"""Time for which a part waits for the commit of the one before. Then it is contributed all the
same: the other may lack a rank's part for ever, and each rank contributes its parts in order."""
CLOSE_S = 30.0
"""Time for which the end of a session waits for publications in progress."""
LOOK_S = 0.1
"""Interval of questions whether a version is on disk yet, and whether a generation is over. Servers
write to disk at their own pace."""
MAX_METADATA_BYTES = 4096
STEP_PUBLICATIONS = 1 << 16
"""Publications that a step may have."""

Level = Literal["replicated", "committed", "durable"]


@dataclass(frozen=True, kw_only=True)
class SeriesOptions:
    """Options of a series that its publisher sets; checked at construction."""

    keep: int = 2
    """Newest versions that are kept beside leased and pinned ones."""
    copies: int = 2
    """Parameter servers that hold each segment; fewer if there are fewer."""
    dtype: torch.dtype | None = None
    """Dtype in which floating point numbers are published; None: their own."""
    tables: bool = False
    """Each version also has the rows of the model's embedding tables, and all of it is as of one
    cut through the parameter servers."""

    def __post_init__(self) -> None:
        for name, most in (("keep", 1000), ("copies", 16)):
            value = as_index(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if not 1 <= value <= most:
                raise InvalidSpec(
                    f"{name} is out of range", seen=repr(value), expected=f"1 to {most}"
                )
        check_dtype(self.dtype)
        if self.tables and self.dtype is not None:
            raise InvalidSpec(
                "a series with tables is published in the dtypes that its servers hold",
                seen=f"dtype={self.dtype}",
                expected="no dtype",
                fix="Readers convert on installation: fetch into a model of the wanted dtype.",
            )

    def to_message(self) -> weights_pb2.SeriesOptions:
        return weights_pb2.SeriesOptions(keep=self.keep, copies=self.copies)


class Contributor(Protocol):
    """Connection of a rank to servers and coordinator: `shoal_client.weights.SeriesPublisher`."""

    def contribute(
        self,
        segment: Segment,
        layout: weights_pb2.Layout,
        *,
        publication: int,
        step: int,
        metadata: Mapping[str, str],
        tied: Mapping[str, str] | None,
        on_replicated: Callable[[], None],
    ) -> weights_pb2.VersionRecord: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PublisherRank:
    """Place from which a rank publishes. A later one replaces it and abandons its publications."""

    number: int
    """Number of the generation; always the same for a plain script."""
    rank: int
    world_size: int


Connect = Callable[[PublisherRank], Contributor]


class Ticket:
    """Publication in progress. Its methods may be called on any thread."""

    def __init__(
        self, publication: int, step: int, look: "Callable[[int], WeightVersion] | None" = None
    ) -> None:
        """`look` gives a version of this number as the coordinator has it now."""
        self._look = look
        self.publication = publication
        self.step = step
        self.version: int | None = None
        """Number of the version, once it is committed."""
        self.failure: ShoalError | None = None
        """Why it will not become a version, if that is known."""
        self._record: weights_pb2.VersionRecord | None = None
        self._replicated = threading.Event()
        self._ended = threading.Event()

    def wait(
        self, level: Level = "committed", timeout: float | None = None
    ) -> WeightVersion | None:
        """Return once the publication has come so far.

        "replicated": every copy of this rank's bytes is on its server. "committed": all ranks'
        parts are one version, which readers see. "durable": the servers have it on their disks too.
        Gives the version, if it is committed by then. Raises DeadlineExceeded after `timeout`
        seconds, PublicationAbandoned, StaleEpoch, or what else the publication failed with.
        """
        if level not in ("replicated", "committed", "durable"):
            raise InvalidSpec(
                "a ticket waits for no such level",
                seen=repr(level),
                expected='"replicated", "committed" or "durable"',
            )
        ends_s = math.inf if timeout is None else time.monotonic() + timeout
        event = self._replicated if level == "replicated" else self._ended
        if not event.wait(timeout):
            raise self._late(level, timeout)
        if self.failure is not None:
            raise self.failure
        if self._record is None:
            return None
        found = WeightVersion(self._record)
        while level == "durable" and self._look is not None and not found.is_durable:
            if time.monotonic() > ends_s:
                raise self._late(level, timeout)
            time.sleep(LOOK_S)
            found = self._look(found.number)
        return found

    def _late(self, level: Level, timeout: float | None) -> DeadlineExceeded:
        needed = {
            "replicated": "servers that take this rank's part",
            "committed": "all ranks' parts, and servers that take them",
            "durable": "parameter servers that keep weights on their disks, too",
        }
        return DeadlineExceeded(
            f"publication {self.publication} is not {level} yet",
            seen=f"{timeout} s",
            expected=needed[level],
        )

    @property
    def is_over(self) -> bool:
        """True once it is a version or has failed."""
        return self._ended.is_set()

    # --- the publisher's ---

    def replicated(self) -> None:
        self._replicated.set()

    def committed(self, record: weights_pb2.VersionRecord) -> None:
        self._record, self.version = record, record.number
        self._end()

    def failed(self, error: ShoalError) -> None:
        self.failure = error
        self._end()

    def nothing_to_publish(self) -> None:
        """Another member publishes for all."""
        self._end()

    def _end(self) -> None:
        self._replicated.set()
        self._ended.set()

    def await_end(self, timeout: float | None) -> None:
        """Return once it is over, or after so many seconds."""
        self._ended.wait(timeout)

    def await_turn(self, timeout: float) -> None:
        """Return once this rank's part is on its servers, and so many seconds later at the latest,
        or once it is over."""
        self._replicated.wait()
        self._ended.wait(timeout)


class PreparedWriters:
    """Memory for the next segment, allocated and faulted in while training goes on: a page that is
    touched for the first time costs more than the bytes copied to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: SegmentWriter | None = None
        self._preparing: threading.Thread | None = None

    def take(self, num_bytes: int) -> SegmentWriter:
        """A writer of so many bytes. Raises Overloaded if there is not as much memory."""
        if self._preparing is not None:
            self._preparing.join()
        with self._lock:
            writer, self._next = self._next, None
        if writer is not None:
            if writer.num_bytes == num_bytes:
                return writer
            writer.close()
        return SegmentWriter.prepare(num_bytes)

    def prepare(self, num_bytes: int) -> None:
        """Get the next one ready, in the background."""
        preparing = threading.Thread(
            target=self._prepare, args=(num_bytes,), name="prepare-segment", daemon=True
        )
        preparing.start()
        # Only now: the trainer's thread joins what it finds here, which must have been started.
        self._preparing = preparing

    def _prepare(self, num_bytes: int) -> None:
        try:
            writer = SegmentWriter.prepare(num_bytes)
        except ShoalError as error:
            # The publication that needs it says so, if there is still not enough then.
            log.info("segment_not_prepared", num_bytes=num_bytes, reason=str(error))
            return
        with self._lock:
            unused, self._next = self._next, writer
        if unused is not None:
            unused.close()

    def close(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
        with self._lock:
            writer, self._next = self._next, None
        if writer is not None:
            writer.close()


@dataclass(frozen=True, kw_only=True)
class _Publication:
    """Part of one rank in progress."""

    contributor: Contributor
    part: RankPart
    writer: SegmentWriter
    ticket: Ticket
    before: Ticket | None
    """The one that is to be committed first."""
    metadata: Mapping[str, str]
    tied: Mapping[str, str] | None
    """Further names of parameters; None: the version has nothing but the ranks' parts."""


class Publications:
    """Sends one rank's parts. All methods but the background's own are the trainer's."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        options: SeriesOptions,
        look: Callable[[int], WeightVersion] | None = None,
    ) -> None:
        """`look`: see `Ticket`."""
        self.name = name
        self._look = look
        self.options = options
        self._connect = connect
        self._contributors: list[Contributor] = []
        """Contributors, one for each publication in progress."""
        self._place: PublisherRank | None = None
        self._writers = PreparedWriters()
        self._tickets: list[Ticket] = []
        """Tickets of publications in progress, oldest first."""
        self._num_sent = 0
        self._numbers = (-1, 0)
        """The step of the last publication, and how many that step has had."""

    def publish(
        self,
        held: HeldWeights,
        place: PublisherRank,
        metadata: Mapping[str, object] | None = None,
        *,
        number: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Ticket:
        """Copy this rank's part, and send it in the background.

        `number` rises from publication to publication, equally on all ranks; by default it is made
        of the step. Waits while two publications are on their way, or one of a rank by itself.
        Once `is_over`, because a rank of this place is lost, nothing is waited for: these and the
        new publication are abandoned, and the trainer can go on to the next generation.

        Raises InvalidSpec for what cannot be published, Overloaded if there is no memory for the
        copy.
        """
        own_metadata = _checked_metadata(metadata)
        part = part_of(held, self.options.dtype)
        self._enter(place)
        if not self._found_room(is_over):
            return self._abandoned(held.step)
        writer = self._writers.take(part.num_bytes)
        memory = torch.frombuffer(writer.buffer, dtype=torch.uint8)
        part.copy_into(memory)
        del memory
        ticket = Ticket(number or self._next_number(held.step), held.step, self._look)
        publication = _Publication(
            contributor=self._contributors[self._num_sent % len(self._contributors)],
            part=part,
            writer=writer,
            ticket=ticket,
            before=self._tickets[-1] if self._tickets else None,
            metadata=own_metadata,
            tied=held.tied if self.options.tables else None,
        )
        self._tickets.append(ticket)
        self._num_sent += 1
        name = f"publish-{ticket.publication}"
        threading.Thread(target=self._send, args=(publication,), name=name, daemon=True).start()
        return ticket

    def _found_room(self, is_over: Callable[[], bool]) -> bool:
        """True once another publication may be on its way; False if that never comes."""
        while True:
            self._tickets = [each for each in self._tickets if not each.is_over]
            if len(self._tickets) < len(self._contributors):
                return True
            if is_over():
                return False
            self._tickets[0].await_end(LOOK_S)

    def _abandoned(self, step: int) -> Ticket:
        self._drop()
        ticket = Ticket(0, step)
        ticket.failed(
            PublicationAbandoned(
                f"the generation that was to publish step {step} is over",
                seen="publications before it that lack the part of a lost rank",
                expected="the next publication to have the next number",
            )
        )
        return ticket

    def _next_number(self, step: int) -> int:
        """Equal on all ranks, which publish behind the same steps, and above all earlier ones."""
        last, count = self._numbers
        count = count + 1 if step == last else 0
        self._numbers = (step, count)
        return step * STEP_PUBLICATIONS + count + 1

    def _enter(self, place: PublisherRank) -> None:
        """Publish from this place. A rank by itself sends one publication after the other."""
        if self._contributors and place == self._place:
            return
        self._drop()
        self._numbers, self._place = (-1, 0), place
        count = IN_FLIGHT if place.world_size > 1 else 1
        self._contributors = [self._connect(place) for _ in range(count)]

    def _drop(self) -> None:
        """Abandon publications of an earlier generation: they lack the parts of lost members."""
        contributors, self._contributors = self._contributors, []
        for each in contributors:
            each.close()
        for ticket in self._tickets:
            ticket.await_end(CLOSE_S)
        self._tickets.clear()

    def _send(self, own: _Publication) -> None:
        ticket = own.ticket
        try:
            segment = own.writer.seal()
            self._writers.prepare(own.part.num_bytes)
            if own.before is not None:
                own.before.await_turn(ORDER_S)
            try:
                record = own.contributor.contribute(
                    segment,
                    own.part.layout,
                    publication=ticket.publication,
                    step=ticket.step,
                    metadata=own.metadata,
                    tied=own.tied,
                    on_replicated=ticket.replicated,
                )
            finally:
                segment.close()
        except ShoalError as error:
            text = str(error)[:500]
            log.warning("publication_failed", series=self.name, step=ticket.step, reason=text)
            ticket.failed(error if own.contributor in self._contributors else _ended(error))
        except BaseException as error:
            what = f"series {self.name} was not published"
            ticket.failed(PublicationAbandoned(what, seen=repr(error)))
            raise
        else:
            log.debug("version_published", series=self.name, version=record.number)
            ticket.committed(record)

    def close(self, *, waits: bool = True) -> None:
        """End; with `waits`, once what is on its way is committed, within 30 s."""
        if waits:
            for ticket in self._tickets:
                ticket.await_end(CLOSE_S)
        self._drop()
        self._writers.close()


def _ended(error: ShoalError) -> PublicationAbandoned:
    return PublicationAbandoned(
        "this member's generation, or its session, ended before the publication was committed",
        seen=str(error)[:500],
        expected="the next version from the members that are there now",
    )


def _checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, str]:
    found = {str(key): str(value) for key, value in (metadata or {}).items()}
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in found.items())
    if num_bytes > MAX_METADATA_BYTES:
        raise InvalidSpec(
            "a version's metadata are too large",
            seen=f"{num_bytes} bytes",
            expected=f"at most {MAX_METADATA_BYTES}",
        )
    return found


def held_state(
    state: Mapping[str, Tensor] | nn.Module, *, step: int, rank: int, world_size: int
) -> HeldWeights:
    """Weights that a rank holds of tensors that a script gives: whole tensors that are the same on
    all ranks, DTensors by this rank's slices. Tensors that are one object are published once.

    Raises InvalidSpec for what is no tensor.
    """
    given = state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state
    tensors: dict[str, HeldTensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise InvalidSpec(
                f"{name} cannot be published", seen=type(tensor).__name__, expected="a tensor"
            )
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
        elif isinstance(tensor, DTensor):
            tensors[name] = HeldTensor(shard=shard_of(tensor), replicas=_ranks_with(tensor))
        else:
            shard = TensorShard.whole(tensor.detach())
            tensors[name] = HeldTensor(shard=shard, replicas=range(world_size))
    return HeldWeights(step=step, rank=rank, world_size=world_size, tensors=tensors, tied=tied)


def _ranks_with(tensor: DTensor) -> Sequence[int]:
    """Ranks of the mesh that hold the same slice of the tensor as this one."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else slice(own, own + 1)
        for placement, own in zip(tensor.placements, at, strict=True)
    )
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks
