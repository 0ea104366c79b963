"""A series under one leader: events in, effects out."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from shoal_client.weights.publisher import PART_S, TIMEOUT_S
from shoal_server.core.publications import keeping
from shoal_server.core.publications.holders import Holders, HoldsAnswer, StoreServer, servers_for
from shoal_server.core.publications.limits import (
    ABANDONED_AFTER_S,
    DURABLE_LOST_AFTER_S,
    HELD_S,
    LOST_AFTER_S,
    MAX_PENDING,
    MAX_RECORD_BYTES,
    REPLACED_AFTER_S,
)
from shoal_server.core.publications.protocol import (
    BeginRequested,
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
    PublicationPart,
    PublicationRefusal,
    RequestRefused,
    RollbackRequested,
    TimePassed,
    VerifyParts,
    VersionAnswered,
    VersionsChanged,
    WriteSeries,
)
from shoal_server.core.publications.readers import ReaderReport
from shoal_server.core.publications.records import (
    PublishedSegment,
    PublishedVersion,
    Publisher,
    SeriesHead,
    StoredSeries,
)
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.etcd.records.series import encode_version

ONE = Publisher(generation=1)


class Run:
    """A series, the time, and the effects not handled yet."""

    def __init__(self, stored: StoredSeries | None = None) -> None:
        self.now_s = 1000.0
        self.series = PublishedSeries("j/w", stored or StoredSeries(), self.now_s)
        self.effects: list[Effect] = []

    def submit(self, event: Event) -> list[Effect]:
        found = self.series.step(event, self.now_s)
        self.effects += found
        return found

    def settle(self) -> None:
        """Carry out writes, and accept all parts as valid, until no effect is left."""
        while self.effects:
            effect = self.effects.pop(0)
            if isinstance(effect, WriteSeries):
                self.submit(HeadWritten())
            elif isinstance(effect, VerifyParts):
                self.submit(verified(effect))

    def begin(self, publisher: Publisher = ONE, **more: object) -> Effect:
        found = self.submit(
            BeginRequested(**{"call": "b", "publisher": publisher, "keep": 2, "copies": 2} | more)  # type: ignore[arg-type]
        )
        if found and isinstance(found[0], WriteSeries):
            found = self.submit(HeadWritten())
        answer = found[0]
        self.effects.clear()
        return answer

    def publish(self, publication: int, publisher: Publisher = ONE) -> int:
        """Publish a version of one rank, and return its number."""
        self.begin(publisher)
        self.submit(contributed(publication, epoch=self.series.head.epoch, publisher=publisher))
        self.settle()
        return self.series.head.number


def verified(effect: VerifyParts) -> PartsVerified:
    return PartsVerified(
        epoch=effect.epoch,
        publication=effect.publication,
        layout_digest=b"layout",
        segments=tuple(part.segment for part in effect.parts),
    )


def contributed(
    publication: int,
    *,
    rank: int = 0,
    world: int = 1,
    epoch: int = 1,
    publisher: Publisher = ONE,
    call: str = "",
    content: str = "",
    step: int = 7,
) -> PartContributed:
    digest = f"{content or publication} {rank} {epoch}".encode()
    part = PublicationPart(
        rank=rank,
        world=world,
        segment=PublishedSegment(digest=digest, num_bytes=8, holders=("s1", "s2")),
        layout=b"",
        layout_key=b"k",
        step=step,
    )
    return PartContributed(
        call=call or f"{publication}.{rank}",
        publisher=publisher,
        epoch=epoch,
        publication=publication,
        part=part,
    )


def refusals(effects: Iterable[Effect]) -> dict[object, PublicationRefusal]:
    return {each.call: each.refusal for each in effects if isinstance(each, RequestRefused)}


def test_callers_are_answered_once_the_record_is_durable() -> None:
    run = Run()
    (write,) = run.submit(BeginRequested(call="b", publisher=ONE, keep=2, copies=2))
    assert isinstance(write, WriteSeries) and write.head.epoch == 1
    assert run.submit(HeadWritten())[0] == PublicationBegun(call="b", epoch=1, head=0)
    (verify,) = run.submit(contributed(1))
    assert isinstance(verify, VerifyParts)
    (write,) = run.submit(verified(verify))
    assert isinstance(write, WriteSeries) and write.head.kept == (1,)
    assert run.series.head.number == 0
    answer, notified = run.submit(HeadWritten())
    assert (
        isinstance(answer, VersionAnswered) and answer.call == "1.0" and answer.version.number == 1
    )
    assert notified == NotifyWatchers()


def test_one_write_is_in_progress_at_a_time() -> None:
    """Requests that arrive meanwhile are decided by the record as it is after the write."""
    run = Run()
    run.submit(BeginRequested(call="old", publisher=ONE, keep=2, copies=2))
    later = Publisher(generation=2)
    assert run.submit(BeginRequested(call="new", publisher=later, keep=2, copies=2)) == []
    assert run.submit(BeginRequested(call="late", publisher=ONE, keep=2, copies=2)) == []
    effects = run.submit(HeadWritten())
    assert [type(each) for each in effects] == [PublicationBegun, NotifyWatchers, WriteSeries]
    effects = run.submit(HeadWritten())
    assert refusals(effects) == {"late": PublicationRefusal.STALE_EPOCH}
    assert run.series.head.epoch == 2


def test_a_coordinator_that_leads_no_more_does_not_send_a_new_publisher_away() -> None:
    """The publisher has its epoch from the next leader."""
    run = Run()
    run.begin()
    later = replace(contributed(1), epoch=2, publisher=Publisher(generation=2))
    assert refusals(run.submit(later)) == {"1.0": PublicationRefusal.LATER_EPOCH}
    earlier = replace(contributed(1), publisher=Publisher(generation=0))
    assert refusals(run.submit(earlier)) == {"1.0": PublicationRefusal.STALE_EPOCH}


def test_a_commit_of_an_epoch_that_has_ended_is_not_written() -> None:
    run = Run()
    run.begin()
    (verify,) = run.submit(contributed(1))
    run.submit(BeginRequested(call="n", publisher=Publisher(generation=2), keep=2, copies=2))
    assert isinstance(verify, VerifyParts)
    assert run.submit(verified(verify)) == []
    effects = run.submit(HeadWritten())
    assert refusals(effects) == {"1.0": PublicationRefusal.STALE_EPOCH}
    assert run.series.head.number == 0 and not any(isinstance(e, WriteSeries) for e in effects)


@pytest.mark.parametrize("verified_at", [0, 1, 2])
def test_a_publication_of_a_run_that_is_over_is_not_written(verified_at: int) -> None:
    """The job is started over while servers are asked for the publication's segments. Their answer
    comes before its versions are dropped, during that, or later."""
    run = Run()
    run.publish(1)
    (verify,) = run.submit(contributed(2))
    assert isinstance(verify, VerifyParts)
    run.submit(PinRequested(call="p", number=1, pins=True))
    run.submit(ClearRequested(call="c"))
    events: list[Event] = [HeadWritten(), HeadWritten()]
    events.insert(verified_at, verified(verify))
    effects = [effect for event in events for effect in run.submit(event)]
    assert refusals(effects) == {"2.0": PublicationRefusal.ABANDONED}
    assert Cleared(call="c") in effects
    assert (run.series.head.kept, run.series.head.number) == ((), 1)
    assert refusals(run.submit(contributed(2, call="again"))) == {
        "again": PublicationRefusal.ABANDONED
    }


def test_a_complete_publication_abandons_older_ones() -> None:
    """Publications become versions in order."""
    run = Run()
    run.begin()
    run.submit(contributed(1, world=2))
    run.submit(contributed(2, world=2))
    run.submit(contributed(2, rank=1, world=2))
    run.settle()
    assert run.series.head.number == 1 and run.series.head.publication == 2
    effects = run.submit(contributed(1, rank=1, world=2))
    assert refusals(effects) == {"1.1": PublicationRefusal.ABANDONED}


def test_parts_with_different_steps_abandon_the_publication() -> None:
    run = Run()
    run.begin()
    run.submit(contributed(1, world=2))
    effects = run.submit(contributed(1, rank=1, world=2, step=8))
    assert refusals(effects) == {
        "1.0": PublicationRefusal.ABANDONED,
        "1.1": PublicationRefusal.ABANDONED,
    }
    assert "step" in next(e.what for e in effects if isinstance(e, RequestRefused))


def test_another_part_of_a_complete_publication_is_refused_alone() -> None:
    """The publication is not abandoned: it becomes a version with the first part, whose segment is
    needed."""
    run = Run()
    run.begin()
    run.submit(contributed(1))
    effects = run.submit(contributed(1, content="another", call="again"))
    assert refusals(effects) == {"again": PublicationRefusal.INVALID}
    run.settle()
    assert run.series.head.number == 1


def failed(publication: int, publisher: Publisher = ONE) -> PartFailed:
    return PartFailed(publisher=publisher, publication=publication, rank=1, why="no memory left")


def test_a_publication_without_a_rank_that_failed_is_abandoned_at_once() -> None:
    """The rank may fail before the others send their parts."""
    run = Run()
    run.begin()
    run.submit(contributed(1, world=2))
    (refused,) = run.submit(failed(1))
    assert isinstance(refused, RequestRefused) and refused.call == "1.0"
    assert (refused.refusal, refused.seen) == (PublicationRefusal.ABANDONED, "no memory left")
    assert run.submit(failed(2)) == []
    assert refusals(run.submit(contributed(2, world=2))) == {"2.0": PublicationRefusal.ABANDONED}
    assert run.series.is_abandoned(ONE, 2)
    assert not run.series.is_abandoned(Publisher(generation=2), 2)


def test_a_publication_that_is_complete_or_of_a_later_publisher_is_not_abandoned() -> None:
    """The rank does not know that its part has arrived, or that it was replaced."""
    run = Run()
    run.begin()
    run.submit(contributed(1, world=2))
    run.submit(contributed(1, rank=1, world=2))
    assert run.submit(failed(1)) == []
    assert not run.series.is_abandoned(ONE, 1)
    run.settle()
    assert run.submit(failed(1)) == []
    assert not run.series.is_abandoned(ONE, 1)
    later = Publisher(generation=2)
    run.begin(later)
    run.submit(contributed(2, world=2, epoch=2, publisher=later))
    assert run.submit(failed(2)) == []
    run.submit(contributed(2, rank=1, world=2, epoch=2, publisher=later))
    run.settle()
    assert run.series.head.number == 2


def test_an_incomplete_publication_is_abandoned() -> None:
    """Waiting ranks send their parts again and again meanwhile."""
    run = Run()
    run.begin()
    for _ in range(3):
        run.submit(contributed(1, world=2))
        run.now_s += ABANDONED_AFTER_S / 3
        assert run.submit(TimePassed()) == []
    run.now_s += 1
    (refused,) = run.submit(TimePassed())
    assert isinstance(refused, RequestRefused) and refused.seen == "no part of ranks 1"
    for number in range(2, 3 + MAX_PENDING):
        found = run.submit(contributed(number, world=2))
    assert refusals(found) == {"2.0": PublicationRefusal.ABANDONED}


def test_a_part_may_take_as_long_as_its_rank_tries_to_send_it() -> None:
    """The segment is sent over a slow link. Waiting ranks send their parts again meanwhile."""
    run = Run()
    run.begin()
    for attempt in range(int(TIMEOUT_S / PART_S)):
        run.submit(contributed(1, world=2, call=f"attempt {attempt}"))
        run.now_s += PART_S
        assert refusals(run.submit(TimePassed())) == {}
    run.submit(contributed(1, rank=1, world=2))
    run.settle()
    assert run.series.head.number == 1


def test_parts_of_a_rejected_publication_are_refused() -> None:
    run = Run()
    run.begin()
    run.submit(contributed(1, world=2))
    run.submit(contributed(1, rank=1, world=2))
    run.submit(ContributorLeft(call="1.1"))
    effects = run.submit(PartsRejected(epoch=1, publication=1, what="tensor w is not whole"))
    assert refusals(effects) == {"1.0": PublicationRefusal.ABANDONED}
    assert refusals(run.submit(contributed(1, call="again"))) == {
        "again": PublicationRefusal.ABANDONED
    }


def test_a_version_whose_record_exceeds_a_write_is_not_committed() -> None:
    """The publication is abandoned, and the next one is committed."""
    run = Run()
    run.begin()
    (check,) = run.submit(contributed(1))
    assert isinstance(check, VerifyParts)
    holders = tuple(f"{number:060}" for number in range(16))
    segments = (PublishedSegment(digest=b"d" * 32, num_bytes=8, holders=holders),) * 1100
    effects = run.submit(replace(verified(check), segments=segments))
    assert refusals(effects) == {"1.0": PublicationRefusal.ABANDONED}
    run.settle()
    assert run.publish(2) == 1


def test_a_write_revises_no_more_than_etcd_takes() -> None:
    """Versions that are left are revised by the next change; a record that would be too large
    stays as it was."""
    segments = {n: (PublishedSegment(digest=b"d%d" % n, num_bytes=8),) * 1000 for n in range(1, 4)}
    versions = {n: replace(held_by(), number=n, segments=segments[n]) for n in segments}
    run = Run(StoredSeries(head=SeriesHead(number=3, kept=(1, 2, 3), keep=3), versions=versions))

    def grown(number: int, copies: int) -> tuple[PublishedSegment, ...]:
        holders = tuple(f"{each:060}" for each in range(copies))
        return tuple(replace(segment, holders=holders) for segment in segments[number])

    replaced = {1: grown(1, 8), 2: grown(2, 8), 3: grown(3, 17)}
    for expected in (1, 2):
        (write, *_) = run.submit(VersionsChanged(replaced=replaced))
        assert isinstance(write, WriteSeries)
        assert [each.number for each in write.put] == [expected]
        sizes = [len(encode_version(each)) for each in write.put]
        assert sum(sizes) <= sum(each.record_bytes for each in write.put) <= MAX_RECORD_BYTES
        run.settle()
    assert run.submit(VersionsChanged(replaced=replaced)) == []


def test_a_repeated_part_gets_its_version_in_a_later_epoch() -> None:
    """The publication of the part was committed before its epoch ended."""
    run = Run()
    run.publish(1)
    run.begin(Publisher(generation=2))
    (answer,) = run.submit(contributed(1))
    assert isinstance(answer, VersionAnswered) and answer.version.number == 1


def test_leased_versions_may_exceed_the_number_kept_by_one() -> None:
    """A publication of one more version is refused as OVERLOADED until a lease ends."""
    run = Run()
    for publication in (1, 2, 3):
        run.publish(publication)
        run.series.report(ReaderReport(reader=f"r{publication}", leased=(publication,)), run.now_s)
    assert run.series.head.kept == (1, 2, 3)
    refused = run.begin()
    assert isinstance(refused, RequestRefused) and refused.refusal is PublicationRefusal.OVERLOADED
    assert "version 1 by r1" in refused.seen
    run.series.report(ReaderReport(reader="r1", sequence=1), run.now_s)
    run.series.report(ReaderReport(reader="r2", sequence=1), run.now_s)
    assert isinstance(run.begin(), PublicationBegun)
    assert run.series.head.kept == (2, 3)


def test_a_version_that_is_being_dropped_is_not_leased() -> None:
    run = Run()
    for publication in (1, 2):
        run.publish(publication)
    run.submit(contributed(3))
    run.submit(PartsVerified(epoch=1, publication=3, layout_digest=b"", segments=()))
    run.effects.clear()
    assert run.series.report(ReaderReport(reader="r", leased=(1, 2)), run.now_s) == ([2], [1])


def test_a_report_that_arrives_late_ends_no_lease() -> None:
    run = Run()
    run.publish(1)
    run.series.report(ReaderReport(reader="r", leased=(1,), sequence=2), run.now_s)
    run.series.report(ReaderReport(reader="r", sequence=1), run.now_s)
    assert run.series.readers.leased(run.now_s) == {1}


def test_a_report_with_a_lower_sequence_counts_once_the_leases_have_ended() -> None:
    run = Run()
    run.publish(1)
    run.series.report(ReaderReport(reader="r", leased=(1,), sequence=2), run.now_s)
    run.now_s += HELD_S
    again = ReaderReport(reader="r", leased=(1,), sequence=1)
    assert run.series.report(again, run.now_s) == ([1], [])


def test_a_new_leader_keeps_all_versions_while_earlier_leases_may_last() -> None:
    before = Run()
    for publication in (1, 2):
        before.publish(publication)
    run = Run(before.series.stored)
    run.now_s += HELD_S - 1
    run.publish(3)
    assert run.series.head.kept == (1, 2, 3)
    run.now_s += 2
    run.submit(TimePassed())
    run.settle()
    assert run.series.head.kept == (2, 3)


def test_under_new_leaders_publications_continue_within_a_bound() -> None:
    """Leases of earlier terms may be on the versions that a new leader finds. A version of its own
    replaces the one before. So the number of versions stays bounded over any number of terms."""
    stored = StoredSeries()
    for term in range(8):
        run = Run(stored)
        if term:
            run.now_s += 1.0
        for publication in range(100 * term + 1, 100 * term + 4):
            if isinstance(run.begin(), RequestRefused):
                break
            run.publish(publication)
        stored = run.series.stored
        if term == 1:
            assert run.series.head.kept == (2, 3, 6)
        assert len(stored.head.kept) <= 2 * 2 + 2
    assert isinstance(run.begin(), RequestRefused)
    run.now_s += HELD_S
    assert isinstance(run.begin(), PublicationBegun)
    assert len(run.series.head.kept) == 2


def test_a_rollback_is_a_new_version_with_the_old_bytes() -> None:
    run = Run()
    for publication in (1, 2):
        run.publish(publication)
    old = run.series.versions[1]
    run.submit(RollbackRequested(call="r", to=1))
    run.settle()
    back = run.series.versions[3]
    assert (back.rolled_back_to, back.digest, back.epoch) == (1, old.digest, 1)
    assert refusals(run.submit(RollbackRequested(call="r", to=7))) == {"r": PublicationRefusal.GONE}
    assert run.publish(3) == 4


def test_a_repeated_rollback_has_the_answer_of_the_first() -> None:
    """The first request has dropped the old version, since two are kept."""
    run = Run()
    for publication in (1, 2):
        run.publish(publication)
    run.submit(RollbackRequested(call="r", to=1))
    run.settle()
    assert 1 not in run.series.versions
    effects = run.submit(RollbackRequested(call="again", to=1))
    (answer,) = (each for each in effects if isinstance(each, VersionAnswered))
    assert (answer.call, answer.version.number) == ("again", 3)
    assert refusals(run.submit(RollbackRequested(call="n", to=0))) == {"n": PublicationRefusal.GONE}


def stored(*numbers: int, pinned: Iterable[int] = (), keep: int = 2) -> StoredSeries:
    versions = {
        number: PublishedVersion(
            number=number,
            epoch=1,
            publication=number,
            step=0,
            layout_digest=b"",
            segments=(),
            created_unix_s=0.0,
            is_pinned=number in pinned,
        )
        for number in numbers
    }
    return StoredSeries(head=SeriesHead(kept=numbers, keep=keep), versions=versions)


def test_newest_leased_and_pinned_versions_are_kept() -> None:
    for leased, pinned, keep, dropped in (
        ((), (), 2, [1, 2, 3]),
        ((2,), (), 2, [1, 3, 4]),
        ((2, 3), (), 2, [1, 4]),
        ((), (1,), 2, [2, 3]),
        ((1,), (1,), 2, [2, 3]),
        ((), (5,), 2, [1, 2]),
        ((), (), 9, []),
    ):
        found = keeping.droppable(stored(1, 2, 3, 4, 5, pinned=pinned, keep=keep), leased)
        assert found == dropped, (leased, pinned, keep)


def test_a_series_drops_nothing_until_it_has_more_than_keep_versions() -> None:
    for keep in range(1, 10):
        for newest in range(1, 12):
            numbers = range(1, newest + 1)
            found = keeping.droppable(stored(*numbers, keep=keep), ())
            assert found == [*numbers][: max(newest - keep, 0)], (keep, newest)


SERVERS = [StoreServer(f"s{n}", "1", host=f"h{n // 2}") for n in range(4)]


def test_ranks_begin_at_different_servers_and_copies_are_on_other_hosts() -> None:
    assert [servers_for(rank, 2, SERVERS) for rank in range(3)] == [
        ["s0", "s2"],
        ["s1", "s2"],
        ["s2", "s0"],
    ]
    assert servers_for(0, 1, SERVERS, near="h1") == ["s2"]
    leaving = [replace(each, is_leaving=each.server_id != "s3") for each in SERVERS]
    assert servers_for(0, 2, leaving) == ["s3"]
    assert servers_for(0, 2, []) == []


def held_by(*holders: str, digest: bytes = b"d") -> PublishedVersion:
    segment = PublishedSegment(digest=digest, num_bytes=1, holders=holders)
    return replace(stored(1).versions[1], segments=(segment,))


def test_a_server_that_is_gone_is_replaced_after_a_time() -> None:
    holders, version = Holders(), held_by("s0", "s1")
    holders.note_registered(SERVERS, [version], 0.0)
    assert holders.questions([version]) == {"s0": [b"d"], "s1": [b"d"]}
    for server in SERVERS[:2]:
        holders.note(server, [b"d"], HoldsAnswer(held=[b"d"]))
    assert holders.questions([version]) == {}
    holders.note_registered(SERVERS[1:], [version], 1.0)
    assert holders.replaced(version, 2, 1.0 + REPLACED_AFTER_S - 1) is None
    changed = holders.replaced(version, 2, 1.0 + REPLACED_AFTER_S)
    assert changed is not None and changed.segments[0].holders == ("s1", "s2")


def test_a_version_is_durable_while_all_its_holders_have_it_on_disk() -> None:
    """A new holder still has to write it; a holder that is removed changes nothing."""
    run = Run()
    run.publish(1)

    def change(**changes: object) -> bool:
        run.submit(VersionsChanged(**changes))  # type: ignore[arg-type]
        run.settle()
        return run.series.versions[1].is_durable

    def held(*holders: str) -> dict[int, tuple[PublishedSegment, ...]]:
        (segment,) = run.series.versions[1].segments
        return {1: (replace(segment, holders=holders),)}

    assert change(durable=frozenset({1}))
    assert not change(replaced=held("s2", "s3"))
    assert change(durable=frozenset({1}))
    assert change(replaced=held("s3"))
    assert not change(replaced=held("s3", "s4"), durable=frozenset({1}))


def test_a_segment_is_not_on_a_disk_that_was_replaced() -> None:
    holders, version = Holders(), held_by("s0")
    holders.note(SERVERS[0], [b"d"], HoldsAnswer(held=[b"d"], durable=[b"d"]))
    assert holders.durable([version]) == [1]
    again = replace(SERVERS[0], incarnation="2")
    holders.note(again, [b"d"], HoldsAnswer(held=[b"d"]))
    assert holders.durable([version]) == []


def test_a_version_is_lost_once_no_server_has_had_it_for_a_time() -> None:
    """A restarted server has the same id, but no segments."""
    holders, version = Holders(), held_by("s0")
    holders.note_registered(SERVERS, [version], 0.0)
    holders.note(SERVERS[0], [b"d"], HoldsAnswer(held=[b"d"]))
    holders.note_versions([version], 0.0)
    again = [replace(SERVERS[0], incarnation="2"), *SERVERS[1:]]
    holders.note_registered(again, [version], 1.0)
    holders.note_versions([version], 1.0)
    assert holders.lost([version], 1000.0) == []  # the new process was not asked yet
    holders.note(again[0], [b"d"], HoldsAnswer(held=[]))
    holders.note_versions([version], 2.0)
    assert holders.replaced(version, 2, 1000.0) is None  # no server has a copy to fetch
    assert holders.lost([version], 2.0 + LOST_AFTER_S - 1) == []
    assert holders.lost([version], 2.0 + LOST_AFTER_S) == [1]


def test_a_version_is_not_lost_while_a_server_reads_it_from_its_disk() -> None:
    """Reading many versions takes longer than a version without any server is kept."""
    holders, version = Holders(), replace(held_by("s0", "s1"), is_durable=True)
    for now_s in (0.0, DURABLE_LOST_AFTER_S + 1.0):
        holders.note_registered(SERVERS, [version], now_s)
        for server in SERVERS[:2]:
            holders.note(server, [b"d"], HoldsAnswer(held=[], durable=[b"d"], writes_to_disk=True))
        holders.note_versions([version], now_s)
        assert holders.lost([version], now_s) == []
    holders.note_registered(SERVERS[2:], [version], 1000.0)
    holders.note_versions([version], 1000.0)
    assert holders.lost([version], 1000.0 + DURABLE_LOST_AFTER_S) == [1]


def test_a_leaving_server_is_no_holder_once_others_have_its_segments() -> None:
    holders, version = Holders(), held_by("s0", "s1")
    servers = [replace(SERVERS[0], is_leaving=True), *SERVERS[1:]]
    holders.note_registered(servers, [version], 0.0)
    for server in servers[:2]:
        holders.note(server, [b"d"], HoldsAnswer(held=[b"d"]))
    changed = holders.replaced(version, 2, 0.0)
    assert changed is not None and changed.segments[0].holders == ("s0", "s1", "s2")
    assert holders.replaced(changed, 2, 0.0) is None
    holders.note(servers[2], [b"d"], HoldsAnswer(held=[b"d"]))
    done = holders.replaced(changed, 2, 0.0)
    assert done is not None and done.segments[0].holders == ("s1", "s2")


def test_a_leaving_server_does_not_wait_for_one_that_is_away() -> None:
    """It may have the only copy, and ends soon."""
    holders, version = Holders(), held_by("s0", "s1")
    holders.note_registered(SERVERS, [version], 0.0)
    for server in SERVERS[:2]:
        holders.note(server, [b"d"], HoldsAnswer(held=[b"d"]))
    leaving = [replace(SERVERS[1], is_leaving=True), *SERVERS[2:]]
    holders.note_registered(leaving, [version], 1.0)
    changed = holders.replaced(version, 2, 1.0)
    assert changed is not None and changed.segments[0].holders == ("s0", "s1", "s2", "s3")


def test_parts_of_two_cuts_make_no_version() -> None:
    run = Run()
    run.begin()
    parts = [contributed(1, rank=rank, world=2) for rank in range(2)]
    for each in parts:
        run.submit(replace(each, part=replace(each.part, tables_cut=b"first")))
    run.settle()
    assert run.series.versions[1].tables_cut == b"first"
    parts = [contributed(2, rank=rank, world=2, call=f"c{rank}") for rank in range(2)]
    for each, cut in zip(parts, (b"second", b"third"), strict=True):
        effects = run.submit(replace(each, part=replace(each.part, tables_cut=cut)))
    refused = [each for each in effects if isinstance(each, RequestRefused)]
    assert refused and "cut of the tables" in refused[0].what
    run.effects.clear()
    assert run.publish(3) == 2, "the number was not used"
