"""Decisions of one server about its shards, event by event."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from shoal_server.core.processes import Holder
from shoal_server.core.replication.leading.led_shard import LEVEL_WITHIN_S
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
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent, promote_from_disk

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
    """The core of one server, and the newest link to each peer."""

    def __init__(self, limits: ReplicationLimits = LIMITS) -> None:
        self.core = ReplicationCore(ME, limits)
        self.now_s = 0.0
        self.links: dict[Holder, int] = {}
        self.submit(ev.LeaseRenewed(0.0))

    def submit(self, event: ev.Event) -> list[Effect]:
        effects = self.core.step(event, self.now_s)
        self.links.update({e.peer: e.link for e in effects if isinstance(e, OpenLink)})
        return effects

    def assigned(self, assignment: ShardAssignment | None) -> list[Effect]:
        return self.submit(ev.ShardAssigned(KEY, assignment))

    def opened(self, peer: Holder) -> list[Effect]:
        return self.submit(ev.LinkOpened(peer, self.links[peer]))

    def broke(self, peer: Holder, *, gone: bool = True) -> list[Effect]:
        return self.submit(ev.LinkBroken(peer, self.links[peer], is_gone=gone))

    def answered(self, peer: Holder, reply: Reply) -> list[Effect]:
        return self.submit(ev.ReplyReceived(peer, self.links[peer], reply))

    def asks(self, version: int, level: ev.AckLevel = ev.AckLevel.REPLICATED) -> list[Effect]:
        return self.submit(ev.AckRequested("asked", KEY, 1, version, level))

    def led(self, *backups: Holder, **more: object) -> None:
        """Make this server primary of the shard at version 1, with these backups in step."""
        self.assigned(record(ME, *backups, **{**more, "content": ShardContent.NONE}))
        self.submit(ev.ShardCreated(KEY, 1, 1))
        self.assigned(record(ME, *backups, **more))
        self.submit(ev.ShardRecordWritten(KEY))
        for backup in backups:
            self.opened(backup)
            self.answered(backup, BackupState(KEY, 1, 1, 1, 1))
            self.answered(backup, ImageInstalled(KEY, 1, 0, 1))

    def received(self, request: Request, peer: Holder = B, link: int = 7) -> list[Effect]:
        return self.submit(ev.RequestReceived(peer, link, request))

    def backs(self, version: int = 3) -> None:
        """Make this server a backup in step, of a shard whose primary is B."""
        self.assigned(record(B, joining=ME))
        self.submit(ev.IncomingLinkOpened(B, 7))
        self.received(ImageStart(KEY, 1, 1, 5, version, 1))
        self.received(ImageChunk(KEY, 5, 0))
        self.submit(ev.ImageRestored(KEY, 5))
        self.assigned(record(B, ME))

    def adopted(self, placement_id: str) -> None:
        """Make this server a backup of B in this placement of the job, at version 3."""
        self.submit(ev.ShardAssigned(KEY, record(B, ME), placement_id))
        self.submit(ev.IncomingLinkOpened(B, 7))
        self.received(ImageStart(KEY, 1, 1, 5, 3, 1, placement_id=placement_id))
        self.received(ImageChunk(KEY, 5, 0))
        self.submit(ev.ImageRestored(KEY, 5))


@dataclass(frozen=True)
class Applied:
    """Update record of a push."""

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
    assert requests(world.submit(applied(2))) == [UpdateMessage(KEY, 1, 2)] * 2
    assert world.asks(2) == []
    assert only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    assert only(AcknowledgeVersion, world.answered(C, RecordsReceived(KEY, 1, 2))) == [
        AcknowledgeVersion("asked")
    ]


class Caller:
    """A token that a weak reference can follow."""


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the answer"])
def test_an_abandoned_wait_keeps_no_reference_to_its_caller(is_late: bool) -> None:
    """The same holds if the caller gives up after the answer."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    caller = Caller()
    kept = weakref.ref(caller)
    world.submit(ev.AckRequested(caller, KEY, 1, 2, ev.AckLevel.REPLICATED))
    if not is_late:
        world.submit(ev.AckAbandoned(caller, KEY))
    answers = only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2)))
    assert answers == ([AcknowledgeVersion(caller)] if is_late else [])
    if is_late:
        world.submit(ev.AckAbandoned(caller, KEY))
    del caller, answers
    assert kept() is None


@pytest.mark.parametrize("level", list(ev.AckLevel))
def test_no_push_is_acknowledged_after_the_lease(level: ev.AckLevel) -> None:
    """The lease counts from when its last renewal was sent. When it ends, waiting callers are
    refused; after another renewal, pushes are acknowledged again."""
    world = World()
    world.core.leading.keeps_journal = True
    world.led(B, on_disk="a")
    world.submit(ev.VersionJournaled(KEY, 1))
    world.submit(applied(2))
    world.asks(2)
    world.now_s = LIMITS.fenced_after_s - 0.01
    assert only(RefuseVersion, world.submit(ev.WakeTimeReached())) == []
    world.now_s = LIMITS.fenced_after_s
    assert world.core.wakes_s() <= world.now_s
    assert only(RefuseVersion, world.submit(ev.WakeTimeReached())) == [
        RefuseVersion("asked", AckRefusalReason.FENCED)
    ]
    assert only(RefuseVersion, world.asks(1, level)) == [
        RefuseVersion("asked", AckRefusalReason.FENCED)
    ]
    world.submit(ev.LeaseRenewed(world.now_s - 1.0))
    assert only(AcknowledgeVersion, world.asks(1, level)) == [AcknowledgeVersion("asked")]


def test_pushes_are_acknowledged_for_ten_minutes_without_etcd() -> None:
    """The limits are the defaults. If only this server is cut off, a coordinator declares it dead
    after it has stopped acknowledging."""
    limits = ReplicationLimits()
    world = World(limits)
    world.led()
    absences = ServerAbsences[Holder](limits.longest_gap_s)
    acknowledged_s = dead_s = 0.0
    while not dead_s:
        world.now_s += 1.0
        world.submit(ev.WakeTimeReached())
        if only(AcknowledgeVersion, world.asks(1)):
            acknowledged_s = world.now_s
        if absences.away_s([ME], world.now_s)[ME] >= limits.dead_after_s:
            dead_s = world.now_s
    assert acknowledged_s > 660.0
    assert dead_s - acknowledged_s > acknowledged_s / 10


def test_a_lost_backup_is_required_until_the_record_no_longer_names_it() -> None:
    """No push is acknowledged until the write that removes the backup is done."""
    world = World()
    world.led(B)
    assert only(WriteShardRecord, world.broke(B)) == [WriteShardRecord(KEY)]
    world.submit(applied(2))
    assert world.asks(2) == []
    assert world.core.wanted_record(KEY, record(ME, B), world.now_s) == record(ME)
    done = [*world.assigned(record(ME)), *world.submit(ev.ShardRecordWritten(KEY))]
    assert only(AcknowledgeVersion, done) == [AcknowledgeVersion("asked")]


def joined(world: World) -> None:
    """Copy the shard to B, and begin the write that puts B in step."""
    world.led(joining=B)
    world.opened(B)
    assert only(MakeImage, world.answered(B, BackupState(KEY, 1))) == [MakeImage(KEY, 1)]
    assert requests(world.submit(ev.ImageMade(KEY, 1, 1, 1))) == [
        ImageStart(KEY, 1, 1, 1, 1, 1),
        ImageChunk(KEY, 1, 0),
    ]
    assert only(WriteShardRecord, world.answered(B, ImageInstalled(KEY, 1, 1, 1))) == [
        WriteShardRecord(KEY)
    ]
    assert world.core.wanted_record(KEY, record(ME, joining=B), world.now_s) == record(ME, B)


def test_a_joining_server_is_required_while_a_write_may_put_it_in_step() -> None:
    """A joining server is lost while the write that puts it in step is in progress. The record may
    name the server at any moment, and then the server may take over: it must have every
    acknowledged push."""
    world = World()
    joined(world)
    world.broke(B)
    world.submit(applied(2))
    assert world.asks(2) == []
    assert only(AcknowledgeVersion, world.assigned(record(ME, B))) == []
    assert only(WriteShardRecord, world.submit(ev.ShardRecordWritten(KEY))) == [
        WriteShardRecord(KEY)
    ]
    assert world.core.wanted_record(KEY, record(ME, B), world.now_s) == record(ME)
    assert only(AcknowledgeVersion, world.assigned(record(ME))) == [AcknowledgeVersion("asked")]


def test_a_joining_server_that_is_named_again_during_a_write_gets_another_offer() -> None:
    """The primary cannot reach etcd. Before it knows the outcome of its write, the coordinator
    names another server, and then the first one again, which has dropped its copy."""
    world = World()
    joined(world)
    world.answered(B, BackupRefused(KEY, 1, BackupRefusalReason.NO_COPY, "the copy was dropped"))
    world.assigned(record(ME, joining=C))
    asked = world.assigned(record(ME, joining=B))
    assert requests(asked) == [Offer(KEY, 1, 1)]
    assert only(MakeImage, world.answered(B, BackupState(KEY, 1))) == [MakeImage(KEY, 2)]
    world.submit(applied(2))
    assert world.asks(2) == []
    world.submit(ev.ShardRecordWritten(KEY))
    world.submit(ev.ImageMade(KEY, 2, 2, 1))
    assert WriteShardRecord(KEY) in world.answered(B, ImageInstalled(KEY, 1, 2, 2))
    assert world.core.wanted_record(KEY, record(ME, joining=B), world.now_s) == record(ME, B)


def test_an_image_continues_after_the_last_acknowledged_chunk() -> None:
    world = World()
    world.led(joining=B)
    world.opened(B)
    world.answered(B, BackupState(KEY, 1))
    sent = requests(world.submit(ev.ImageMade(KEY, 1, 1, 9)))
    assert sent[1:] == [ImageChunk(KEY, 1, i) for i in range(LIMITS.window_chunks)]
    assert requests(world.answered(B, ChunkReceived(KEY, 1, 2))) == [
        ImageChunk(KEY, 1, 4),
        ImageChunk(KEY, 1, 5),
    ]
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.submit(ev.WakeTimeReached())
    assert requests(world.opened(B)) == [Offer(KEY, 1, 1)]
    again = requests(world.answered(B, BackupState(KEY, 1, image=1, next_chunk=3)))
    assert again == [
        ImageStart(KEY, 1, 1, 1, 1, 9, 3),
        *(ImageChunk(KEY, 1, i) for i in range(3, 3 + LIMITS.window_chunks)),
    ]


def test_after_a_broken_link_updates_continue_from_the_backups_version() -> None:
    """Updates that the backup has are not sent again."""
    world = World()
    world.led(B)
    for version in (2, 3, 4):
        world.submit(applied(version))
    world.answered(B, RecordsReceived(KEY, 1, 2))
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.submit(ev.WakeTimeReached())
    world.opened(B)
    assert requests(world.answered(B, BackupState(KEY, 1, 1, 1, 3))) == [CopyUpToDate(KEY, 1, 3)]
    assert requests(world.answered(B, ImageInstalled(KEY, 1, 0, 3))) == [UpdateMessage(KEY, 1, 4)]


def test_a_backup_that_lacks_discarded_updates_gets_an_image() -> None:
    """A primary without followers keeps no updates, so that a copy which lacks only one needs an
    image."""
    world = World()
    world.led()
    world.submit(applied(2))
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
    ids=[
        "other initial values",
        "an epoch of another history",
        "a later version than the primary's",
    ],
)
def test_a_copy_of_another_history_is_replaced(holds: BackupState) -> None:
    world = World()
    world.led(joining=B)
    world.opened(B)
    effects = world.answered(B, holds)
    assert (requests(effects), only(MakeImage, effects)) == ([], [MakeImage(KEY, 1)])


def test_replies_of_an_earlier_link_are_ignored() -> None:
    world = World()
    world.led(B)
    old = world.links[B]
    world.submit(applied(2))
    world.asks(2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.submit(ev.WakeTimeReached())
    assert world.links[B] != old
    assert world.submit(ev.ReplyReceived(B, old, RecordsReceived(KEY, 1, 2))) == []


def delivered(world: World, version: int, peer: Holder = B) -> list[Effect]:
    return world.submit(ev.RecordDelivered(peer, world.links[peer], KEY, 1, version))


def test_a_push_in_the_memory_of_every_backup_is_acknowledged() -> None:
    """Backups read that memory in any case. The primary keeps records until they have."""
    world = World()
    world.led(B, C)
    world.submit(applied(2))
    world.asks(2)
    assert only(AcknowledgeVersion, delivered(world, 2)) == []
    assert only(AcknowledgeVersion, delivered(world, 2, C)) == [AcknowledgeVersion("asked")]
    assert only(SetUnreplicated, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    assert only(SetUnreplicated, world.answered(C, RecordsReceived(KEY, 1, 2))) == [
        SetUnreplicated(KEY, 0)
    ]


def test_a_push_is_acknowledged_once_earlier_ones_are_received() -> None:
    """The earlier push may have been sent over the link, and may be refused."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    world.submit(applied(3))
    world.asks(3)
    assert only(AcknowledgeVersion, delivered(world, 3)) == []
    assert only(AcknowledgeVersion, world.answered(B, RecordsReceived(KEY, 1, 2))) == [
        AcknowledgeVersion("asked")
    ]


def test_an_update_delivered_to_memory_is_sent_again_if_the_backup_lacks_it() -> None:
    """An update in the backup's memory counts as received, but another process of that backup lacks
    it."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    delivered(world, 2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.submit(ev.WakeTimeReached())
    world.opened(B)
    effects = world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    assert requests(effects) == [CopyUpToDate(KEY, 1, 1)]
    assert requests(world.answered(B, ImageInstalled(KEY, 1, 0, 1))) == [UpdateMessage(KEY, 1, 2)]


def test_a_shard_is_handed_over_once_its_successor_has_read_all_updates() -> None:
    """Updates in the successor's memory are not enough."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    delivered(world, 2)
    world.assigned(record(ME, B, successor=B))
    assert only(WriteShardRecord, world.submit(ev.PushesStopped(KEY, 2))) == []
    assert only(WriteShardRecord, world.answered(B, RecordsReceived(KEY, 1, 2))) == [
        WriteShardRecord(KEY)
    ]


def test_a_primary_that_learns_of_a_later_epoch_refuses_pushes_at_once() -> None:
    """A deposed primary may be cut off from etcd for long, and workers must not wait for that."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    world.asks(2)
    effects = world.answered(B, BackupRefused(KEY, 1, BackupRefusalReason.OTHER_HOLDERS, "", 2))
    assert only(RefuseVersion, effects) == [RefuseVersion("asked", AckRefusalReason.DEPOSED)]
    assert only(StopPushes, effects) == [StopPushes(KEY)]
    assert only(RefuseVersion, world.asks(1)) == [RefuseVersion("asked", AckRefusalReason.DEPOSED)]


def test_pushes_are_accepted_until_the_successor_has_been_announced() -> None:
    """Workers connect to the successor meanwhile."""
    world = World(replace(LIMITS, announced_s=0.3))
    world.led(B)
    assert only(StopPushes, world.assigned(record(ME, B, successor=B))) == []
    assert world.core.wakes_s() == pytest.approx(0.3)
    world.now_s = 0.2
    world.submit(applied(2))
    assert only(StopPushes, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    world.now_s = 0.31
    assert only(StopPushes, world.submit(ev.WakeTimeReached())) == [StopPushes(KEY)]
    assert world.core.wakes_s() > 1.0


def test_pushes_that_never_pause_are_stopped_after_a_time() -> None:
    """The backup has never all of them."""
    world = World()
    world.led(B)
    world.submit(applied(2))
    world.assigned(record(ME, B, successor=B))
    for version in range(2, 7):
        world.submit(applied(version + 1))
        world.now_s += LEVEL_WITHIN_S / 5
        effects = world.answered(B, RecordsReceived(KEY, 1, version))
        assert only(StopPushes, effects) == ([StopPushes(KEY)] if version == 6 else [])


def test_shards_with_successors_named_together_stop_pushes_together() -> None:
    """Pushes pause only once, although the primary learns of the second one a little later."""
    other = ("job", 1)
    world = World(replace(LIMITS, announced_s=0.3))
    world.led(B)
    world.submit(ev.ShardAssigned(other, replace(record(ME, B), shard_id=1)))
    world.submit(ev.ShardCreated(other, 1, 1))
    world.answered(B, BackupState(other, 1, 1, 1, 1))
    world.answered(B, ImageInstalled(other, 1, 0, 1))
    world.assigned(record(ME, B, successor=B))
    world.now_s = 0.02
    world.submit(ev.ShardAssigned(other, replace(record(ME, B, successor=B), shard_id=1)))
    world.now_s = 0.301
    assert only(StopPushes, world.submit(ev.WakeTimeReached())) == [
        StopPushes(KEY),
        StopPushes(other),
    ]
    assert world.core.wakes_s() > 1.0


def test_a_successor_opens_links_to_its_later_backups() -> None:
    """The first push then need not wait for the links."""
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
    assert only(StopPushes, world.submit(ev.WakeTimeReached())) == []


def test_a_shard_is_handed_over_once_its_successor_has_the_last_push() -> None:
    world = World()
    world.led(B)
    world.submit(applied(2))
    assert only(StopPushes, world.assigned(record(ME, B, successor=B))) == []
    assert only(StopPushes, world.answered(B, RecordsReceived(KEY, 1, 2))) == [StopPushes(KEY)]
    world.submit(applied(3))
    assert only(WriteShardRecord, world.submit(ev.PushesStopped(KEY, 3))) == []
    assert only(WriteShardRecord, world.answered(B, RecordsReceived(KEY, 1, 3))) == [
        WriteShardRecord(KEY)
    ]
    moved = record(B, ME, epoch=2)
    assert world.core.wanted_record(KEY, record(ME, B, successor=B), world.now_s) == moved


def test_the_newest_record_is_revised_at_the_time_of_the_write() -> None:
    """Another process may have written the record since the write was decided."""
    world = World()
    world.led(B)
    world.broke(B)
    named = record(ME, B, joining=C)
    assert world.submit(ev.ShardRecordRead(KEY, named)) == [
        ReviseShardRecord(KEY, record(ME, joining=C))
    ]
    assert world.submit(ev.ShardRecordRead(KEY, record(C, epoch=2))) == [
        ReviseShardRecord(KEY, record(C, epoch=2))
    ]


def test_followers_are_reported_whenever_they_change() -> None:
    world = World()
    world.assigned(record(ME, B, content=ShardContent.NONE))
    effects = world.submit(ev.ShardCreated(KEY, 1, 1))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ())]
    world.opened(B)
    world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    effects = world.answered(B, ImageInstalled(KEY, 1, 0, 1))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ((B, world.links[B]),))]
    assert only(SetFollowers, world.submit(applied(2))) == []
    assert only(SetFollowers, world.answered(B, RecordsReceived(KEY, 1, 2))) == []
    effects = world.broke(B, gone=False)
    assert only(SetFollowers, effects) == [SetFollowers(KEY, True, ())]
    world.broke(B)
    effects = world.assigned(record(ME))
    assert only(SetFollowers, effects) == [SetFollowers(KEY, False, ())]


def test_a_push_is_sent_with_its_record() -> None:
    """The same holds for a push that is sent again over a new link."""
    world = World()
    world.led(B)
    (sent,) = only(SendRequest, world.submit(applied(2)))
    assert sent.record == Applied(2)
    world.broke(B, gone=False)
    world.now_s += LIMITS.reconnect_s / 10
    world.submit(ev.WakeTimeReached())
    world.opened(B)
    world.answered(B, BackupState(KEY, 1, 1, 1, 1))
    (sent,) = only(SendRequest, world.answered(B, ImageInstalled(KEY, 1, 0, 1)))
    assert sent.record == Applied(2)


def test_pushes_are_admitted_until_the_lease_ends() -> None:
    world = World()
    world.now_s = 5.0
    ends_s = 4.0 + LIMITS.fenced_after_s
    assert world.submit(ev.LeaseRenewed(4.0)) == [SetLease(ends_s)]
    assert only(SetLease, world.submit(ev.LeaseEnded())) == [SetLease(5.0)]


def test_a_primary_whose_handover_is_not_written_accepts_pushes_again() -> None:
    """No other server accepts pushes of its epoch."""
    world = World()
    world.led(B)
    world.assigned(record(ME, B, successor=B))
    assert only(WriteShardRecord, world.submit(ev.PushesStopped(KEY, 1))) == [WriteShardRecord(KEY)]
    assert only(ResumePushes, world.submit(ev.ShardRecordNotWritten(KEY))) == [ResumePushes(KEY)]


def test_a_shard_whose_handover_may_be_written_takes_no_pushes() -> None:
    """The link to the successor breaks while the write is in progress. If it takes effect, the
    successor leads from the version at which pushes stopped."""
    world = World()
    world.led(B)
    handed = record(ME, B, successor=B)
    world.assigned(handed)
    assert only(WriteShardRecord, world.submit(ev.PushesStopped(KEY, 1))) == [WriteShardRecord(KEY)]
    assert world.core.wanted_record(KEY, handed, world.now_s) == record(B, ME, epoch=2)
    world.broke(B, gone=False)
    assert only(ResumePushes, world.assigned(handed)) == []
    assert only(ResumePushes, world.submit(ev.ShardRecordWritten(KEY))) == [ResumePushes(KEY)]


def test_the_record_is_written_when_a_shard_is_created() -> None:
    world = World()
    world.assigned(record(ME, content=ShardContent.NONE))
    effects = world.submit(ev.ShardCreated(KEY, 1, 1))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    assert [type(effect).__name__ for effect in effects if "Open" in type(effect).__name__] == []
    assert world.core.wanted_record(
        KEY, record(ME, content=ShardContent.NONE), world.now_s
    ) == record(ME)


# --- as backup ---


def test_a_copy_leads_once_it_has_read_all_that_its_last_primary_sent() -> None:
    """The last primary may have acknowledged these updates. After a handover there are none."""
    world = World()
    world.backs()
    assert only(SettleCopy, world.assigned(record(ME, epoch=2))) == [SettleCopy(KEY, last=B)]
    effects = world.received(UpdateMessage(KEY, 1, 4))
    assert accepted(effects) == [UpdateMessage(KEY, 1, 4)]
    assert [
        reply.newest_epoch for reply in replies(effects) if isinstance(reply, BackupRefused)
    ] == [2]
    assert only(LeadShard, world.submit(ev.CopySettled(KEY, 3))) == []
    assert only(LeadShard, world.submit(ev.CopySettled(KEY, 4))) == [LeadShard(KEY, 2)]
    world = World()
    world.backs()
    world.assigned(record(B, ME, successor=ME))
    assert only(SettleCopy, world.assigned(record(ME, B, epoch=2))) == [SettleCopy(KEY, last=None)]


def test_an_offer_to_a_copy_that_settles_is_answered_once_it_leads() -> None:
    """The last primary is refused with the new epoch; for a later one the record is read again."""
    world = World()
    world.backs()
    world.assigned(record(ME, epoch=2))
    assert replies(world.received(Offer(KEY, 1, 1))) == []
    (refused,) = replies(world.submit(ev.CopySettled(KEY, 3)))
    assert isinstance(refused, BackupRefused)
    assert (refused.why, refused.newest_epoch) == (BackupRefusalReason.OTHER_HOLDERS, 2)
    world.submit(ev.IncomingLinkOpened(C, 7))
    assert only(RefreshShardRecord, world.received(Offer(KEY, 3, 1), peer=C)) == [
        RefreshShardRecord(KEY)
    ]


def test_an_offer_to_a_copy_that_settles_is_answered_once_it_is_dropped() -> None:
    """A primary of a restored shard may have read the new record first."""
    world = World()
    world.backs()
    world.assigned(record(ME, epoch=2))
    world.received(Offer(KEY, 1, 1))
    world.submit(ev.IncomingLinkOpened(C, 7))
    assert replies(world.received(Offer(KEY, 4, 4), peer=C)) == []
    gone = world.assigned(record(C, epoch=3, content=ShardContent.LOADING))
    assert (only(DropShard, gone), only(RefreshShardRecord, gone)) == (
        [DropShard(KEY)],
        [RefreshShardRecord(KEY)],
    )
    world.assigned(record(C, joining=ME, epoch=4))
    refused, holds = replies(world.submit(ev.ShardRecordRefreshed(KEY)))
    assert isinstance(refused, BackupRefused)
    assert holds == BackupState(KEY, 4)


def test_a_primary_whose_image_is_dropped_is_refused() -> None:
    """The primary may know a later record, by which it sends the image, and would wait for ever."""
    world = World()
    world.assigned(record(B, joining=ME))
    world.submit(ev.IncomingLinkOpened(B, 7))
    world.received(ImageStart(KEY, 1, 1, 5, 3, 2))
    world.received(ImageChunk(KEY, 5, 0))
    sent = only(SendReply, world.assigned(record(B)))
    (refused,) = replies(sent)
    assert (sent[0].peer, sent[0].link) == (B, 7)
    assert isinstance(refused, BackupRefused)
    assert (refused.why, refused.newest_epoch) == (BackupRefusalReason.OTHER_HOLDERS, 1)


def test_a_copy_is_dropped_if_its_link_ended_within_a_message() -> None:
    world = World()
    world.backs()
    assert only(DropShard, world.submit(ev.IncomingLinkEnded(B, 7, is_torn=True))) == [
        DropShard(KEY)
    ]


def test_an_update_is_applied_once_and_only_in_order() -> None:
    world = World()
    world.backs()
    effects = world.received(UpdateMessage(KEY, 1, 4))
    assert (replies(effects), accepted(effects)) == (
        [RecordsReceived(KEY, 1, 4)],
        [UpdateMessage(KEY, 1, 4)],
    )
    effects = world.received(UpdateMessage(KEY, 1, 4))
    assert (replies(effects), accepted(effects)) == ([RecordsReceived(KEY, 1, 4)], [])
    (refused,) = replies(world.received(UpdateMessage(KEY, 1, 6)))
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.NO_COPY


def test_a_copy_that_fails_is_reported_to_its_primary() -> None:
    """A primary without that report would rely on a copy that does not exist."""
    world = World()
    world.backs()
    effects = world.submit(ev.CopyFailed(KEY))
    (refused,) = replies(effects)
    assert isinstance(refused, BackupRefused)
    assert (refused.why, only(DropShard, effects)) == (
        BackupRefusalReason.NO_COPY,
        [DropShard(KEY)],
    )


def test_an_image_is_not_adopted_by_a_server_that_became_primary() -> None:
    """The new primary's own copy has all acknowledged updates, and stays."""
    world = World()
    world.backs()
    world.received(ImageStart(KEY, 1, 1, 6, 9, 1))
    world.received(ImageChunk(KEY, 6, 0))
    assert only(SettleCopy, world.assigned(record(ME, epoch=2))) == [SettleCopy(KEY, B)]
    assert only(LeadShard, world.submit(ev.CopySettled(KEY, 3))) == [LeadShard(KEY, 2)]
    assert only(AdoptImage, world.submit(ev.ImageRestored(KEY, 6))) == []
    (refused,) = replies(world.received(UpdateMessage(KEY, 1, 4)))
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.OTHER_HOLDERS


def test_a_backup_takes_over_from_a_primary_that_neither_calls_nor_answers() -> None:
    world = World()
    world.backs()
    world.submit(ev.IncomingLinkEnded(B, 7))
    assert only(WriteShardRecord, world.submit(ev.PeerProbed(B, answers=True))) == []
    assert only(WriteShardRecord, world.submit(ev.PeerProbed(B, answers=False))) == [
        WriteShardRecord(KEY)
    ]
    assert world.core.wanted_record(KEY, record(B, ME), world.now_s) == record(ME, epoch=2)
    world.submit(ev.IncomingLinkOpened(B, 8))
    assert world.core.wanted_record(KEY, record(B, ME), world.now_s) == record(B, ME)


def test_a_server_with_a_failed_copy_removes_itself_from_the_record() -> None:
    """The primary may end before it receives the refusal."""
    world = World()
    world.backs()
    effects = world.submit(ev.CopyFailed(KEY))
    assert (only(DropShard, effects), only(WriteShardRecord, effects)) == (
        [DropShard(KEY)],
        [WriteShardRecord(KEY)],
    )
    assert world.core.wanted_record(KEY, record(B, ME, C), world.now_s) == record(B, C)


@pytest.mark.parametrize(
    ("given", "revised"),
    [
        (record(ME, C, epoch=2), record(C, epoch=3)),
        (record(ME, epoch=2), record(ME, epoch=3, content=ShardContent.LOST)),
    ],
    ids=["a backup has it", "no server has it"],
)
def test_a_primary_without_a_copy_resigns(given: ShardAssignment, revised: ShardAssignment) -> None:
    """The copy fails during the takeover, or was missing when the coordinator chose the server."""
    world = World()
    world.backs()
    assert only(SettleCopy, world.assigned(given)) == [SettleCopy(KEY, last=B)]
    assert only(WriteShardRecord, world.submit(ev.CopyFailed(KEY))) == [WriteShardRecord(KEY)]
    assert world.core.wanted_record(KEY, given, world.now_s) == revised
    world = World()
    assert only(WriteShardRecord, world.assigned(given)) == [WriteShardRecord(KEY)]
    assert world.core.wanted_record(KEY, given, world.now_s) == revised


def test_a_retired_shard_is_not_reported_as_lost() -> None:
    world = World()
    world.led()
    assert only(WriteShardRecord, world.submit(ev.ShardRetired(KEY))) == []
    assert only(WriteShardRecord, world.assigned(record(ME, joining=C))) == []


def test_a_copy_of_a_shard_that_is_recorded_as_lost_is_dropped() -> None:
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
    ids=["none is known to be dead", "a backup may live", "all have ended", "all are long absent"],
)
def test_a_shard_is_led_from_disk_once_its_holders_are_dead(
    ended: frozenset[Holder], away_s: float, leads: bool
) -> None:
    world = World()
    last = record(B, C, on_disk="a")
    world.assigned(last)
    world.submit(ev.JournalShardFound(KEY, 1, 3))
    world.submit(ev.ServersListed(frozenset(), world.now_s))
    while away_s > 1.0:
        world.now_s, away_s = world.now_s + 1.0, away_s - 1.0
        world.submit(ev.ServersListed(frozenset(), world.now_s))
    world.now_s += away_s
    effects = world.submit(ev.ServersListed(frozenset(), world.now_s, ended))
    assert bool(only(WriteShardRecord, effects)) == leads
    assert (world.core.wanted_record(KEY, last, world.now_s).primary == ME) == leads


def test_a_shard_is_led_from_disk_if_its_last_process_recorded_that_late() -> None:
    """The write of that process was in progress when this process began."""
    world = World()
    last = Holder("a", "0")
    world.assigned(record(last))
    world.submit(ev.JournalShardFound(KEY, 1, 3))
    world.assigned(record(last, disk_epoch=1))
    named = record(last, on_disk="a", disk_epoch=1, disk_version=3)
    world.assigned(named)
    effects = world.submit(ev.ServersListed(frozenset(), world.now_s, frozenset({last})))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    assert world.core.wanted_record(KEY, named, world.now_s).primary == ME


def test_an_older_copy_of_the_disk_is_reported_and_not_led() -> None:
    world = World()
    last = record(B, on_disk="a", disk_epoch=1, disk_version=10)
    world.assigned(last)
    world.submit(ev.JournalShardFound(KEY, 1, 9))
    effects = world.submit(ev.ServersListed(frozenset(), world.now_s, frozenset({B})))
    assert only(WriteShardRecord, effects) == [WriteShardRecord(KEY)]
    reported = replace(last, found_version=9)
    assert world.core.wanted_record(KEY, last, world.now_s) == reported
    world.assigned(reported)
    assert only(WriteShardRecord, world.submit(ev.ShardRecordWritten(KEY))) == []


def test_a_claimed_shard_that_the_journal_lacks_is_recorded_as_lost() -> None:
    """The server claimed it because all other holders are dead. Its disk may have been replaced."""
    world = World()
    last = record(B, on_disk="a", disk_epoch=1, disk_version=2)
    world.assigned(last)
    world.submit(ev.JournalShardFound(KEY, 1, 3))
    world.submit(ev.ServersListed(frozenset(), world.now_s, frozenset({B})))
    claimed = world.core.wanted_record(KEY, last, world.now_s)
    assert only(LoadJournal, world.assigned(claimed)) == [LoadJournal(KEY, 2)]
    assert only(WriteShardRecord, world.submit(ev.ShardRecordWritten(KEY))) == []
    assert only(WriteShardRecord, world.submit(ev.JournalShardMissing(KEY, 2))) == [
        WriteShardRecord(KEY)
    ]
    recorded = world.core.wanted_record(KEY, replace(claimed, joining=C), world.now_s)
    assert recorded == replace(claimed, epoch=3, content=ShardContent.LOST)
    world.assigned(recorded)
    assert only(WriteShardRecord, world.submit(ev.ShardRecordWritten(KEY))) == []
    # If the disk returns, its server leads the shard again.
    again = promote_from_disk(recorded, Holder("a", "2"), frozenset())
    assert (again.epoch, again.content) == (4, ShardContent.PRESENT)


def test_a_shard_that_the_journal_lacks_in_an_earlier_epoch_is_not_lost() -> None:
    world = World()
    world.assigned(record(B, C, epoch=3))
    world.submit(ev.JournalShardMissing(KEY, 2))
    kept = record(B, C, epoch=3)
    assert world.core.wanted_record(KEY, kept, world.now_s) == kept


def test_the_version_on_disk_is_recorded_at_intervals() -> None:
    world = World()
    world.core.leading.keeps_journal = True
    world.led()
    first = world.core.find_led(KEY)
    assert first is not None
    version = first.version
    assert only(WriteShardRecord, world.submit(ev.VersionJournaled(KEY, version))) == [
        WriteShardRecord(KEY)
    ]
    known = world.core.wanted_record(KEY, record(), world.now_s)
    assert (known.on_disk, known.disk_epoch, known.disk_version) == ("a", 1, version)
    world.assigned(known)
    world.submit(ev.ShardRecordWritten(KEY))
    assert only(WriteShardRecord, world.submit(ev.VersionJournaled(KEY, version + 5))) == []
    world.now_s += LIMITS.disk_report_s
    world.submit(ev.LeaseRenewed(world.now_s))
    assert world.core.wakes_s() <= world.now_s
    assert only(WriteShardRecord, world.submit(ev.WakeTimeReached())) == [WriteShardRecord(KEY)]
    assert world.core.wanted_record(KEY, known, world.now_s).disk_version == version + 5


# --- another placement of the job ---


def test_a_copy_of_another_run_is_dropped() -> None:
    """Shard numbers and epochs of both runs may be the same."""
    world = World()
    world.adopted("one")
    effects = world.submit(ev.ShardAssigned(KEY, record(B, ME), "two"))
    assert only(DropShard, effects) == [DropShard(KEY)]


@pytest.mark.parametrize(
    "sent",
    [
        Offer(KEY, 1, 1, "one"),
        CopyUpToDate(KEY, 1, 3, "one"),
        ImageStart(KEY, 1, 1, 6, 3, 1, placement_id="one"),
    ],
    ids=lambda sent: type(sent).__name__,
)
def test_a_primary_of_another_run_is_refused(sent: Request) -> None:
    world = World()
    world.adopted("two")
    effects = [*world.received(sent), *world.submit(ev.ShardRecordRefreshed(KEY))]
    (refused,) = replies(effects)
    assert isinstance(refused, BackupRefused)
    assert refused.why is BackupRefusalReason.OTHER_HOLDERS


def test_a_primary_names_its_run() -> None:
    world = World()
    world.submit(ev.ShardAssigned(KEY, record(ME, B), "two"))
    world.submit(ev.ShardCreated(KEY, 1, 1))
    (offer,) = requests(world.opened(B))
    assert offer == Offer(KEY, 1, 1, "two")
    (start,) = requests(
        [*world.answered(B, BackupState(KEY, 1)), *world.submit(ev.ImageMade(KEY, 1, 1, 0))]
    )
    assert isinstance(start, ImageStart)
    assert start.placement_id == "two"


def test_a_backup_with_the_record_of_another_run_reports_no_epoch() -> None:
    """The epoch in the backup's record is higher, but of the other placement: it must not depose
    the primary."""
    world = World()
    world.submit(ev.ShardAssigned(KEY, record(B, ME, epoch=9), "one"))
    world.submit(ev.IncomingLinkOpened(B, 7))
    (refused,) = replies(
        [*world.received(Offer(KEY, 1, 1, "two")), *world.submit(ev.ShardRecordRefreshed(KEY))]
    )
    assert isinstance(refused, BackupRefused)
    assert refused.newest_epoch == 0
