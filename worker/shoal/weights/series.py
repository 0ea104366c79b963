"""Publisher of a series: weights are copied, and the copy is sent in the background."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from shoal_client.weights.publisher import TIMEOUT_S
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    PublicationAbandoned,
    ShoalError,
    Unavailable,
)
from shoal_proto.numbers_given import as_index, as_number
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.v1 import weights_pb2

log = structlog.get_logger(__name__)

IN_FLIGHT = 2
"""Limit of publications in progress if several ranks publish."""
ORDER_S = 1.0
"""Limit of a part's wait for the end of the previous publication, which may lack parts for good."""
CLOSE_S = 30.0
"""Limit of the wait for each publication in progress at the end of a session or generation."""
LOOK_S = 0.1
PREPARING_NICENESS = 5
"""Increase of the nice value of the thread that prepares the next segment."""
MAX_METADATA_BYTES = 4096
MAX_METADATA_ENTRIES = 64
MAX_METADATA_KEY = 256
MAX_KEEP, MAX_COPIES = 64, 16
"""Limits of the coordinator."""
STEP_PUBLICATIONS = 1 << 16

Level = Literal["replicated", "committed", "durable"]


@dataclass(frozen=True, kw_only=True)
class SeriesOptions:
    """Options of a series, set by its publisher. Checked at construction."""

    keep: int = 2
    """Number of the newest versions that are kept, beside leased and pinned ones."""
    copies: int = 2
    """Number of parameter servers that hold each segment; fewer if there are fewer servers."""
    dtype: torch.dtype | None = None
    """Dtype in which floating point values are published; None: their own."""
    tables: bool = False
    """True: publish the rows of embedding tables, too; a version is then one cut through the
    servers.
    """

    def __post_init__(self) -> None:
        for name, most in (("keep", MAX_KEEP), ("copies", MAX_COPIES)):
            value = as_index(name, getattr(self, name), least=1, most=most)
            object.__setattr__(self, name, value)
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
    """A rank's connection to servers and coordinator: `shoal_client.weights.SeriesPublisher`."""

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

    def report_failure(
        self, publication: int, failure: BaseException, timeout_s: float = ...
    ) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PublisherRank:
    """The generation and rank from which a process publishes.

    A change abandons publications in progress.
    """

    number: int
    """Number of the generation; constant for a plain script."""
    rank: int
    world_size: int


Connect = Callable[[PublisherRank], Contributor]


class PendingPublication:
    """A publication, from its copy to its commit. Any thread may call its methods."""

    def __init__(
        self,
        publication: int,
        step: int,
        look: "Callable[[int, float], WeightVersion] | None" = None,
        abandon_if_over: Callable[[], None] = lambda: None,
    ) -> None:
        """`look(number, timeout_s)` asks the coordinator for a version. `abandon_if_over` is called
        during waits: it makes the publication fail if its generation is over."""
        self._look = look
        self._abandon_if_over = abandon_if_over
        self.publication = publication
        self.step = step
        self.version: int | None = None
        self.failure: ShoalError | None = None
        """The error with which the publication failed; None: no failure so far."""
        self._record: weights_pb2.VersionRecord | None = None
        self._replicated = threading.Event()
        self._ended = threading.Event()

    def wait(
        self, level: Level = "committed", timeout: float | None = None
    ) -> WeightVersion | None:
        """Wait until the publication has reached this level; return the version if it is committed.

        "replicated": every copy of this rank's bytes is on its server. "committed": the parts of
        all ranks form a version, which readers see. "durable": the servers also have it on their
        disks. Returns None if another member publishes for all.

        Raises InvalidSpec for another level, DeadlineExceeded after `timeout` seconds, or the error
        with which the publication failed. For "durable" also raises VersionGone if the version is
        dropped before it is durable, and DeadlineExceeded after 10 minutes without a coordinator.
        """
        if level not in ("replicated", "committed", "durable"):
            raise InvalidSpec(
                "a publication has no such level",
                seen=repr(level),
                expected='"replicated", "committed" or "durable"',
            )
        ends_s = math.inf if timeout is None else time.monotonic() + as_number("timeout", timeout)
        event = self._replicated if level == "replicated" else self._ended
        if not self._await(event, ends_s):
            raise self._late(level, timeout)
        if self.failure is not None:
            raise self.failure
        if self._record is None:
            return None
        version = WeightVersion(self._record)
        while level == "durable" and self._look is not None and not version.is_durable:
            time.sleep(max(min(LOOK_S, ends_s - time.monotonic()), 0.0))
            left_s = ends_s - time.monotonic()
            if left_s <= 0.0:
                raise self._late(level, timeout)
            version = self._look(version.number, left_s)
        return version

    def _await(self, event: threading.Event, ends_s: float) -> bool:
        """Wait for the event; False if it is not set at `ends_s`."""
        while not event.wait(max(min(LOOK_S, ends_s - time.monotonic()), 0.0)):
            if time.monotonic() >= ends_s:
                return False
            self._abandon_if_over()
        return True

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
        """True if the publication is committed or has failed."""
        return self._ended.is_set()

    # --- called by the publisher ---

    def replicated(self) -> None:
        self._replicated.set()

    def committed(self, record: weights_pb2.VersionRecord) -> None:
        self._record, self.version = record, record.number
        self._end()

    def failed(self, error: ShoalError) -> None:
        self.failure = error
        self._end()

    def nothing_to_publish(self) -> None:
        """End the publication without a version: another member publishes for all."""
        self._end()

    def _end(self) -> None:
        self._replicated.set()
        self._ended.set()

    def await_end(self, timeout: float) -> None:
        """Wait until the publication is over, for at most `timeout` seconds."""
        self._await(self._ended, time.monotonic() + timeout)

    def await_turn(self, timeout: float) -> None:
        """Wait until this rank's part is on its servers, and then up to `timeout` s for the end."""
        self._replicated.wait()
        self._ended.wait(timeout)


class PreparedWriters:
    """Memory for the next segment, prepared during training: page faults take longer than
    copying.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: SegmentWriter | None = None
        self._preparing: threading.Thread | None = None
        self._is_closed = False

    def take(self, num_bytes: int) -> SegmentWriter:
        """Return a writer of a segment of this size. Raises Overloaded if memory is short."""
        writer = self._await_next()
        if writer is not None:
            if writer.num_bytes == num_bytes:
                return writer
            writer.close()
        return SegmentWriter.prepare(num_bytes)

    def prepare(self, num_bytes: int) -> None:
        """Prepare the next writer in the background. Any thread may call this."""
        with self._lock:
            is_preparing = self._preparing is not None and self._preparing.is_alive()
            if self._is_closed or is_preparing or self._next is not None:
                return
            preparing = threading.Thread(
                target=self._prepare, args=(num_bytes,), name="prepare-segment", daemon=True
            )
            # RuntimeError: no further thread is possible, for example once the script has ended.
            with suppress(RuntimeError):
                preparing.start()
                # Under the lock: another thread may join only a started thread.
                self._preparing = preparing

    def _prepare(self, num_bytes: int) -> None:
        # Training, and readers on this host that install the version just sent, go first.
        # On Linux this changes the calling thread alone.
        os.nice(PREPARING_NICENESS)
        try:
            writer = SegmentWriter.prepare(num_bytes)
        except ShoalError as error:
            # Not raised: the next publication tries again, and raises if memory is still short.
            log.info("segment_not_prepared", num_bytes=num_bytes, reason=str(error))
            return
        with self._lock:
            self._next = writer

    def _await_next(self) -> SegmentWriter | None:
        with self._lock:
            preparing = self._preparing
        if preparing is not None:
            preparing.join()
        with self._lock:
            writer, self._next = self._next, None
        return writer

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        writer = self._await_next()
        if writer is not None:
            writer.close()


class _Contributors:
    """Connections of one generation and rank, one for each publication that may be in progress."""

    def __init__(self, connections: Sequence[Contributor] = ()) -> None:
        self._connections = connections
        self.is_closed = not connections

    def __len__(self) -> int:
        return len(self._connections)

    def __getitem__(self, index: int) -> Contributor:
        return self._connections[index]

    def close(self) -> None:
        """Make publications in progress fail. Any thread may call this, and more than once."""
        if not self.is_closed:
            self.is_closed = True
            for each in self._connections:
                each.close()


@dataclass(frozen=True, kw_only=True)
class _Publication:
    contributors: _Contributors
    contributor: Contributor
    part: RankPart
    writer: SegmentWriter
    ticket: PendingPublication
    before: PendingPublication | None
    """The previous publication, which is to be committed first."""
    dropped: Sequence[int]
    """Numbers of the publications that this one replaces. Another rank may still wait for them: it
    may have reached a coordinator sooner. Servers may hold their parts."""
    metadata: Mapping[str, str]
    tied: Mapping[str, str] | None
    """Further names of parameters, for a version with tables; else None."""


class Publications:
    """Publications of one rank. One thread at a time calls its methods, except `_send`."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        options: SeriesOptions,
        look: Callable[[int, float], WeightVersion] | None = None,
    ) -> None:
        """`look`: see `PendingPublication`."""
        self.name = name
        self._look = look
        self.options = options
        self._connect = connect
        self._contributors = _Contributors()
        self._publisher: PublisherRank | None = None
        self._writers = PreparedWriters()
        self._tickets: list[PendingPublication] = []
        self._num_sent = 0
        self._numbers = (-1, 0)
        """Step of the last publication, and the number of earlier publications of that step."""
        self._replaced: Sequence[int] = ()
        """Publications that were replaced without a coordinator, and are not reported yet."""

    def publish(
        self,
        held: HeldWeights,
        publisher: PublisherRank,
        metadata: Mapping[str, object] | None = None,
        *,
        number: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
        is_away: Callable[[], bool] = lambda: False,
    ) -> PendingPublication:
        """Copy this rank's part, and send it in the background.

        `number`: number of the publication, which rises and is the same on all ranks; by default it
        is made from the step. First waits while as many publications are in progress as there may
        be. If `is_over` returns True during this wait, this publication and all in progress fail;
        if it does during a later `PendingPublication.wait`, all in progress fail. If `is_away`
        returns True during this wait, as there is no coordinator, all in progress fail, and this
        one waits for a coordinator in the background.

        Raises InvalidSpec for weights or metadata that cannot be published, and for more than
        `STEP_PUBLICATIONS` of one step; Overloaded if there is no memory for the copy.
        """
        own_metadata = _checked_metadata(metadata)
        part = part_of(held, self.options.dtype)
        self._enter(publisher)
        # Count it even if it is not sent: later numbers must be the same on all ranks.
        number = number or self._next_number(held.step)
        while not self._has_turn():
            if is_over():
                self._drop()
                return _not_sent(number, held.step)
            if is_away():
                # Not this one, which may be the last and so has to be committed later.
                replaced = [each.publication for each in self._tickets]
                self._drop()
                # The first of an outage may have parts on servers; later ones were never begun.
                self._replaced = [*self._replaced[:IN_FLIGHT], *replaced]
                self._enter(publisher)
            else:
                self._tickets[0].await_end(LOOK_S)
        contributors, dropped = self._contributors, self._replaced
        contributor = contributors[self._num_sent % len(contributors)]
        try:
            writer = self._copied(part)
        except BaseException as error:
            failure = error

            def report() -> None:
                _report_dropped(contributor, dropped)
                contributor.report_failure(number, failure)

            # In the background, since a coordinator may be away.
            threading.Thread(target=report, daemon=True).start()
            raise

        def abandon_if_over() -> None:
            if is_over():
                contributors.close()

        ticket = PendingPublication(number, held.step, self._look, abandon_if_over)
        publication = _Publication(
            contributors=contributors,
            contributor=contributor,
            part=part,
            writer=writer,
            ticket=ticket,
            before=self._tickets[-1] if self._tickets else None,
            dropped=dropped,
            metadata=own_metadata,
            tied=held.tied if self.options.tables else None,
        )
        self._tickets.append(ticket)
        self._num_sent += 1
        name = f"publish-{ticket.publication}"
        threading.Thread(target=self._send, args=(publication,), name=name, daemon=True).start()
        return ticket

    def _copied(self, part: RankPart) -> SegmentWriter:
        writer = self._writers.take(part.num_bytes)
        part.copy_into(torch.frombuffer(writer.buffer, dtype=torch.uint8))
        return writer

    def _has_turn(self) -> bool:
        self._tickets = [each for each in self._tickets if not each.is_over]
        return len(self._tickets) < len(self._contributors)

    def _next_number(self, step: int) -> int:
        """Return the next number, above all earlier ones of this generation and the same on all
        ranks.
        """
        last, count = self._numbers
        count = count + 1 if step == last else 0
        if count == STEP_PUBLICATIONS:
            raise InvalidSpec(
                f"series {self.name} has had {count} publications of step {step}",
                seen="another one of the same step",
                expected="a further step before it",
            )
        self._numbers = (step, count)
        return step * STEP_PUBLICATIONS + count + 1

    def _enter(self, publisher: PublisherRank) -> None:
        """Connect as this generation and rank, unless already connected so.

        The only rank of a generation sends one publication at a time.
        """
        if not self._contributors.is_closed and publisher == self._publisher:
            return
        self._drop()
        if publisher != self._publisher:
            self._numbers, self._publisher, self._replaced = (-1, 0), publisher, ()
        count = IN_FLIGHT if publisher.world_size > 1 else 1
        self._contributors = _Contributors([self._connect(publisher) for _ in range(count)])

    def _drop(self) -> None:
        """Abandon publications of an earlier generation: they may lack parts of lost members."""
        self._contributors.close()
        for ticket in self._tickets:
            ticket.await_end(CLOSE_S)
        self._tickets.clear()

    def _send(self, publication: _Publication) -> None:
        ticket = publication.ticket
        try:
            # Not during the copy: the trainer waits for the copy, and a digest would take
            # processors from it.
            _report_dropped(publication.contributor, publication.dropped)
            if publication.dropped and not publication.contributors.is_closed:
                self._replaced = ()
            segment = publication.writer.seal(publication.writer.digest_in_place())
            self._writers.prepare(publication.part.num_bytes)
            if publication.before is not None:
                publication.before.await_turn(ORDER_S)
            try:
                record = publication.contributor.contribute(
                    segment,
                    publication.part.layout,
                    publication=ticket.publication,
                    step=ticket.step,
                    metadata=publication.metadata,
                    tied=publication.tied,
                    on_replicated=ticket.replicated,
                )
            finally:
                segment.close()
        except ShoalError as error:
            text = str(error)[:500]
            log.warning("publication_failed", series=self.name, step=ticket.step, reason=text)
            publication.contributor.report_failure(ticket.publication, error)
            ticket.failed(_ended(error) if publication.contributors.is_closed else error)
        except BaseException as error:
            publication.contributor.report_failure(ticket.publication, error)
            what = f"series {self.name} was not published"
            ticket.failed(PublicationAbandoned(what, seen=repr(error)))
            raise
        else:
            log.debug("version_published", series=self.name, version=record.number)
            ticket.committed(record)

    def close(self, *, waits: bool = True) -> None:
        """Close the connections; with `waits`, first wait for each publication, up to `CLOSE_S`."""
        if waits:
            for ticket in self._tickets:
                ticket.await_end(CLOSE_S)
        self._drop()
        self._writers.close()


def _report_dropped(contributor: Contributor, dropped: Iterable[int]) -> None:
    for number in dropped:
        what = f"training went on without publication {number}"
        why = Unavailable(what, seen="no coordinator", expected="a coordinator in time")
        contributor.report_failure(number, why, TIMEOUT_S)


def _not_sent(publication: int, step: int) -> PendingPublication:
    ticket = PendingPublication(publication, step)
    ticket.failed(
        PublicationAbandoned(
            f"step {step} is not published: the generation is over, or the series was released",
            seen="publications before it that are not committed",
            expected="the next publication to have the next number",
        )
    )
    return ticket


def _ended(error: ShoalError) -> PublicationAbandoned:
    return PublicationAbandoned(
        "this member's generation, or its session, ended before the publication was committed,"
        " or training went on without a coordinator",
        seen=str(error)[:500],
        expected="the next version, from the present members",
    )


def _is_unicode(text: str) -> bool:
    """False for a text with lone surrogates, which no message can carry."""
    return text == text.encode(errors="ignore").decode()


def _checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, str]:
    texts = {str(key): str(value) for key, value in (metadata or {}).items()}
    if wrong := [text for pair in texts.items() for text in pair if not _is_unicode(text)]:
        raise InvalidSpec(
            "a version's metadata is not text",
            seen=repr(wrong[0]),
            expected="texts without surrogates",
        )
    longest = max(texts, key=len, default="")
    if len(texts) > MAX_METADATA_ENTRIES or len(longest) > MAX_METADATA_KEY:
        raise InvalidSpec(
            "a version's metadata has too many entries, or too long a key",
            seen=f"{len(texts)} entries; a key of {len(longest)} characters",
            expected=f"at most {MAX_METADATA_ENTRIES} and {MAX_METADATA_KEY}",
        )
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in texts.items())
    if num_bytes > MAX_METADATA_BYTES:
        raise InvalidSpec(
            "a version's metadata is too large",
            seen=f"{num_bytes} bytes",
            expected=f"at most {MAX_METADATA_BYTES}",
        )
    return texts


def held_state(
    state: Mapping[str, Tensor] | nn.Module, *, step: int, rank: int, world_size: int
) -> HeldWeights:
    """Return a rank's weights of a script's own tensors.

    Plain tensors are the same on all ranks; a rank holds its slice of a DTensor. Several names of
    one tensor object are tied. Raises InvalidSpec for a value that is not a tensor, and for a name
    that is not a str.
    """
    named_tensors = state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state
    tensors: dict[str, HeldTensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in named_tensors.items():
        if not isinstance(name, str) or not _is_unicode(name):
            raise InvalidSpec(
                "the name of a published tensor is not text",
                seen=repr(name),
                expected="a str without surrogates",
            )
        if not isinstance(tensor, Tensor):
            raise InvalidSpec(
                f"{name} cannot be published", seen=type(tensor).__name__, expected="a tensor"
            )
        first_name = first.setdefault(id(tensor), name)
        if first_name != name:
            tied[name] = first_name
        elif isinstance(tensor, DTensor):
            tensors[name] = HeldTensor(shard=shard_of(tensor), replicas=_ranks_with(tensor))
        else:
            shard = TensorShard.whole(tensor.detach())
            tensors[name] = HeldTensor(shard=shard, replicas=range(world_size))
    return HeldWeights(step=step, rank=rank, world_size=world_size, tensors=tensors, tied=tied)


def _ranks_with(tensor: DTensor) -> Sequence[int]:
    """Return the mesh's ranks with this rank's slice of the tensor; none if it is not in the
    mesh.
    """
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else slice(position, position + 1)
        for placement, position in zip(tensor.placements, at, strict=True)
    )
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks
