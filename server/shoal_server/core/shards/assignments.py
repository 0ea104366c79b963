"""Assignment of shards to servers, and its changes. Pure: functions map a record to the next one.

The record of a job is in etcd and is replaced by compare-and-swap only: if two processes change it
at once, one of them starts again from the other's result. These rules keep updates safe:

- A primary acknowledges only updates that every backup *in step* has, so any of them may take over.
  (Acknowledgements of the level APPLIED do not promise that.)
- To go on without a backup, a primary first removes it from the record (`without_backup`).
- A backup takes over by a write to the record (`promote`), which names only a backup in step.

So the old and the new primary never both acknowledge, even if one wrongly believes the other dead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shoal_server.core.processes import Holder


class ShardContent(Enum):
    """State of a shard's values. A worker may give first values only to a shard whose state is
    NONE: a trained shard that is lost must not silently start over."""

    NONE = "no worker has created the shard"
    LOADING = "the primary is to load the shard from a snapshot"
    PRESENT = "the shard has values, which may have been read"
    LOST = "the shard had values, and no server is known to have them any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoss:
    """Facts about the loss of a shard: no server has its values."""

    lost_unix_s: float
    """Time at which the coordinator found the loss."""
    version: int = 0
    """Newest version that the shard is known to have reached; 0: unknown. The shard may have
    reached a later one, as versions are reported only now and then."""
    servers: tuple[str, ...] = ()
    """Ids of the servers that had the shard last."""
    snapshot: str = ""
    """Outcome of restoring the shard from a snapshot, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedLoss:
    """Record of an operator's decision to give up a lost shard."""

    loss: ShardLoss
    by: str
    accepted_unix_s: float
    samples_anew: bool = False
    """True if the job's samples started over with the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAssignment:
    """A shard's holders, its disk, and the state of its values."""

    shard_id: int
    epoch: int
    """Rises from 1 when the primary changes, and when the shard is emptied, lost or restored."""
    primary: Holder
    backups: tuple[Holder, ...] = ()
    """Servers in step with the primary."""
    joining: Holder | None = None
    """The server that the primary brings in step at present."""
    successor: Holder | None = None
    """The backup that the primary is to hand the shard over to."""
    on_disk: str = ""
    """Id of the server whose journal has all pushes that were acknowledged as durable; empty: no
    push was.

    A primary acknowledges no push as durable before this field names its own server. A server's
    journal keeps the shard while this field names the server. So if every process that held a shard
    is gone, one disk has all durable pushes, and a new process of that disk's server can become
    primary from it.
    """
    disk_epoch: int = 0
    disk_version: int = 0
    """Epoch and version that the shard has reached on the disk, at least. Written now and then, so
    that an older copy of the disk is recognized."""
    found_version: int = 0
    """Version of an older copy that a later process of the server found on its disk, or 1 if
    `found_foreign`; 0: neither was found."""
    found_foreign: bool = False
    """True if the disk was found to have the shard of another placement of the job."""
    restored_version: int = 0
    """Version of the shard in the snapshot that it is or was restored from; 0: no snapshot."""
    content: ShardContent = ShardContent.NONE
    """State of the values. Becomes PRESENT before a worker can read them or push to the shard."""
    loss: ShardLoss | None = None
    """Set while the shard is lost, once the coordinator has recorded what is known of the loss."""
    accepted_loss: AcceptedLoss | None = None
    """The latest decision of an operator to give the shard up, after which it started over; None if
    there was none."""

    def holds(self, holder: Holder) -> bool:
        """True if the server is the primary or in step with it, so that it has every update that
        was acknowledged as replicated."""
        return holder == self.primary or holder in self.backups

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Primary, backups and the joining server, if any."""
        joining = () if self.joining is None else (self.joining,)
        return (self.primary, *self.backups, *joining)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAssignments:
    """All the shards of a job."""

    job: str
    copies: int
    """Wanted copies of each shard, including the primary."""
    shards: tuple[ShardAssignment, ...]
    placement_id: str = ""
    """Random id of this placement, drawn when shards are first placed and at each restore. Shards
    of another placement of the job are different shards, even with equal ids and epochs."""
    kept_placement_id: str = ""
    """Id that the job's members state, if the coordinator restored the job while they trained on;
    empty: `placement_id`."""

    @property
    def members_placement_id(self) -> str:
        """Id that the job's members state. Members that state another id may not use the shards."""
        return self.kept_placement_id or self.placement_id

    def changed(
        self, shard_ids: Iterable[int], change: Callable[[ShardAssignment], ShardAssignment]
    ) -> "JobAssignments":
        """The record with a change made to some shards. A change that no longer applies returns
        its argument, so the record stays equal."""
        chosen = frozenset(shard_ids)
        return replace(
            self, shards=tuple(change(h) if h.shard_id in chosen else h for h in self.shards)
        )

    def find(self, shard_id: int) -> ShardAssignment | None:
        return next((h for h in self.shards if h.shard_id == shard_id), None)


def promote(assignment: ShardAssignment, lost: Holder, backup: Holder) -> ShardAssignment:
    """Make `backup` the primary after the loss of `lost`. The other backups stay: each has all
    acknowledged updates, and the new primary brings them to its own version before it acknowledges
    more."""
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


def exchange_primary(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """Exchange a primary that has stopped and its successor, which has the same version."""
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
    """True if the primary itself handed the shard over to its successor."""
    return (
        old is not None
        and new.epoch == old.epoch + 1
        and new.primary == old.successor
        and old.primary in new.backups
    )


def without_backup(assignment: ShardAssignment, primary: Holder, lost: Holder) -> ShardAssignment:
    """Remove a backup or the joining server, so that the primary goes on without it."""
    if assignment.primary != primary or lost not in assignment.holders[1:]:
        return assignment
    return replace(
        assignment,
        backups=_without(assignment.backups, lost),
        joining=None if assignment.joining == lost else assignment.joining,
        successor=None if assignment.successor == lost else assignment.successor,
    )


def in_step(assignment: ShardAssignment, primary: Holder, joined: Holder) -> ShardAssignment:
    """Make the joining server a backup: the server has all acknowledged updates, and the primary
    waits for it before acknowledging more."""
    if assignment.primary != primary or assignment.joining != joined:
        return assignment
    return replace(assignment, backups=(*assignment.backups, joined), joining=None)


def filled(assignment: ShardAssignment, primary: Holder, epoch: int) -> ShardAssignment:
    """Mark the shard PRESENT: the primary of that epoch has the shard's first values, or has loaded
    the shard."""
    if (assignment.primary, assignment.epoch) != (primary, epoch):
        return assignment
    return replace(assignment, content=ShardContent.PRESENT)


def mark_empty(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """Mark the shard as without values, so that it may be created anew. The epoch rises: copies of
    the old shard are no copies of the new one."""
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


def record_disk(assignment: ShardAssignment, primary: Holder, version: int) -> ShardAssignment:
    """Name the primary's server in `on_disk`: its journal has the shard up to this version at
    least, and gets every later push."""
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


def promote_from_disk(
    assignment: ShardAssignment, server: Holder, dead: "frozenset[Holder]"
) -> ShardAssignment:
    """Make a later process of the server in `on_disk` the primary, if no process is left that has
    the shard's updates in memory. `dead`: processes known to be gone for good.

    Unreachable is not enough: such a process may still acknowledge updates, or have some that are
    not on the disk. But the primary of a lost shard need not be dead: it has no updates.
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
    """Mark the shard LOST: its primary was to load it from its server's disk, and did not find it
    there. All other processes that had the shard were known to be gone."""
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


def replace_empty_primary(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """Replace a primary that has no data of the shard, and so never led it in this epoch. A backup
    takes over, with all acknowledged updates; without one the shard is lost."""
    if assignment.primary == primary and assignment.backups:
        return promote(assignment, primary, assignment.backups[0])
    return not_on_disk(assignment, primary, assignment.epoch)


def is_older(assignment: ShardAssignment, epoch: int, version: int) -> bool:
    """True if a journal has less of the shard than the disk is known to have had."""
    return (epoch, version) < (assignment.disk_epoch, assignment.disk_version)


def record_older_copy(
    assignment: ShardAssignment, server: Holder, version: int, dead: "frozenset[Holder]"
) -> ShardAssignment:
    """Record that a later process of the server in `on_disk` found an older copy on its disk or,
    if `version` is 0, the shard of another placement of the job."""
    is_mine = assignment.on_disk == server.server_id
    primary = assignment.primary
    # True if the primary is another process of this server: it may be alive, with the right disk.
    is_other = primary.server_id == server.server_id and primary not in {server} | dead
    if not is_mine or (is_other and assignment.content is not ShardContent.LOST):
        return assignment
    return replace(assignment, found_version=max(version, 1), found_foreign=not version)


def may_be_put_on_disk(assignment: ShardAssignment, server: Holder) -> bool:
    """True if the record names the server's disk, or may soon: another process of the server is the
    shard's primary, and may be writing the record now."""
    primary = assignment.primary
    is_other_process = primary.server_id == server.server_id and primary != server
    return assignment.on_disk == server.server_id or is_other_process


def remove_disk(assignment: ShardAssignment, server: Holder) -> ShardAssignment:
    """Remove the server's disk from the record: its content is gone."""
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
