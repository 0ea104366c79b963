"""Assignment of shards to servers, and its changes: functions that map a record to the next one.

A job's record is in etcd and replaced by compare-and-swap: of two processes that change it at once,
one starts again from the other's result. These rules keep updates safe:

- A primary acknowledges only updates that every backup *in step* has, so any of them may take over.
  (Acknowledgements of the level APPLIED do not promise that.)
- Before a primary goes on without a backup, it removes the backup from the record
  (`without_backup`).
- A backup takes over by a write to the record (`promote`), and only if the record names it.

So two primaries never both acknowledge, even if one wrongly believes the other dead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shoal_server.core.processes import Holder


class ShardContent(Enum):
    """State of a shard's values. Workers may create a shard only if it is NONE: a lost shard must
    not silently start over."""

    NONE = "no worker has created the shard"
    LOADING = "the primary is to load the shard from a snapshot"
    PRESENT = "the shard has values, which may have been read"
    LOST = "the shard had values, and no server is known to have them any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoss:
    lost_unix_s: float
    version: int = 0
    """A version that the shard had reached; 0: unknown. Versions are reported only now and then, so
    the shard may have reached a later one."""
    servers: tuple[str, ...] = ()
    """Ids of the last servers that had the shard."""
    snapshot: str = ""
    """Outcome of a restore from a snapshot, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedLoss:
    """An operator's decision to give up a lost shard."""

    loss: ShardLoss
    by: str
    accepted_unix_s: float
    samples_anew: bool = False
    """True if the job's samples started over too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAssignment:
    shard_id: int
    epoch: int
    """Rises from 1 with each new primary, and when the shard is emptied, lost or restored."""
    primary: Holder
    backups: tuple[Holder, ...] = ()
    joining: Holder | None = None
    """The server that is to become a backup."""
    successor: Holder | None = None
    """The backup that is to become primary."""
    on_disk: str = ""
    """Id of the server whose journal holds all pushes that were acknowledged as durable; empty: no
    push was.

    A primary acknowledges nothing as durable before this field names its own server. The named
    server's journal keeps the shard. So one disk holds all durable pushes, and a new process of its
    server can lead from that disk when all holders are gone.
    """
    disk_epoch: int = 0
    disk_version: int = 0
    """Epoch and version of the shard on the disk, or earlier ones: updated now and then, to
    recognize an older copy of the disk."""
    found_version: int = 0
    """Version of an older copy that the server found on its disk, or 1 if `found_foreign`; 0:
    nothing was found."""
    found_foreign: bool = False
    """True if the disk had a shard of another placement."""
    restored_version: int = 0
    """Version in the snapshot that the shard was restored from; 0: none."""
    content: ShardContent = ShardContent.NONE
    """State of the values. It is PRESENT before workers read them or push."""
    loss: ShardLoss | None = None
    """Facts about a lost shard, once the coordinator has recorded them."""
    accepted_loss: AcceptedLoss | None = None
    """Latest decision of an operator to give the shard up; None: there was none."""

    def holds(self, holder: Holder) -> bool:
        """True for the primary and servers in step, which have every update acknowledged as
        replicated."""
        return holder == self.primary or holder in self.backups

    @property
    def holders(self) -> tuple[Holder, ...]:
        joining = () if self.joining is None else (self.joining,)
        return (self.primary, *self.backups, *joining)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAssignments:
    job: str
    copies: int
    """Wanted copies of each shard, including the primary."""
    shards: tuple[ShardAssignment, ...]
    placement_id: str = ""
    """Random id, drawn when shards are first placed and at each restore. Shards of different
    placements are different, even with equal ids and epochs."""
    kept_placement_id: str = ""
    """Id that members state if the job was restored while they trained on; empty:
    `placement_id`."""

    @property
    def members_placement_id(self) -> str:
        """Id that members must state to use the shards."""
        return self.kept_placement_id or self.placement_id

    def changed(
        self, shard_ids: Iterable[int], change: Callable[[ShardAssignment], ShardAssignment]
    ) -> "JobAssignments":
        """The record with `change` made to some shards."""
        chosen = frozenset(shard_ids)
        return replace(
            self, shards=tuple(change(h) if h.shard_id in chosen else h for h in self.shards)
        )

    def find(self, shard_id: int) -> ShardAssignment | None:
        return next((h for h in self.shards if h.shard_id == shard_id), None)


def promote(assignment: ShardAssignment, lost: Holder, backup: Holder) -> ShardAssignment:
    """Make a backup the primary after the loss of `lost`. The other backups stay: each has all
    acknowledged updates, and gets the new primary's version before more is acknowledged."""
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
    """Exchange a stopped primary and its successor, which have the same version."""
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
    """True if the primary itself handed the shard over."""
    return (
        old is not None
        and new.epoch == old.epoch + 1
        and new.primary == old.successor
        and old.primary in new.backups
    )


def without_backup(assignment: ShardAssignment, primary: Holder, lost: Holder) -> ShardAssignment:
    """Remove a backup or the joining server, so that the primary can go on."""
    if assignment.primary != primary or lost not in assignment.holders[1:]:
        return assignment
    return replace(
        assignment,
        backups=_without(assignment.backups, lost),
        joining=None if assignment.joining == lost else assignment.joining,
        successor=None if assignment.successor == lost else assignment.successor,
    )


def in_step(assignment: ShardAssignment, primary: Holder, joined: Holder) -> ShardAssignment:
    """Make the joining server, which has all acknowledged updates, a backup."""
    if assignment.primary != primary or assignment.joining != joined:
        return assignment
    return replace(assignment, backups=(*assignment.backups, joined), joining=None)


def filled(assignment: ShardAssignment, primary: Holder, epoch: int) -> ShardAssignment:
    """Mark the shard PRESENT: the primary of that epoch has its values."""
    if (assignment.primary, assignment.epoch) != (primary, epoch):
        return assignment
    return replace(assignment, content=ShardContent.PRESENT)


def mark_empty(assignment: ShardAssignment, primary: Holder) -> ShardAssignment:
    """Mark the shard as without values, so that workers are allowed to create it anew. The epoch
    rises: copies of the old shard are not copies of the new one."""
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
    """Name the primary's server in `on_disk`: its journal has this version at least."""
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
    """Make `server`, a process of the server that `on_disk` names, the primary if no process is
    left with the shard in memory. `dead`: processes known to be gone for good.

    An unreachable process may still acknowledge updates, or have some that the disk lacks. The
    primary of a lost shard has no updates, so it need not be dead.
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
    """Mark the shard LOST: its primary did not find it on the disk, and all other holders were
    known to be gone."""
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
    """Replace a primary that has no data of the shard. Without a backup the shard is lost."""
    if assignment.primary == primary and assignment.backups:
        return promote(assignment, primary, assignment.backups[0])
    return not_on_disk(assignment, primary, assignment.epoch)


def is_older(assignment: ShardAssignment, epoch: int, version: int) -> bool:
    """True if a journal has less than the disk is known to have had."""
    return (epoch, version) < (assignment.disk_epoch, assignment.disk_version)


def record_older_copy(
    assignment: ShardAssignment, server: Holder, version: int, dead: "frozenset[Holder]"
) -> ShardAssignment:
    """Record that a later process of the server found an older copy on its disk or, for `version`
    0, a shard of another placement."""
    is_mine = assignment.on_disk == server.server_id
    primary = assignment.primary
    # Another process of this server may be alive, with the right disk.
    is_other = primary.server_id == server.server_id and primary not in {server} | dead
    if not is_mine or (is_other and assignment.content is not ShardContent.LOST):
        return assignment
    return replace(assignment, found_version=max(version, 1), found_foreign=not version)


def may_be_put_on_disk(assignment: ShardAssignment, server: Holder) -> bool:
    """True if the record names the server's disk, or if the primary is another process of the
    server, which may soon name the disk in the record."""
    primary = assignment.primary
    is_other_process = primary.server_id == server.server_id and primary != server
    return assignment.on_disk == server.server_id or is_other_process


def remove_disk(assignment: ShardAssignment, server: Holder) -> ShardAssignment:
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
