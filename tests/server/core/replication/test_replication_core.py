"""Decisions of one server about its shards, event by event."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.effects import (
    AcceptRequest,
    AcknowledgeVersion,
    AckRefusalReason,
    AdoptImage,
    DropShard,
    Effect,
    LeadShard,
    LoadJournal,
    MakeImage,
    OpenLink,
    RefreshShardRecord,
    RefuseVersion,
    ResumePushes,
    ReviseShardRecord,
    SendReply,
    SendRequest,
    SetFollowers,
    SetLease,
    SettleCopy,
    SetUnreplicated,
    StopPushes,
    WriteShardRecord,
)
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    BackupState,
    ChunkReceived,
    CopyUpToDate,
    ImageChunk,
    ImageInstalled,
    ImageStart,
    Offer,
    RecordsReceived,
    Reply,
    Request,
    UpdateMessage,
)
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent, led_from_disk

KEY = ("job", 0)
ME, B, C = Holder("a", "1"), Holder("b", "1"), Holder("c", "1")
LIMITS = ReplicationLimits(dead_after_s=100.0, announced_s=0.0)
E = TypeVar("E")


def record(
    primary: Holder = ME, *backups: Holder, epoch: int = 1, **more: object
) -> ShardAssignment:
    fields: dict[str, object] = {"content": ShardContent.PRESENT, **more}
    return ShardAssignment(  # type: ignore[arg-type]
        shard_id=0, epoch=epoch, primary=primary, backups=backups, **fields
    )


class World:
    """The core of one server, and the links that it opened."""

    def __init__(self, limits: ReplicationLimits = LIMITS) -> None:
        self.core = ReplicationCore(ME, limits)
        self.now_s = 0.0
        self.links: dict[Holder, int] = {}
        self.tell(ev.LeaseRenewed(0.0))

    def tell(self, event: ev.Event) -> list[Effect]:
        effects = self.core.step(event, self.now_s)
        self.links.update({e.peer: e.link for e in effects if isinstance(e, OpenLink)})
        return effects

    def assigned(self, assignment: ShardAssignment | None) -> list[Effect]:
        return self.tell(ev.ShardAssigned(KEY, assignment))

    def opened(self, peer: Holder) -> list[Effect]:
        return self.tell(ev.LinkOpened(peer, self.links[peer]))

    def broke(self, peer: Holder, *, gone: bool = True) -> list[Effect]:
        return self.tell(ev.LinkBroken(peer, self.links[peer], is_gone=gone))

    def answered(self, peer: Holder, reply: Reply) -> list[Effect]:
        return self.tell(ev.ReplyReceived(peer, self.links[peer], reply))

    def asks(self, version: int, level: ev.AckLevel = ev.AckLevel.REPLICATED) -> list[Effect]:
        return self.tell(ev.AckRequested("asked", KEY, 1, version, level))

    def led(self, *backups: Holder, **more: object) -> None:
        """Lead the shard at version 1, with these backups in step and up to date."""
        self.assigned(record(ME, *backups, **{**more, "content": ShardContent.NONE}))
        self.tell(ev.ShardCreated(KEY, 1, 1))
        self.assigned(record(ME, *backups, **more))
        self.tell(ev.ShardRecordWritten(KEY))
        for backup in backups:
            self.opened(backup)
            self.answered(backup, BackupState(KEY, 1, 1, 1, 1))
            self.answered(backup, ImageInstalled(KEY, 1, 0, 1))

    def told(self, request: Request, peer: Holder = B, link: int = 7) -> list[Effect]:
        return self.tell(ev.RequestReceived(peer, link, request))

    def backs(self, version: int = 3) -> None:
        """Hold a copy, in step, of the shard that B leads."""
        self.assigned(record(B, joining=ME))
        self.tell(ev.IncomingLinkOpened(B, 7))
        self.told(ImageStart(KEY, 1, 1, 5, version, 1))
        self.told(ImageChunk(KEY, 5, 0))
        self.tell(ev.ImageRestored(KEY, 5))
        self.assigned(record(B, ME))

    def adopted(self, run: str) -> None:
        """Follow B in this run of the job, from version 3 on."""
        self.tell(ev.ShardAssigned(KEY, record(B, ME), run))
        self.tell(ev.IncomingLinkOpened(B, 7))
        self.told(ImageStart(KEY, 1, 1, 5, 3, 1, run=run))
        self.told(ImageChunk(KEY, 5, 0))
        self.tell(ev.ImageRestored(KEY, 5))


@dataclass(frozen=True)
class Applied:
    """The record of a push."""

    version: int
    num_bytes: int = 10


def applied(version: int) -> ev.PushApplied:
    return ev.PushApplied(KEY, Applied(version))


def only(kind: type[E], effects: Iterable[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def replies(effects: Iterable[Effect]) -> list[Reply]:
    return [answer.reply for answer in only(SendReply, effects)]


def accepted(effects: Iterable[Effect]) -> list[Request]:
    return [effect.request for effect in only(AcceptRequest, effects)]


def requests(effects: Iterable[Effect]) -> list[Request]:
    return [send.request for send in only(SendRequest, effects)]


# --- as primary ---


def test_a_push_is_acknowledged_once_every_backup_has_it() -> None:
    world = World()
    world.led(B, C)
    assert requests(world.tell(applied(2))) == [UpdateMessage(KEY, 1, 2)] * 2
    assert world.asks(2) == []
    assert only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    assert only(AcknowledgeVersion, world.answered(C, RecordsReceived(KEY, 1, 2))) == [
        AcknowledgeVersion("asked")
    ]


class Caller:
    """A token that a weak reference can follow."""


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the answer"])
def test_nothing_is_kept_of_an_abandoned_wait(is_late: bool) -> None:
    """Not even if the answer was on its way when the caller gave up."""
    world = World()
    world.led(B)
    world.tell(applied(2))
    caller = Caller()
    kept = weakref.ref(caller)
    world.tell(ev.AckRequested(caller, KEY, 1, 2, ev.AckLevel.REPLICATED))
    if not is_late:
        world.tell(ev.AckAbandoned(caller, KEY))
    answers = only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2)))
    assert answers == ([AcknowledgeVersion(caller)] if is_late else [])
    if is_late:
        world.tell(ev.AckAbandoned(caller, KEY))
    del caller, answers
    assert kept() is None


@pytest.mark.parametrize("level", list(ev.AckLevel))
def test_nothing_is_acknowledged_beyond_the_lease(level: ev.AckLevel) -> None:
    """The lease counts from the sending of its last renewal; waiting callers are refused, and a
    renewal ends this."""
    world = World()
    world.core.leading.keeps_journal = True
    world.led(B, on_disk="a")
    world.tell(ev.VersionJournaled(KEY, 1))
    world.tell(applied(2))
    world.asks(2)
    world.now_s = LIMITS.fenced_after_s - 0.01
    assert only(RefuseVersion, world.tell(ev.WakeTimeReached())) == []
    world.now_s = LIMITS.fenced_after_s
    assert world.core.wakes_s() <= world.now_s
    assert only(RefuseVersion, world.tell(ev.WakeTimeReached())) == [
        RefuseVersion("asked", AckRefusalReason.FENCED)
    ]
    assert only(RefuseVersion, world.asks(1, level)) == [
        RefuseVersion("asked", AckRefusalReason.FENCED)
    ]
    world.tell(ev.LeaseRenewed(world.now_s - 1.0))
    assert only(AcknowledgeVersion, world.asks(1, level)) == [AcknowledgeVersion("asked")]


def test_pushes_outlast_ten_minutes_without_etcd() -> None:
    """The default limits of servers allow this. A coordinator that sees this server missing all the
    time, because it alone is cut off, takes it for dead only after it has stopped."""
    limits = ReplicationLimits()
    world = World(limits)
    world.led()
    absences = ServerAbsences[Holder](limits.longest_gap_s)
    acknowledged_s = dead_s = 0.0
    while not dead_s:
        world.now_s += 1.0
        world.tell(ev.WakeTimeReached())
        if only(AcknowledgeVersion, world.asks(1)):
            acknowledged_s = world.now_s
        if absences.away_s([ME], world.now_s)[ME] >= limits.dead_after_s:
            dead_s = world.now_s
    assert acknowledged_s > 660.0
    assert dead_s - acknowledged_s > acknowledged_s / 10


def test_a_backup_counts_until_the_record_has_let_it_go() -> None:
    """The backup is lost, and the write in progress: nothing is acknowledged before it is done."""
    world = World()
    world.led(B)
    assert only(WriteShardRecord, world.broke(B)) == [WriteShardRecord(KEY)]
    world.tell(applied(2))
    assert world.asks(2) == []
    assert world.core.revised(KEY, record(ME, B), world.now_s) == record(ME)
    done = [*world.assigned(record(ME)), *world.tell(ev.ShardRecordWritten(KEY))]
    assert only(AcknowledgeVersion, done) == [AcknowledgeVersion("asked")]


def joined(world: World) -> None:
    """Give B the shard; the write that puts B in step is in progress."""
    world.led(joining=B)
    world.opened(B)
    assert only(MakeImage, world.answered(B, BackupState(KEY, 1))) == [MakeImage(KEY, 1)]
    assert requests(world.tell(ev.ImageMade(KEY, 1, 1, 1))) == [
        ImageStart(KEY, 1, 1, 1, 1, 1),
        ImageChunk(KEY, 1, 0),
    ]
    assert only(WriteShardRecord, world.answered(B, ImageInstalled(KEY, 1, 1, 1))) == [
        WriteShardRecord(KEY)
    ]
    assert world.core.revised(KEY, record(ME, joining=B), world.now_s) == record(ME, B)


def test_a_joiner_counts_as_long_as_a_write_may_put_it_in_step() -> None:
    """The joiner is lost while etcd has not answered: the record may name it at any moment, and it
    may take over then. So it must have every acknowledged push."""
    world = World()
    joined(world)
    world.broke(B)
    world.tell(applied(2))
    assert world.asks(2) == []
    assert only(AcknowledgeVersion, world.assigned(record(ME, B))) == []
    assert only(WriteShardRecord, world.tell(ev.ShardRecordWritten(KEY))) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, record(ME, B), world.now_s) == record(ME)
    assert only(AcknowledgeVersion, world.assigned(record(ME))) == [AcknowledgeVersion("asked")]


def test_a_joiner_that_is_named_again_while_a_write_is_under_way_is_asked_once_more() -> None:
    """The primary cannot reach etcd. The coordinator names another joiner, the first one drops its
    copy and is named again, all before the primary knows the outcome of its write."""
    world = World()
    joined(world)
    world.answered(B, BackupRefused(KEY, 1, BackupRefusalReason.NO_COPY, "the copy was dropped"))
    world.assigned(record(ME, joining=C))
    asked = world.assigned(record(ME, joining=B))
    assert requests(asked) == [Offer(KEY, 1, 1)]
    assert only(MakeImage, world.answered(B, BackupState(KEY, 1))) == [MakeImage(KEY, 2)]
    world.tell(applied(2))
    assert world.asks(2) == []
    world.tell(ev.ShardRecordWritten(KEY))
    world.tell(ev.ImageMade(KEY, 2, 2, 1))
    assert WriteShardRecord(KEY) in world.answered(B, ImageInstalled(KEY, 1, 2, 2))
    assert world.core.revised(KEY, record(ME, joining=B), world.now_s) == record(ME, B)


def test_an_image_goes_on_from_the_chunk_that_was_acknowledged() -> None:
    world = World()
    world.led(joining=B)
    world.opened(B)
    world.answered(B, BackupState(KEY, 1))
    sent = requests(world.tell(ev.ImageMade(KEY, 1, 1, 9)))
    assert sent[1:] == [ImageChunk(KEY, 1, i) for i in range(LIMITS.window_chunks)]
    assert requests(world.answered(B, ChunkReceived(KEY, 1, 2))) == [
        ImageChunk(KEY, 1, 4),
        ImageChunk(KEY, 1, 5),
    ]
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.tell(ev.WakeTimeReached())
    assert requests(world.opened(B)) == [Offer(KEY, 1, 1)]
    again = requests(world.answered(B, BackupState(KEY, 1, image=1, next_chunk=3)))
    assert again == [
        ImageStart(KEY, 1, 1, 1, 1, 9, 3),
        *(ImageChunk(KEY, 1, i) for i in range(3, 3 + LIMITS.window_chunks)),
    ]


def test_pushes_go_on_from_what_the_backup_has() -> None:
    """Updates in progress when the link broke are sent again, and no others."""
    world = World()
    world.led(B)
    for version in (2, 3, 4):
        world.tell(applied(version))
    world.answered(B, RecordsReceived(KEY, 1, 2))
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.tell(ev.WakeTimeReached())
    world.opened(B)
    assert requests(world.answered(B, BackupState(KEY, 1, 1, 1, 3))) == [CopyUpToDate(KEY, 1, 3)]
    assert requests(world.answered(B, ImageInstalled(KEY, 1, 0, 3))) == [UpdateMessage(KEY, 1, 4)]


def test_what_was_not_kept_is_in_the_image_of_who_comes_later() -> None:
    """Updates from the time without followers are not kept, so even a copy that lacks one of them
    needs an image."""
    world = World()
    world.led()
    world.tell(applied(2))
    world.assigned(record(ME, joining=B))
    world.opened(B)
    effects = world.answered(B, BackupState(KEY, 1, copy_epoch=1, born=1, version=1))
    assert (requests(effects), only(MakeImage, effects)) == ([], [MakeImage(KEY, 1)])


@pytest.mark.parametrize(
    "holds",
    [
        BackupState(KEY, 1, copy_epoch=1, born=9, version=1),
        BackupState(KEY, 1, copy_epoch=9, born=1, version=1),
        BackupState(KEY, 1, copy_epoch=1, born=1, version=2),
    ],
    ids=["other first values", "an epoch of another line", "more than the primary has"],
)
def test_a_copy_of_another_history_is_replaced(holds: BackupState) -> None:
    world = World()
    world.led(joining=B)
    world.opened(B)
    effects = world.answered(B, holds)
    assert (requests(effects), only(MakeImage, effects)) == ([], [MakeImage(KEY, 1)])


def test_the_answers_of_a_link_that_is_over_are_none_of_the_next_one() -> None:
    world = World()
    world.led(B)
    old = world.links[B]
    world.tell(applied(2))
    world.asks(2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.tell(ev.WakeTimeReached())
    assert world.links[B] != old
    assert world.tell(ev.ReplyReceived(B, old, RecordsReceived(KEY, 1, 2))) == []


def held(world: World, version: int, peer: Holder = B) -> list[Effect]:
    return world.tell(ev.RecordDelivered(peer, world.links[peer], KEY, 1, version))


def test_a_push_was_received_once_it_lies_in_the_memory_of_every_backup() -> None:
    """Backups read their memory in any case. Records are kept for them until they have."""
    world = World()
    world.led(B, C)
    world.tell(applied(2))
    world.asks(2)
    assert only(AcknowledgeVersion, held(world, 2)) == []
    assert only(AcknowledgeVersion, held(world, 2, C)) == [AcknowledgeVersion("asked")]
    assert only(SetUnreplicated, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    assert only(SetUnreplicated, world.answered(C, RecordsReceived(KEY, 1, 2))) == [
        SetUnreplicated(KEY, 0)
    ]


def test_what_came_before_must_have_been_received_too() -> None:
    """The earlier push may have gone over the link instead, and may be refused."""
    world = World()
    world.led(B)
    world.tell(applied(2))
    world.tell(applied(3))
    world.asks(3)
    assert only(AcknowledgeVersion, held(world, 3)) == []
    assert only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2))) == [
        AcknowledgeVersion("asked")
    ]


def test_what_lay_in_memory_when_a_link_broke_is_asked_for_once_more() -> None:
    """The push is acknowledged by then; the backup may lack it if its process is gone."""
    world = World()
    world.led(B)
    world.tell(applied(2))
    held(world, 2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.tell(ev.WakeTimeReached())
    world.opened(B)
    effects = world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    assert requests(effects) == [CopyUpToDate(KEY, 1, 1)]
    assert requests(world.answered(B, ImageInstalled(KEY, 1, 0, 1))) == [UpdateMessage(KEY, 1, 2)]


def test_a_shard_is_handed_over_once_its_successor_has_read_all() -> None:
    """The successor leads at once."""
    world = World()
    world.led(B)
    world.tell(applied(2))
    held(world, 2)
    world.assigned(record(ME, B, successor=B))
    assert only(WriteShardRecord, world.tell(ev.PushesStopped(KEY, 2))) == []
    assert only(WriteShardRecord, world.answered(B, RecordsReceived(KEY, 1, 2))) == [
        WriteShardRecord(KEY)
    ]


def test_who_is_told_of_a_later_epoch_refuses_at_once() -> None:
    """The primary may be cut off from etcd for long: its workers must not wait for that."""
    world = World()
    world.led(B)
    world.tell(applied(2))
    world.asks(2)
    effects = world.answered(B, BackupRefused(KEY, 1, BackupRefusalReason.OTHER_HOLDERS, "", 2))
    assert only(RefuseVersion, effects) == [RefuseVersion("asked", AckRefusalReason.DEPOSED)]
    assert only(StopPushes, effects) == [StopPushes(KEY)]
    assert only(RefuseVersion, world.asks(1)) == [RefuseVersion("asked", AckRefusalReason.DEPOSED)]


def test_pushes_are_taken_until_workers_have_heard_of_the_successor() -> None:
    """Workers connect to the successor meanwhile."""
    world = World(replace(LIMITS, announced_s=0.3))
    world.led(B)
    assert only(StopPushes, world.assigned(record(ME, B, successor=B))) == []
    assert world.core.wakes_s() == pytest.approx(0.3)
    world.now_s = 0.2
    world.tell(applied(2))
    assert only(StopPushes, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    world.now_s = 0.31
    assert only(StopPushes, world.tell(ev.WakeTimeReached())) == [StopPushes(KEY)]
    assert world.core.wakes_s() > 1.0


def test_shards_whose_successors_are_named_together_are_handed_over_together() -> None:
    """Pushes to all these shards pause once, even if the primary was delayed in between."""
    other = ("job", 1)
    world = World(replace(LIMITS, announced_s=0.3))
    world.led(B)
    world.tell(ev.ShardAssigned(other, replace(record(ME, B), shard_id=1)))
    world.tell(ev.ShardCreated(other, 1, 1))
    world.answered(B, BackupState(other, 1, 1, 1, 1))
    world.answered(B, ImageInstalled(other, 1, 0, 1))
    world.assigned(record(ME, B, successor=B))
    world.now_s = 0.02
    world.tell(ev.ShardAssigned(other, replace(record(ME, B, successor=B), shard_id=1)))
    world.now_s = 0.301
    assert only(StopPushes, world.tell(ev.WakeTimeReached())) == [
        StopPushes(KEY),
        StopPushes(other),
    ]
    assert world.core.wakes_s() > 1.0


def test_who_is_to_lead_is_connected_to_all_who_will_follow() -> None:
    """The first push then waits for the backups only, and not for links to them."""
    world = World()
    effects = world.assigned(record(B, ME, C, successor=ME))
    assert [effect.peer for effect in only(OpenLink, effects)] == [B, C]
    assert only(OpenLink, world.assigned(record(B, ME, C, successor=ME))) == []


def test_a_successor_that_is_lost_before_it_takes_over_is_not_waited_for() -> None:
    world = World(replace(LIMITS, announced_s=0.3))
    world.led(B)
    world.assigned(record(ME, B, successor=B))
    world.assigned(record(ME))
    world.now_s = 0.31
    assert only(StopPushes, world.tell(ev.WakeTimeReached())) == []


def test_a_shard_is_handed_over_once_its_successor_is_level() -> None:
    world = World()
    world.led(B)
    world.tell(applied(2))
    assert only(StopPushes, world.assigned(record(ME, B, successor=B))) == []
    assert only(StopPushes, world.answered(B, RecordsReceived(KEY, 1, 2))) == [StopPushes(KEY)]
    world.tell(applied(3))
    assert only(WriteShardRecord, world.tell(ev.PushesStopped(KEY, 3))) == []
    assert only(WriteShardRecord, world.answered(B, RecordsReceived(KEY, 1, 3))) == [
        WriteShardRecord(KEY)
    ]
    moved = record(B, ME, epoch=2)
    assert world.core.revised(KEY, record(ME, B, successor=B), world.now_s) == moved


def test_the_newest_record_is_revised_at_the_time_of_the_write() -> None:
    """Another process may have written the record since the write was decided."""
    world = World()
    world.led(B)
    world.broke(B)
    named = record(ME, B, joining=C)
    assert world.tell(ev.ShardRecordRead(KEY, named)) == [
        ReviseShardRecord(KEY, record(ME, joining=C))
    ]
    assert world.tell(ev.ShardRecordRead(KEY, record(C, epoch=2))) == [
        ReviseShardRecord(KEY, record(C, epoch=2))
    ]


def test_edges_know_where_a_push_goes_as_soon_as_that_changes() -> None:
    world = World()
    world.assigned(record(ME, B, content=ShardContent.NONE))
    effects = world.tell(ev.ShardCreated(KEY, 1, 1))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ())]
    world.opened(B)
    world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    effects = world.answered(B, ImageInstalled(KEY, 1, 0, 1))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ((B, world.links[B]),))]
    assert only(SetFollowers, world.tell(applied(2))) == []
    assert only(SetFollowers, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    effects = world.broke(B, gone=False)
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ())]
    world.broke(B)
    effects = world.assigned(record(ME))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, False, ())]


def test_a_push_is_sent_with_its_record() -> None:
    """The same holds for a push that the follower lacked when its link came back."""
    world = World()
    world.led(B)
    (sent,) = only(SendRequest, world.tell(applied(2)))
    assert sent.record == Applied(2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.tell(ev.WakeTimeReached())
    world.opened(B)
    world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    (sent,) = only(SendRequest, world.answered(B, ImageInstalled(KEY, 1, 0, 1)))
    assert sent.record == Applied(2)


def test_the_time_until_which_pushes_are_admitted_is_the_leases() -> None:
    world = World()
    world.now_s = 5.0
    ends_s = 4.0 + LIMITS.fenced_after_s
    assert world.tell(ev.LeaseRenewed(4.0)) == [SetLease(ends_s)]
    assert only(SetLease, world.tell(ev.LeaseEnded())) == [SetLease(5.0)]


def test_who_cannot_hand_over_leads_on() -> None:
    """Pushes of its epoch are accepted again, as no other server accepts them."""
    world = World()
    world.led(B)
    world.assigned(record(ME, B, successor=B))
    assert only(WriteShardRecord, world.tell(ev.PushesStopped(KEY, 1))) == [WriteShardRecord(KEY)]
    assert only(ResumePushes, world.tell(ev.ShardRecordNotWritten(KEY))) == [ResumePushes(KEY)]


def test_a_shard_that_may_be_given_away_any_moment_takes_no_pushes() -> None:
    """The successor was unreachable for a moment while the write was in progress. It leads from the
    version that it had read when pushes stopped."""
    world = World()
    world.led(B)
    handed = record(ME, B, successor=B)
    world.assigned(handed)
    assert only(WriteShardRecord, world.tell(ev.PushesStopped(KEY, 1))) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, handed, world.now_s) == record(B, ME, epoch=2)
    world.broke(B, gone=False)
    assert only(ResumePushes, world.assigned(handed)) == []
    assert only(ResumePushes, world.tell(ev.ShardRecordWritten(KEY))) == [ResumePushes(KEY)]


def test_first_values_are_opened_once_the_record_tells_of_them() -> None:
    world = World()
    world.assigned(record(ME, content=ShardContent.NONE))
    effects = world.tell(ev.ShardCreated(KEY, 1, 1))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    assert [type(effect).__name__ for effect in effects if "Open" in type(effect).__name__] == []
    assert world.core.revised(KEY, record(ME, content=ShardContent.NONE), world.now_s) == record(ME)


# --- as backup ---


def test_all_that_its_last_primary_has_sent_is_read_before_a_copy_leads() -> None:
    """The last primary may have acknowledged these updates; after a handover there are none."""
    world = World()
    world.backs()
    assert only(SettleCopy, world.assigned(record(ME, epoch=2))) == [SettleCopy(KEY, last=B)]
    effects = world.told(UpdateMessage(KEY, 1, 4))
    assert accepted(effects) == [UpdateMessage(KEY, 1, 4)]
    assert [
        reply.newest_epoch for reply in replies(effects) if isinstance(reply, BackupRefused)
    ] == [2]
    assert only(LeadShard, world.tell(ev.CopySettled(KEY, 3))) == []
    assert only(LeadShard, world.tell(ev.CopySettled(KEY, 4))) == [LeadShard(KEY, 2)]
    world = World()
    world.backs()
    world.assigned(record(B, ME, successor=ME))
    assert only(SettleCopy, world.assigned(record(ME, B, epoch=2))) == [SettleCopy(KEY, last=None)]


def test_an_offer_that_comes_while_a_copy_settles_is_answered_once_it_leads() -> None:
    """The last primary is refused as deposed, and the next one need not wait."""
    world = World()
    world.backs()
    world.assigned(record(ME, epoch=2))
    assert replies(world.told(Offer(KEY, 1, 1))) == []
    (refused,) = replies(world.tell(ev.CopySettled(KEY, 3)))
    assert isinstance(refused, BackupRefused)
    assert (refused.why, refused.newest_epoch) == (BackupRefusalReason.OTHER_HOLDERS, 2)
    world.tell(ev.IncomingLinkOpened(C, 7))
    assert only(RefreshShardRecord, world.told(Offer(KEY, 3, 1), peer=C)) == [
        RefreshShardRecord(KEY)
    ]


def test_an_offer_that_comes_while_a_copy_settles_is_answered_also_once_that_is_gone() -> None:
    """A primary whose shard begins anew may have read the new record first."""
    world = World()
    world.backs()
    world.assigned(record(ME, epoch=2))
    world.told(Offer(KEY, 1, 1))
    world.tell(ev.IncomingLinkOpened(C, 7))
    assert replies(world.told(Offer(KEY, 4, 4), peer=C)) == []
    gone = world.assigned(record(C, epoch=3, content=ShardContent.LOADING))
    assert (only(DropShard, gone), only(RefreshShardRecord, gone)) == (
        [DropShard(KEY)],
        [RefreshShardRecord(KEY)],
    )
    world.assigned(record(C, joining=ME, epoch=4))
    refused, holds = replies(world.tell(ev.ShardRecordRefreshed(KEY)))
    assert isinstance(refused, BackupRefused)
    assert holds == BackupState(KEY, 4)


def test_who_sends_an_image_that_is_let_go_of_is_told() -> None:
    """The primary may know of a later record, by which it still sends, and would wait for ever."""
    world = World()
    world.assigned(record(B, joining=ME))
    world.tell(ev.IncomingLinkOpened(B, 7))
    world.told(ImageStart(KEY, 1, 1, 5, 3, 2))
    world.told(ImageChunk(KEY, 5, 0))
    sent = only(SendReply, world.assigned(record(B)))
    (refused,) = replies(sent)
    assert (sent[0].peer, sent[0].link) == (B, 7)
    assert isinstance(refused, BackupRefused)
    assert (refused.why, refused.newest_epoch) == (BackupRefusalReason.OTHER_HOLDERS, 1)


def test_a_copy_that_may_lack_what_was_sent_to_it_is_let_go_of() -> None:
    world = World()
    world.backs()
    assert only(DropShard, world.tell(ev.IncomingLinkEnded(B, 7, is_torn=True))) == [DropShard(KEY)]


def test_a_push_is_received_in_order_and_replayed_once() -> None:
    world = World()
    world.backs()
    effects = world.told(UpdateMessage(KEY, 1, 4))
    assert (replies(effects), accepted(effects)) == (
        [RecordsReceived(KEY, 1, 4)],
        [UpdateMessage(KEY, 1, 4)],
    )
    effects = world.told(UpdateMessage(KEY, 1, 4))
    assert (replies(effects), accepted(effects)) == ([RecordsReceived(KEY, 1, 4)], [])
    (refused,) = replies(world.told(UpdateMessage(KEY, 1, 6)))
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.NO_COPY


def test_a_copy_that_fails_is_told_to_its_primary() -> None:
    """Otherwise the primary would count on a copy that does not exist."""
    world = World()
    world.backs()
    effects = world.tell(ev.CopyFailed(KEY))
    (refused,) = replies(effects)
    assert isinstance(refused, BackupRefused)
    assert (refused.why, only(DropShard, effects)) == (
        BackupRefusalReason.NO_COPY,
        [DropShard(KEY)],
    )


def test_an_image_is_not_kept_where_the_record_names_this_server_by_then() -> None:
    """The shard that it leads, with all acknowledged updates, stays."""
    world = World()
    world.backs()
    world.told(ImageStart(KEY, 1, 1, 6, 9, 1))
    world.told(ImageChunk(KEY, 6, 0))
    assert only(SettleCopy, world.assigned(record(ME, epoch=2))) == [SettleCopy(KEY, B)]
    assert only(LeadShard, world.tell(ev.CopySettled(KEY, 3))) == [LeadShard(KEY, 2)]
    assert only(AdoptImage, world.tell(ev.ImageRestored(KEY, 6))) == []
    (refused,) = replies(world.told(UpdateMessage(KEY, 1, 4)))
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.OTHER_HOLDERS


def test_a_backup_takes_over_from_a_primary_that_neither_calls_nor_answers() -> None:
    world = World()
    world.backs()
    world.tell(ev.IncomingLinkEnded(B, 7))
    assert only(WriteShardRecord, world.tell(ev.PeerProbed(B, answers=True))) == []
    assert only(WriteShardRecord, world.tell(ev.PeerProbed(B, answers=False))) == [
        WriteShardRecord(KEY)
    ]
    assert world.core.revised(KEY, record(B, ME), world.now_s) == record(ME, epoch=2)
    world.tell(ev.IncomingLinkOpened(B, 8))
    assert world.core.revised(KEY, record(B, ME), world.now_s) == record(B, ME)


def test_who_has_a_failed_copy_no_longer_counts_as_having_one() -> None:
    """The primary may end before the refusal: then a disk has the shard, or no server has it."""
    world = World()
    world.backs()
    effects = world.tell(ev.CopyFailed(KEY))
    assert (only(DropShard, effects), only(WriteShardRecord, effects)) == (
        [DropShard(KEY)],
        [WriteShardRecord(KEY)],
    )
    assert world.core.revised(KEY, record(B, ME, C), world.now_s) == record(B, C)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (record(ME, C, epoch=2), record(C, epoch=3)),
        (record(ME, epoch=2), record(ME, epoch=3, content=ShardContent.LOST)),
    ],
    ids=["a backup has it", "nobody has it"],
)
def test_who_is_to_lead_what_it_has_not_says_so(
    given: ShardAssignment, told: ShardAssignment
) -> None:
    """The copy failed during the takeover, or was missing when the coordinator named the server."""
    world = World()
    world.backs()
    assert only(SettleCopy, world.assigned(given)) == [SettleCopy(KEY, last=B)]
    assert only(WriteShardRecord, world.tell(ev.CopyFailed(KEY))) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, given, world.now_s) == told
    world = World()
    assert only(WriteShardRecord, world.assigned(given)) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, given, world.now_s) == told


def test_what_was_told_to_be_forgotten_is_not_lost() -> None:
    world = World()
    world.led()
    assert only(WriteShardRecord, world.tell(ev.ShardRetired(KEY))) == []
    assert only(WriteShardRecord, world.assigned(record(ME, joining=C))) == []


def test_a_copy_of_what_was_written_anew_is_dropped() -> None:
    world = World()
    world.backs()
    effects = world.assigned(record(ME, epoch=2, content=ShardContent.LOST))
    assert (only(DropShard, effects), only(SettleCopy, effects)) == ([DropShard(KEY)], [])


# --- the journal ---


@pytest.mark.parametrize(
    ("ended", "away_s", "leads"),
    [
        (frozenset(), 0.0, False),
        (frozenset({B}), 0.0, False),
        (frozenset({B, C}), 0.0, True),
        (frozenset(), LIMITS.dead_after_s, True),
    ],
    ids=["nobody is known to be dead", "a backup may live", "all have ended", "all are long gone"],
)
def test_a_shard_is_led_from_disk_once_nobody_can_have_more(
    ended: frozenset[Holder], away_s: float, leads: bool
) -> None:
    world = World()
    last = record(B, C, on_disk="a")
    world.assigned(last)
    world.tell(ev.JournalShardFound(KEY, 1, 3))
    world.tell(ev.ServersListed(frozenset(), world.now_s))
    while away_s > 1.0:
        world.now_s, away_s = world.now_s + 1.0, away_s - 1.0
        world.tell(ev.ServersListed(frozenset(), world.now_s))
    world.now_s += away_s
    effects = world.tell(ev.ServersListed(frozenset(), world.now_s, ended))
    assert bool(only(WriteShardRecord, effects)) == leads
    assert (world.core.revised(KEY, last, world.now_s).primary == ME) == leads


def test_a_shard_is_led_from_disk_also_where_its_last_process_named_that_late() -> None:
    """The write of that process was in progress when this process began."""
    world = World()
    last = Holder("a", "0")
    world.assigned(record(last))
    world.tell(ev.JournalShardFound(KEY, 1, 3))
    world.assigned(record(last, disk_epoch=1))
    named = record(last, on_disk="a", disk_epoch=1, disk_version=3)
    world.assigned(named)
    effects = world.tell(ev.ServersListed(frozenset(), world.now_s, frozenset({last})))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, named, world.now_s).primary == ME


def test_an_older_copy_of_the_disk_is_not_led_and_told() -> None:
    world = World()
    last = record(B, on_disk="a", disk_epoch=1, disk_version=10)
    world.assigned(last)
    world.tell(ev.JournalShardFound(KEY, 1, 9))
    effects = world.tell(ev.ServersListed(frozenset(), world.now_s, frozenset({B})))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    reported = replace(last, found_version=9)
    assert world.core.revised(KEY, last, world.now_s) == reported
    world.assigned(reported)
    assert only(WriteShardRecord, world.tell(ev.ShardRecordWritten(KEY))) == []


def test_what_the_journal_turns_out_not_to_have_is_lost_and_not_waited_for() -> None:
    """Another process has the disk by now, for example. No other server had the shard, so that this
    one claimed it."""
    world = World()
    last = record(B, on_disk="a", disk_epoch=1, disk_version=2)
    world.assigned(last)
    world.tell(ev.JournalShardFound(KEY, 1, 3))
    world.tell(ev.ServersListed(frozenset(), world.now_s, frozenset({B})))
    claimed = world.core.revised(KEY, last, world.now_s)
    assert only(LoadJournal, world.assigned(claimed)) == [LoadJournal(KEY, 2)]
    assert only(WriteShardRecord, world.tell(ev.ShardRecordWritten(KEY))) == []
    assert only(WriteShardRecord, world.tell(ev.JournalShardMissing(KEY, 2))) == [
        WriteShardRecord(KEY)
    ]
    recorded = world.core.revised(KEY, replace(claimed, joining=C), world.now_s)
    assert recorded == replace(claimed, epoch=3, content=ShardContent.LOST)
    world.assigned(recorded)
    assert only(WriteShardRecord, world.tell(ev.ShardRecordWritten(KEY))) == []
    # If that disk comes back, its server leads the shard again.
    again = led_from_disk(recorded, Holder("a", "2"), frozenset())
    assert (again.epoch, again.content) == (4, ShardContent.PRESENT)


def test_what_is_not_in_the_journal_says_nothing_of_a_later_epoch() -> None:
    world = World()
    world.assigned(record(B, C, epoch=3))
    world.tell(ev.JournalShardMissing(KEY, 2))
    kept = record(B, C, epoch=3)
    assert world.core.revised(KEY, kept, world.now_s) == kept


def test_how_far_a_shard_is_on_disk_is_written_now_and_then() -> None:
    world = World()
    world.core.leading.keeps_journal = True
    world.led()
    first = world.core.led(KEY)
    assert first is not None
    version = first.version
    assert only(WriteShardRecord, world.tell(ev.VersionJournaled(KEY, version))) == [
        WriteShardRecord(KEY)
    ]
    known = world.core.revised(KEY, record(), world.now_s)
    assert (known.on_disk, known.disk_epoch, known.disk_version) == ("a", 1, version)
    world.assigned(known)
    world.tell(ev.ShardRecordWritten(KEY))
    assert only(WriteShardRecord, world.tell(ev.VersionJournaled(KEY, version + 5))) == []
    world.now_s += LIMITS.disk_report_s
    world.tell(ev.LeaseRenewed(world.now_s))
    assert world.core.wakes_s() <= world.now_s
    assert only(WriteShardRecord, world.tell(ev.WakeTimeReached())) == [WriteShardRecord(KEY)]
    assert world.core.revised(KEY, known, world.now_s).disk_version == version + 5


# --- another run of the job ---


def test_what_is_here_of_another_run_is_let_go_of() -> None:
    """Shard numbers and epochs of both runs may be the same."""
    world = World()
    world.adopted("one")
    effects = world.tell(ev.ShardAssigned(KEY, record(B, ME), "two"))
    assert only(DropShard, effects) == [DropShard(KEY)]


@pytest.mark.parametrize(
    "told",
    [
        Offer(KEY, 1, 1, "one"),
        CopyUpToDate(KEY, 1, 3, "one"),
        ImageStart(KEY, 1, 1, 6, 3, 1, run="one"),
    ],
    ids=lambda told: type(told).__name__,
)
def test_a_primary_of_another_run_is_refused(told: Request) -> None:
    world = World()
    world.adopted("two")
    effects = [*world.told(told), *world.tell(ev.ShardRecordRefreshed(KEY))]
    (refused,) = replies(effects)
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.OTHER_HOLDERS


def test_a_primary_names_its_run() -> None:
    world = World()
    world.tell(ev.ShardAssigned(KEY, record(ME, B), "two"))
    world.tell(ev.ShardCreated(KEY, 1, 1))
    (offer,) = requests(world.opened(B))
    assert offer == Offer(KEY, 1, 1, "two")
    (start,) = requests(
        [*world.answered(B, BackupState(KEY, 1)), *world.tell(ev.ImageMade(KEY, 1, 1, 0))]
    )
    assert isinstance(start, ImageStart)
    assert start.run == "two"


def test_a_backup_that_knows_only_of_the_last_run_deposes_nobody() -> None:
    """The backup's epoch is higher, but belongs to the other run."""
    world = World()
    world.tell(ev.ShardAssigned(KEY, record(B, ME, epoch=9), "one"))
    world.tell(ev.IncomingLinkOpened(B, 7))
    (refused,) = replies(
        [*world.told(Offer(KEY, 1, 1, "two")), *world.tell(ev.ShardRecordRefreshed(KEY))]
    )
    assert isinstance(refused, BackupRefused)
    assert refused.newest_epoch == 0
