"""Who holds which shard, and how that may change. Pure: a record goes in, the next one comes out.

The record of a job lies in etcd and is replaced by compare-and-swap only, so of two that want to
change it at once one starts anew from what the other wrote. That is what keeps updates safe:

- A primary acknowledges what every backup *in step* has received, so each of these may take over.
- To go on without one of them, it must first have taken it out of the record (`without_backup`).
- A backup takes over by writing itself down (`promoted`), which only one in step can do.

So the old primary and the new one never both acknowledge, whoever was wrong about whom.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A server process. Its id alone would not tell a restarted one from what held the shards."""

    server_id: str
    incarnation: str


class ShardContent(Enum):
    """What there is of a shard. A worker may give first values to one that has none, and to no
    other: one that was trained and is lost must not begin anew in silence."""

    NONE = "nobody has created it"
    LOADING = "its primary is to load it from a snapshot"
    PRESENT = "it has values, of which somebody may know"
    LOST = "it had values, and every server that had them is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoss:
    """What is known of a shard that nobody has any more."""

    lost_unix_s: float
    """When the coordinator found that it was lost."""
    version: int = 0
    """It had at least this one; 0: of none is known. Servers tell theirs now and then."""
    servers: tuple[str, ...] = ()
    """Ids of those that had it last."""
    snapshot: str = ""
    """What became of bringing it back from a snapshot, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedLoss:
    """That an operator gave a lost shard up."""

    loss: ShardLoss
    by: str
    accepted_unix_s: float
    samples_anew: bool = False
    """Whether the samples of the job began anew with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAssignment:
    """One shard's holders."""

    shard_id: int
    epoch: int
    """Number of times the primary was decided, from 1."""
    primary: Holder
    backups: tuple[Holder, ...] = ()
    """In step with the primary."""
    joining: Holder | None = None
    """To be brought in step."""
    successor: Holder | None = None
    """The backup that the primary is to hand the shard over to."""
    on_disk: str = ""
    """Id of the server whose journal has all that was acknowledged as durable; empty if none was.

    A primary acknowledges nothing as durable before this names its own server, and no server's
    journal lets go of a shard while this names it. So where every process that held a shard is
    gone, there is one disk to lead it from again, and it lacks nothing.
    """
    disk_epoch: int = 0
    disk_version: int = 0
    """That disk has at least this version, of this epoch. Written now and then: an older copy of
    the disk that is put in its place is known by it."""
    found_version: int = 0
    """What a later process of that server found there instead, which is older; 0: nothing is."""
    found_foreign: bool = False
    """Whether what was found is of another run of the job."""
    restored_version: int = 0
    """Of the snapshot that its values came from, or are to come from; 0: from none."""
    content: ShardContent = ShardContent.NONE
    """PRESENT before anybody has seen its values or pushed to it."""
    loss: ShardLoss | None = None
    """While the shard is lost."""
    accepted_loss: AcceptedLoss | None = None
    """The last time that it was given up and began anew."""

    def holds(self, holder: Holder) -> bool:
        """Whether it has every update that was acknowledged."""
        return holder == self.primary or holder in self.backups

    @property
    def holders(self) -> tuple[Holder, ...]:
        """All that have the shard, or are getting it."""
        joining = () if self.joining is None else (self.joining,)
        return (self.primary, *self.backups, *joining)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAssignments:
    """All the shards of a job."""

    job: str
    copies: int
    """Wanted copies of each shard, the primary included."""
    shards: tuple[ShardAssignment, ...]
    run: str = ""
    """Drawn when the shards were placed: those of another run of the job are not these, whatever
    their numbers and epochs."""
    job_run: str = ""
    """That of the placement whose values the job's members had, where the coordinator restored the
    job while they went on; empty: `run`."""

    @property
    def members_run(self) -> str:
        """What the job's members go by. Who goes by another may not read or change these shards."""
        return self.job_run or self.run

    def changed(
        self, shard_ids: Iterable[int], change: Callable[[ShardAssignment], ShardAssignment]
    ) -> "JobAssignments":
        """The record with a change made to some shards. A change that does not apply any more
        gives its argument back, and so leaves the record equal to what it was."""
        chosen = frozenset(shard_ids)
        return replace(
            self, shards=tuple(change(h) if h.shard_id in chosen else h for h in self.shards)
        )

    def find(self, shard_id: int) -> ShardAssignment | None:
        return next((h for h in self.shards if h.shard_id == shard_id), None)


def promoted(assignment: ShardAssignment, lost: Holder, backup: Holder) -> ShardAssignment:
    """`backup` takes over from the lost primary. The other backups stay: each has all that was
    acknowledged, and the new primary acknowledges nothing before it has brought them level."""
    if assignment.primary != lost or backup not in assignment.backups:
        return assignment
    return replace(
        assignment,
        epoch=assignment.epoch + 1,
        primary=backup,
        backups=_without(assignment.backups, backup),
        joining=None,
        successor=None,
    )


def handed_over(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """The primary has stopped and its successor is level: they change places."""
    successor = assignment.successor
    if assignment.primary != primary or successor is None or successor not in assignment.backups:
        return assignment
    return replace(
        assignment,
        epoch=assignment.epoch + 1,
        primary=successor,
        backups=(*_without(assignment.backups, successor), primary),
        successor=None,
    )


def was_handed_over(old: ShardAssignment | None, new: ShardAssignment) -> bool:
    """Whether the primary itself has given the shard to its successor."""
    return (
        old is not None
        and new.epoch == old.epoch + 1
        and new.primary == old.successor
        and old.primary in new.backups
    )


def without_backup(assignment: ShardAssignment, primary: Holder, lost: Holder) -> ShardAssignment:
    """The primary goes on without a backup, or without one that was joining."""
    if assignment.primary != primary or lost not in assignment.holders[1:]:
        return assignment
    return replace(
        assignment,
        backups=_without(assignment.backups, lost),
        joining=None if assignment.joining == lost else assignment.joining,
        successor=None if assignment.successor == lost else assignment.successor,
    )


def in_step(assignment: ShardAssignment, primary: Holder, joined: Holder) -> ShardAssignment:
    """The one that was joining has all that was acknowledged, and the primary acknowledges nothing
    any more that it has not."""
    if assignment.primary != primary or assignment.joining != joined:
        return assignment
    return replace(assignment, backups=(*assignment.backups, joined), joining=None)


def filled(assignment: ShardAssignment, primary: Holder, epoch: int) -> ShardAssignment:
    """The primary of that epoch has the shard's first values, or has loaded them."""
    if (assignment.primary, assignment.epoch) != (primary, epoch):
        return assignment
    return replace(assignment, content=ShardContent.PRESENT)


def emptied(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """The primary was told to forget the shard: it may be created anew. Copies of what it was are
    none of what it will be."""
    if assignment.primary != primary or assignment.content is ShardContent.NONE:
        return assignment
    return replace(
        assignment,
        epoch=assignment.epoch + 1,
        content=ShardContent.NONE,
        disk_epoch=0,
        disk_version=0,
        found_version=0,
        found_foreign=False,
        restored_version=0,
    )


def put_on_disk(assignment: ShardAssignment, primary: Holder, version: int) -> ShardAssignment:
    """The primary's journal has all of the shard, up to this version at least, and from here on
    every push."""
    if assignment.primary != primary:
        return assignment
    disk = assignment.epoch, version
    if assignment.on_disk == primary.server_id:
        disk = max(disk, (assignment.disk_epoch, assignment.disk_version))
    return replace(
        assignment,
        on_disk=primary.server_id,
        disk_epoch=disk[0],
        disk_version=disk[1],
        found_version=0,
        found_foreign=False,
    )


def led_from_disk(
    assignment: ShardAssignment, server: Holder, dead: "frozenset[Holder]"
) -> ShardAssignment:
    """A later process of the server on whose disk the shard is leads it, if nobody is left that
    has its updates in memory. `dead`: processes that are known to be gone for good.

    One that is merely out of sight may be acknowledging updates, or have some that are not on the
    disk. One that was given a lost shard has nothing of it.
    """
    if assignment.on_disk != server.server_id or assignment.primary == server:
        return assignment
    if assignment.content is ShardContent.LOST:
        dead |= {assignment.primary}
    if not {assignment.primary, *assignment.backups} <= dead:
        return assignment
    return ShardAssignment(
        shard_id=assignment.shard_id,
        epoch=assignment.epoch + 1,
        primary=server,
        on_disk=assignment.on_disk,
        disk_epoch=assignment.disk_epoch,
        disk_version=assignment.disk_version,
        content=ShardContent.PRESENT,
        accepted_loss=assignment.accepted_loss,
        restored_version=assignment.restored_version,
    )


def not_on_disk(assignment: ShardAssignment, primary: Holder, epoch: int) -> ShardAssignment:
    """A process that was to lead the shard from its server's disk did not find it there: it is lost
    until somebody has that disk. Whoever else had the shard was known to be gone."""
    is_its = (assignment.primary, assignment.epoch) == (primary, epoch)
    if not is_its or assignment.content is not ShardContent.PRESENT:
        return assignment
    return replace(
        assignment,
        epoch=epoch + 1,
        backups=(),
        joining=None,
        successor=None,
        content=ShardContent.LOST,
    )


def not_held(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """The primary has nothing of the shard, and so never led it in this epoch. A backup leads it,
    which has all that was acknowledged; without any it is lost until somebody has its disk."""
    if assignment.primary == primary and assignment.backups:
        return promoted(assignment, primary, assignment.backups[0])
    return not_on_disk(assignment, primary, assignment.epoch)


def is_older(assignment: ShardAssignment, epoch: int, version: int) -> bool:
    """Whether what a journal has of the shard is less than it is known to have had."""
    return (epoch, version) < (assignment.disk_epoch, assignment.disk_version)


def found_older(
    assignment: ShardAssignment, server: Holder, version: int, dead: "frozenset[Holder]"
) -> ShardAssignment:
    """A later process of the server on whose disk the shard is found an older copy there, or, of
    version 0, the shard of another run of the job."""
    is_mine = assignment.on_disk == server.server_id
    primary = assignment.primary
    # Another process of this server, which may live, has the disk as it should be.
    is_other = primary.server_id == server.server_id and primary not in {server} | dead
    if not is_mine or (is_other and assignment.content is not ShardContent.LOST):
        return assignment
    return replace(assignment, found_version=max(version, 1), found_foreign=not version)


def may_be_put_on_disk(assignment: ShardAssignment, server: Holder) -> bool:
    """Whether the record names the disk of that server, or may do so before long: another process
    of the server leads the shard, and what it wrote last may be on its way."""
    primary = assignment.primary
    is_other_process = primary.server_id == server.server_id and primary != server
    return assignment.on_disk == server.server_id or is_other_process


def off_disk(assignment: ShardAssignment, server: Holder) -> ShardAssignment:
    """What the server's journal had is gone, with its disk."""
    if assignment.on_disk != server.server_id:
        return assignment
    return replace(
        assignment,
        on_disk="",
        disk_epoch=0,
        disk_version=0,
        found_version=0,
        found_foreign=False,
    )


def _without(holders: Sequence[Holder], gone: Holder) -> tuple[Holder, ...]:
    return tuple(h for h in holders if h != gone)
