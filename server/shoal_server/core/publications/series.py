"""State machine of one series under one leader.

Changes of the record in etcd are queued, and each is decided when its turn comes. One write is in
progress at a time. A call is answered once what the answer says is durable.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal_server.core.publications import keeping
from shoal_server.core.publications.limits import (
    ABANDONED_AFTER_S,
    ABANDONED_KEPT,
    HELD_S,
    MAX_PENDING,
    MAX_PINS,
    MAX_RECORD_BYTES,
)
from shoal_server.core.publications.protocol import (
    BeginRequested,
    Call,
    Cleared,
    ClearRequested,
    ContributorLeft,
    Effect,
    Event,
    HeadWritten,
    NotifyWatchers,
    PartContributed,
    PartFailed,
    PartsRejected,
    PartsVerified,
    PinRequested,
    PublicationBegun,
    PublicationRefusal,
    RequestRefused,
    RollbackRequested,
    TimePassed,
    VerifyParts,
    VersionAnswered,
    VersionsChanged,
    WriteSeries,
)
from shoal_server.core.publications.publication import Mismatch, Publication, PublicationStage
from shoal_server.core.publications.readers import Reader, ReaderReport, Readers
from shoal_server.core.publications.records import (
    DIGESTS_KEPT,
    LOSSES_KEPT,
    PublishedSegment,
    PublishedVersion,
    Publisher,
    SeriesHead,
    StoredSeries,
)
from shoal_server.core.publications.relays import RelayTrees

Effects = Iterator[Effect]
QueuedChange = Callable[[float], Effects]
"""A change of the record, decided when its turn comes. It yields `WriteSeries`, or only answers."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    stored: StoredSeries
    drops: frozenset[int]
    then: tuple[Effect, ...] = ()
    committed: Publication | None = None


@dataclass
class _Script:
    until_s: float
    is_released: bool = False


@dataclass
class _Abandoned:
    """Reasons why the newest publications of this epoch were abandoned, at most ABANDONED_KEPT."""

    reasons: OrderedDict[int, PartsRejected] = field(default_factory=OrderedDict)

    def add(self, rejected: PartsRejected) -> None:
        self.reasons[rejected.publication] = rejected
        if len(self.reasons) > ABANDONED_KEPT:
            self.reasons.popitem(last=False)


class PublishedSeries:
    """A series during one leader's term."""

    def __init__(self, name: str, stored: StoredSeries, now_s: float) -> None:
        self.name = name
        self.stored = stored
        self.readers = Readers()
        self._relays = RelayTrees()
        # Leases that the predecessor granted are unknown here. They end by `_keeps_found_until_s`,
        # and may be on any version in the store.
        self._found = frozenset(stored.head.kept)
        self._keeps_found_until_s = now_s + HELD_S if stored.head.kept else now_s
        self._script = _Script(now_s + HELD_S)
        self._publications: OrderedDict[int, Publication] = OrderedDict()
        self._abandoned = _Abandoned()
        self._queue: deque[QueuedChange] = deque()
        self._change: _Change | None = None

    @property
    def head(self) -> SeriesHead:
        return self.stored.head

    @property
    def versions(self) -> Mapping[int, PublishedVersion]:
        return self.stored.versions

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._change or self._publications or self.readers.known)

    def step(self, event: Event, now_s: float) -> list[Effect]:
        return [*self._effects_of(event, now_s), *self._go_on(now_s)]

    def _effects_of(self, event: Event, now_s: float) -> Effects:
        match event:
            case BeginRequested():
                self._enqueue(lambda now_s: self._begin(event, now_s))
            case PartContributed():
                yield from self._contribute(event, now_s)
            case PartFailed():
                yield from self._part_failed(event)
            case ContributorLeft():
                for publication in self._publications.values():
                    publication.drop_call(event.call)
            case PartsVerified() | PartsRejected():
                yield from self._parts_checked(event)
            case PinRequested():
                self._enqueue(lambda _: self._pin(event))
            case RollbackRequested():
                self._enqueue(lambda now_s: self._roll_back(event, now_s))
            case VersionsChanged():
                self._enqueue(lambda _: self._revise(event))
            case ClearRequested():
                self._enqueue(lambda _: self._clear(event))
            case HeadWritten():
                yield from self._written()
            case TimePassed():
                yield from self._time_passed(now_s)

    def report(self, report: ReaderReport, now_s: float) -> tuple[list[int], list[int]]:
        """Note a report; see `Readers.report`. Versions being dropped count as gone."""
        dropping = self._change.drops if self._change is not None else frozenset()
        kept = [number for number in self.head.kept if number not in dropping]
        return self.readers.report(report, kept, now_s)

    def source_addresses(self, reader: str, now_s: float) -> dict[int, str]:
        """Address of the relay that is the reader's source for each leased version; empty: the
        servers. Call it after the reader's report."""
        sources = self._relays.sources(reader, self.readers.known, now_s)
        known = self.readers.known
        return {
            number: known[source].report.serves_at if source in known else ""
            for number, source in sources.items()
        }

    def differs(self, reader: Reader) -> bool:
        """True if the reader's bytes differ from the version that it reports as installed. False if
        the head has no digest of that version."""
        report = reader.report
        known = self.head.digests.get(report.installed)
        return known is not None and report.installed_digest != known

    def is_abandoned(self, publisher: Publisher, publication: int) -> bool:
        """True if this publication of the present publisher never becomes a version."""
        return publisher == self.head.publisher and publication in self._abandoned.reasons

    # --- one change at a time ---

    def _enqueue(self, change: QueuedChange) -> None:
        self._queue.append(change)

    def _go_on(self, now_s: float) -> Effects:
        while self._change is None:
            if not self._queue:
                self._queue_drops(now_s)
            if not self._queue:
                break
            yield from self._queue.popleft()(now_s)
        yield from self._verify_next()

    def _write(
        self,
        stored: StoredSeries,
        *,
        put: Sequence[PublishedVersion] = (),
        drop: Iterable[int] = (),
        then: Sequence[Effect] = (),
        committed: Publication | None = None,
    ) -> WriteSeries:
        dropped = frozenset(drop)
        versions = {n: v for n, v in stored.versions.items() if n not in dropped}
        versions |= {version.number: version for version in put}
        num_writes = self.head.num_writes + 1
        head = replace(stored.head, kept=tuple(sorted(versions)), num_writes=num_writes)
        self._change = _Change(
            stored=StoredSeries(head=head, versions=versions),
            drops=dropped,
            then=tuple(then),
            committed=committed,
        )
        return WriteSeries(head=head, put=tuple(put), drop=tuple(sorted(dropped)))

    def _written(self) -> Effects:
        change = self._change
        assert change is not None, "no write is in progress"
        is_other_epoch = change.stored.head.epoch != self.head.epoch
        self.stored, self._change = change.stored, None
        if is_other_epoch:
            yield from self._refuse_open("its publisher was replaced")
        yield from change.then
        if change.committed is not None:
            yield from self._committed(change.committed)
        yield NotifyWatchers()

    # --- publishers ---

    def _begin(self, event: BeginRequested, now_s: float) -> Effects:
        head, publisher = self.head, event.publisher
        if event.is_ending:
            if publisher == head.publisher:
                self._script.is_released = True
            yield PublicationBegun(call=event.call, epoch=head.epoch, head=head.number)
            return
        if refused := self._refusal_of(event, now_s):
            yield refused
            return
        options = replace(head, keep=event.keep, copies=event.copies)
        if publisher != head.publisher or not head.epoch:
            options = replace(options, epoch=head.epoch + 1, publisher=publisher, publication=0)
        if publisher.script:
            self._script = _Script(now_s + HELD_S)
        stored = replace(self.stored, head=options)
        answer: Effect = PublicationBegun(call=event.call, epoch=options.epoch, head=head.number)
        if not keeping.may_send_another(stored, self.readers.leased(now_s), self._leased(now_s)):
            # The publisher takes over even so: the old one must not publish any longer.
            answer = self._overloaded(event.call, now_s)
        # Drop versions at once: a later leader would have to keep them for a while.
        drop = keeping.droppable(stored, self._leased(now_s))
        if drop or options != head:
            yield self._write(stored, drop=drop, then=[answer])
        else:
            yield answer

    def _refusal_of(self, event: BeginRequested, now_s: float) -> RequestRefused | None:
        head, publisher = self.head, event.publisher
        if publisher == head.publisher or not head.epoch:
            return None
        refusal, what, until = None, "", ""
        is_held = now_s < self._script.until_s and not self._script.is_released
        if publisher.script and 0 < event.known_epoch < head.epoch:
            refusal, what = (
                PublicationRefusal.STALE_EPOCH,
                "has another publisher now",
            )
        elif publisher.script and not head.publisher.script:
            refusal, what = (
                PublicationRefusal.SERIES_HELD,
                "belongs to a job: only its members publish it",
            )
        elif head.publisher.script and is_held:
            refusal, what = PublicationRefusal.SERIES_HELD, "is held by a script"
            until = f"; it must end, or be silent for {self._script.until_s - now_s:.0f} s more"
        elif not publisher.script and publisher.generation < head.publisher.generation:
            refusal, what = PublicationRefusal.STALE_EPOCH, "is published by a later generation"
        if refusal is None:
            return None
        return RequestRefused(
            call=event.call,
            refusal=refusal,
            what=f"{self.name} {what}",
            seen=str(publisher),
            expected=f"{head.publisher}, which publishes under epoch {head.epoch}{until}",
        )

    def _overloaded(self, call: Call, now_s: float) -> RequestRefused:
        holders = sorted(self.readers.holders_of_leases(now_s), key=lambda each: each[1])
        shown = ", ".join(f"version {number} by {reader}" for reader, number in holders[:8])
        if now_s < self._keeps_found_until_s:
            shown = "perhaps all, under leases of an earlier coordinator"
        return RequestRefused(
            call=call,
            refusal=PublicationRefusal.OVERLOADED,
            what=f"{self.name} keeps as many versions as it may; readers hold leases on them",
            seen=f"{len(self.head.kept)} versions; leased: {shown}",
            expected=f"at most {self.head.keep} versions, so that one more can be kept",
        )

    def _contribute(self, event: PartContributed, now_s: float) -> Effects:
        number = event.publication
        if (known := self._known_as_committed(event)) is not None:
            yield known
            return
        if refused := self._refusal_by_epoch(event):
            yield refused
            return
        if event.publisher.script:
            self._script.until_s = now_s + HELD_S
        publication = self._publications.get(number)
        if publication is None:
            if refused := self._refusal_of_late(event):
                yield refused
                return
            publication = self._publications[number] = Publication(number, now_s)
        try:
            publication.add(event.call, event.part, now_s)
        except Mismatch as why:
            rejected = PartsRejected(
                epoch=event.epoch,
                publication=number,
                what=why.what,
                seen=why.seen,
                expected=why.expected,
            )
            if publication.stage is PublicationStage.GATHERING:
                yield from self._abandon(rejected)
                yield self._as_refused(event.call, rejected)
            else:
                # Do not abandon the publication: the earlier part may still become a version.
                yield replace(
                    self._as_refused(event.call, rejected), refusal=PublicationRefusal.INVALID
                )
        yield from self._give_up_oldest(number)

    def _known_as_committed(self, event: PartContributed) -> Effect | None:
        """The answer if the publication's version is committed and kept; otherwise None."""
        for version in self.versions.values():
            if (version.epoch, version.publication) != (event.epoch, event.publication):
                continue
            committed = version.segments[event.part.rank : event.part.rank + 1]
            if committed and committed[0].digest == event.part.segment.digest:
                return VersionAnswered(call=event.call, version=version)
            return RequestRefused(
                call=event.call,
                refusal=PublicationRefusal.INVALID,
                what=f"publication {event.publication} was committed with another part",
                seen=f"segment {event.part.segment.digest.hex()[:12]} of rank {event.part.rank}",
                expected="the part that the rank has sent before",
            )
        return None

    def _refusal_of_late(self, event: PartContributed) -> RequestRefused | None:
        number = event.publication
        if (why := self._abandoned.reasons.get(number)) is not None:
            return self._as_refused(event.call, why)
        newest = self.head.publication
        committing = [
            n for n, p in self._publications.items() if p.stage is PublicationStage.COMMITTING
        ]
        if number <= max([newest, *committing]):
            return RequestRefused(
                call=event.call,
                refusal=PublicationRefusal.ABANDONED,
                what=f"publication {number} of {self.name} is over",
                seen=f"a part of publication {number}",
                expected=f"a part of a publication after {max([newest, *committing])}, the newest",
            )
        return None

    def _part_failed(self, event: PartFailed) -> Effects:
        """Abandon the publication, unless it is complete or over, so that its other ranks do not
        wait in vain."""
        number, head = event.publication, self.head
        publication = self._publications.get(number)
        is_over = number <= head.publication or number in self._abandoned.reasons
        is_complete = publication is not None and publication.is_complete
        if event.publisher == head.publisher and not is_over and not is_complete:
            yield from self._abandon(
                PartsRejected(
                    epoch=head.epoch,
                    publication=number,
                    what=f"publication {number} of {self.name} was abandoned: rank {event.rank}"
                    " could not send its part",
                    seen=event.why,
                    expected="a part of each rank",
                )
            )

    def _give_up_oldest(self, newest: int) -> Effects:
        gathering = sorted(
            n for n, p in self._publications.items() if p.stage is PublicationStage.GATHERING
        )
        for number in gathering[: max(len(gathering) - MAX_PENDING, 0)]:
            yield from self._give_up(number, f"publication {newest} has begun meanwhile")

    def _give_up(self, number: int, why: str) -> Effects:
        publication = self._publications[number]
        seen = f"no part of ranks {publication.missing}" if publication.missing else why
        yield from self._abandon(
            PartsRejected(
                epoch=self.head.epoch,
                publication=number,
                what=f"publication {number} of {self.name} was abandoned: {why}",
                seen=seen,
                expected="a part of each rank",
            )
        )

    def _abandon(self, rejected: PartsRejected) -> Effects:
        publication = self._publications.pop(rejected.publication, None)
        self._abandoned.add(rejected)
        for call in publication.calls if publication is not None else ():
            yield self._as_refused(call, rejected)

    def _as_refused(self, call: Call, why: PartsRejected) -> RequestRefused:
        return RequestRefused(
            call=call,
            refusal=PublicationRefusal.ABANDONED,
            what=why.what,
            seen=why.seen,
            expected=why.expected,
        )

    def _refusal_by_epoch(self, event: PartContributed) -> RequestRefused | None:
        head = self.head
        if event.epoch == head.epoch and event.publisher == head.publisher:
            return None
        refusal, what = (
            PublicationRefusal.STALE_EPOCH,
            f"this publisher of {self.name} was replaced",
        )
        if event.epoch > head.epoch:
            # This coordinator leads no more, or etcd was restored to an earlier time.
            refusal = PublicationRefusal.LATER_EPOCH
            what = f"this coordinator knows no such epoch of {self.name}"
        return RequestRefused(
            call=event.call,
            refusal=refusal,
            what=what,
            seen=f"{event.publisher}, with epoch {event.epoch}",
            expected=f"{head.publisher}, with epoch {head.epoch}",
        )

    def _refuse_open(self, why: str) -> Effects:
        publications, self._publications = self._publications, OrderedDict()
        self._abandoned = _Abandoned()
        for publication in publications.values():
            for call in publication.calls:
                yield RequestRefused(
                    call=call,
                    refusal=PublicationRefusal.STALE_EPOCH,
                    what=f"publication {publication.number} of {self.name} was abandoned: {why}",
                    seen="an earlier epoch",
                    expected=f"epoch {self.head.epoch}, of {self.head.publisher}",
                )

    def _verify_next(self) -> Effects:
        """Verify the newest complete publication, one at a time. Older ones are abandoned once it
        is committed."""
        if any(p.stage is not PublicationStage.GATHERING for p in self._publications.values()):
            return
        complete = [number for number, p in self._publications.items() if p.is_complete]
        if complete:
            publication = self._publications[max(complete)]
            publication.stage = PublicationStage.VERIFYING
            yield VerifyParts(
                epoch=self.head.epoch, publication=publication.number, parts=publication.parts
            )

    def _parts_checked(self, event: PartsVerified | PartsRejected) -> Effects:
        publication = self._publications.get(event.publication)
        is_current = event.epoch == self.head.epoch
        if (
            publication is None
            or not is_current
            or publication.stage is not PublicationStage.VERIFYING
        ):
            return
        if isinstance(event, PartsRejected):
            yield from self._abandon(event)
        else:
            publication.stage = PublicationStage.COMMITTING
            self._enqueue(lambda now_s: self._commit(event, publication, now_s))

    def _commit(self, event: PartsVerified, publication: Publication, now_s: float) -> Effects:
        if self._publications.get(publication.number) is not publication:
            return  # abandoned since; its calls were refused
        first = publication.parts[0]
        version = PublishedVersion(
            number=self.head.number + 1,
            epoch=event.epoch,
            publication=event.publication,
            step=first.step,
            layout_digest=event.layout_digest,
            segments=event.segments,
            created_unix_s=now_s,
            metadata=first.metadata,
            tables_cut=first.tables_cut,
        )
        if version.record_bytes > MAX_RECORD_BYTES:
            yield from self._abandon(_too_large(version))
            return
        yield self._put_newest(version, now_s, committed=publication)

    def _put_newest(
        self,
        version: PublishedVersion,
        now_s: float,
        *,
        then: Sequence[Effect] = (),
        committed: Publication | None = None,
    ) -> WriteSeries:
        head = self.head
        digests = {**head.digests, version.number: version.digest}
        for old in sorted(digests)[: max(len(digests) - DIGESTS_KEPT, 0)]:
            del digests[old]
        head = replace(
            head,
            number=version.number,
            publication=max(head.publication, version.publication),
            digests=digests,
            kept=(*head.kept, version.number),
        )
        stored = StoredSeries(head=head, versions={**self.versions, version.number: version})
        drop = keeping.droppable(stored, self._leased(now_s))
        return self._write(stored, put=[version], drop=drop, then=then, committed=committed)

    def _committed(self, publication: Publication) -> Effects:
        del self._publications[publication.number]
        version = self.versions[self.head.number]
        for call in publication.calls:
            yield VersionAnswered(call=call, version=version)
        for number in [n for n in self._publications if n < publication.number]:
            yield from self._give_up(number, f"publication {publication.number} was committed")

    # --- operators ---

    def _pin(self, event: PinRequested) -> Effects:
        version = self.versions.get(event.number)
        if version is None:
            yield self._gone(event.call, event.number)
            return
        if version.is_pinned == event.pins:
            yield VersionAnswered(call=event.call, version=version)
            return
        pinned = [v.number for v in self.versions.values() if v.is_pinned]
        if event.pins and len(pinned) >= MAX_PINS:
            yield RequestRefused(
                call=event.call,
                refusal=PublicationRefusal.OVERLOADED,
                what=f"{self.name} has as many pinned versions as it may",
                seen=f"versions {', '.join(map(str, pinned))}",
                expected=f"fewer than {MAX_PINS}",
            )
            return
        changed = replace(version, is_pinned=event.pins)
        answer = VersionAnswered(call=event.call, version=changed)
        yield self._write(self.stored, put=[changed], then=[answer])

    def _roll_back(self, event: RollbackRequested, now_s: float) -> Effects:
        old, newest = self.versions.get(event.to), self.versions.get(self.head.number)
        if newest is not None and event.to and newest.rolled_back_to == event.to:
            # A repeated request: the first one may have dropped the old version.
            yield VersionAnswered(call=event.call, version=newest)
            return
        if old is None:
            yield self._gone(event.call, event.to)
            return
        if newest is not None and newest.digest == old.digest:
            yield VersionAnswered(call=event.call, version=newest)
            return
        version = replace(
            old,
            number=self.head.number + 1,
            epoch=self.head.epoch,
            publication=0,
            created_unix_s=now_s,
            rolled_back_to=old.number,
            is_pinned=False,
        )
        answer = VersionAnswered(call=event.call, version=version)
        yield self._put_newest(version, now_s, then=[answer])

    def _clear(self, event: ClearRequested) -> Effects:
        for number in list(self._publications):
            yield from self._give_up(number, "the job is removed or started over")
        if self.head.kept:
            yield self._write(self.stored, drop=self.head.kept, then=[Cleared(call=event.call)])
        else:
            yield Cleared(call=event.call)

    def _gone(self, call: Call, number: int) -> RequestRefused:
        kept = ", ".join(map(str, self.head.kept)) or "none"
        return RequestRefused(
            call=call,
            refusal=PublicationRefusal.GONE,
            what=f"version {number} of {self.name} is not kept",
            seen=f"version {number}",
            expected=f"one of the kept versions: {kept}",
        )

    # --- servers and time ---

    def _revise(self, event: VersionsChanged) -> Effects:
        put: list[PublishedVersion] = []
        for number, version in self.versions.items():
            segments = self._revised(version, event.replaced.get(number))
            is_durable = version.is_durable or number in event.durable
            # New holders have not written the segments to disk yet.
            is_durable = is_durable and not _adds_holders(version.segments, segments)
            changed = replace(version, segments=segments, is_durable=is_durable)
            if changed == version or number in event.lost:
                continue
            # The next VersionsChanged revises the others. A record that would grow too large stays.
            if sum(each.record_bytes for each in (*put, changed)) <= MAX_RECORD_BYTES:
                put.append(changed)
        lost = sorted(event.lost & self.versions.keys())
        if put or lost:
            losses = (*self.head.lost, *lost)[-LOSSES_KEPT:]
            head = replace(self.head, lost=losses, num_lost=self.head.num_lost + len(lost))
            stored = replace(self.stored, head=head)
            yield self._write(stored, put=put, drop=lost)

    @staticmethod
    def _revised(
        version: PublishedVersion, segments: tuple[PublishedSegment, ...] | None
    ) -> tuple[PublishedSegment, ...]:
        if segments is None or [s.digest for s in segments] != [s.digest for s in version.segments]:
            return version.segments
        return segments

    def _leased(self, now_s: float) -> set[int]:
        """Versions under a lease of this leader, or perhaps of an earlier one."""
        known = self.readers.leased(now_s)
        return known | self._found if now_s < self._keeps_found_until_s else known

    def _queue_drops(self, now_s: float) -> None:
        if keeping.droppable(self.stored, self._leased(now_s)):
            self._enqueue(self._drop)

    def _drop(self, now_s: float) -> Effects:
        drop = keeping.droppable(self.stored, self._leased(now_s))
        if drop:
            yield self._write(self.stored, drop=drop)

    def _time_passed(self, now_s: float) -> Effects:
        if self.readers.forget_silent(now_s):
            yield NotifyWatchers()
        for number in [
            number
            for number, publication in self._publications.items()
            if publication.stage is PublicationStage.GATHERING
            and not publication.is_complete
            and now_s - publication.received_s > ABANDONED_AFTER_S
        ]:
            yield from self._give_up(number, f"no part arrived for {ABANDONED_AFTER_S:g} s")


def _too_large(version: PublishedVersion) -> PartsRejected:
    num_holders = max(len(segment.holders) for segment in version.segments)
    return PartsRejected(
        epoch=version.epoch,
        publication=version.publication,
        what="the record of the version is too large to keep; publish with fewer copies",
        seen=f"{version.record_bytes} bytes, {len(version.segments)} segments on up to"
        f" {num_holders} servers",
        expected=f"at most {MAX_RECORD_BYTES} bytes",
    )


def _adds_holders(before: Iterable[PublishedSegment], after: Iterable[PublishedSegment]) -> bool:
    pairs = zip(before, after, strict=True)
    return any(not set(new.holders) <= set(old.holders) for old, new in pairs)
