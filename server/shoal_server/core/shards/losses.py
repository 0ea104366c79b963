"""Shards that nobody has any more: what is kept of them, how it is told, and how they are given up.

Pure. That a shard is lost is found by `rebalance`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from shoal_server.core.shards.assignments import (
    AcceptedLoss,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    ShardLoss,
)

MAX_SNAPSHOT_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a shard is not to be had, in the parts of an error."""

    what: str
    seen: str
    expected: str
    fix: str
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAttempt:
    """What became of restoring a job."""

    is_restored: bool
    told: str = ""
    """Why not, in a sentence."""


class SamplesAfterLoss(Enum):
    """What becomes of the books on samples when shards are given up."""

    ANEW = "start over"
    KEEP = "stay counted"


def still_trained(
    assignments: JobAssignments, given_up_ids: Collection[int]
) -> list[ShardAssignment]:
    """The shards that keep what was trained, or may get it back, when these are given up."""
    return [
        shard
        for shard in assignments.shards
        if shard.content is not ShardContent.NONE and shard.shard_id not in given_up_ids
    ]


def samples_after(
    assignments: JobAssignments,
    given_up_ids: Collection[int],
    wish: SamplesAfterLoss | None,
) -> SamplesAfterLoss | None:
    """What becomes of the samples when these shards are given up; None: somebody has to say it.

    Where nothing that was trained is left, training begins anew, and so do its samples: else the
    job would end with values that have seen what was left of the samples only. Where a part is
    left, nobody but who gives the rest up can know which is right.
    """
    if wish is not None:
        return wish
    return None if still_trained(assignments, given_up_ids) else SamplesAfterLoss.ANEW


def lost(assignments: JobAssignments) -> list[ShardAssignment]:
    """The job's shards that are lost."""
    return [h for h in assignments.shards if h.content is ShardContent.LOST]


def with_losses(
    before: JobAssignments,
    after: JobAssignments,
    versions: Mapping[int, int],
    snapshot: str,
    now_unix_s: float,
) -> JobAssignments:
    """`after`, in which each shard that is lost says what is known of it.

    `versions`: the newest that each shard is known to have had. `snapshot`: what became of bringing
    the job back from one.
    """
    held = {h.shard_id: h for h in before.shards}

    def noted(shard: ShardAssignment) -> ShardAssignment:
        last = held.get(shard.shard_id, shard)
        if shard.content is not ShardContent.LOST or shard.loss is not None:
            return shard
        had = tuple(h.server_id for h in (last.primary, *last.backups))
        if last.content is ShardContent.LOST:
            # Its primary has nothing of it: it was to lead it from a disk.
            had = (last.on_disk,) if last.on_disk else ()
        loss = ShardLoss(
            version=max(versions.get(shard.shard_id, 0), last.disk_version, last.restored_version),
            lost_unix_s=now_unix_s,
            servers=had,
            snapshot=snapshot[:MAX_SNAPSHOT_TEXT],
        )
        return replace(shard, loss=loss)

    return replace(after, shards=tuple(map(noted, after.shards)))


def after_failed_restore(
    before: JobAssignments, wanted: JobAssignments, why: str, now_unix_s: float
) -> JobAssignments:
    """Every server has let go of what it had, and what was to take its place could not be loaded:
    all that had values is lost. `wanted`: who was to load them."""
    had = {h.shard_id: h for h in before.shards}

    def noted(shard: ShardAssignment) -> ShardAssignment:
        last = had.get(shard.shard_id, shard)
        anew = replace(shard, epoch=shard.epoch + 1, accepted_loss=last.accepted_loss)
        if last.content is ShardContent.NONE:
            return replace(anew, content=ShardContent.NONE)
        known = last.loss or ShardLoss(
            # The snapshot is of what the shard was once, too.
            version=max(last.disk_version, last.restored_version, shard.restored_version),
            lost_unix_s=now_unix_s,
            servers=tuple(h.server_id for h in (last.primary, *last.backups)),
        )
        loss = replace(known, snapshot=why[:MAX_SNAPSHOT_TEXT])
        return replace(anew, content=ShardContent.LOST, loss=loss)

    return replace(wanted, shards=tuple(map(noted, wanted.shards)))


def given_up(
    shard: ShardAssignment, by: str, now_unix_s: float, *, samples_anew: bool = False
) -> ShardAssignment:
    """A lost shard begins anew: whoever comes may create it. The epoch rises, so that nobody
    takes the new one for the old; no disk has anything of the new one, so no journal brings the old
    one back."""
    if shard.content is not ShardContent.LOST:
        return shard
    loss = shard.loss or ShardLoss(lost_unix_s=now_unix_s)
    return ShardAssignment(
        shard_id=shard.shard_id,
        epoch=shard.epoch + 1,
        primary=shard.primary,
        accepted_loss=AcceptedLoss(
            loss=loss, by=by, accepted_unix_s=now_unix_s, samples_anew=samples_anew
        ),
    )


def known_version(loss: ShardLoss | None) -> str:
    """The version that a lost shard had come to, as far as it is known."""
    return f"at least version {loss.version}" if loss and loss.version else "no version known"


def shards_in_short(shards: Iterable[ShardAssignment]) -> str:
    """Each with the version that is known: "shard 3 (at least version 812)"."""
    told = [f"shard {h.shard_id} ({known_version(h.loss)})" for h in shards]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")


def told_together(job: str, shards: Iterable[ShardAssignment]) -> list[str]:
    """Lost shards in words: one paragraph for all that went with the same servers, and that the
    same would bring back."""
    alike: dict[tuple[tuple[str, ...], str, str], list[ShardAssignment]] = {}
    for shard in shards:
        loss = shard.loss or ShardLoss(lost_unix_s=0.0)
        alike.setdefault((loss.servers, shard.on_disk, loss.snapshot), []).append(shard)
    told = []
    for (servers, _, snapshot), gone in alike.items():
        held_by = f" ({', '.join(servers)})" if servers else ""
        what = (
            f"{len(gone)} shards of job {job} were lost with every server that had them"
            if len(gone) > 1
            else f"shard {gone[0].shard_id} of job {job} was lost with every server that had it"
        )
        which = shards_in_short(gone) if len(gone) > 1 else known_version(gone[0].loss)
        text = f"{what}{held_by}: {which}. {cure(job, gone[0])} {snapshot}"
        told.append(text.strip())
    return told


def cure(job: str, shard: ShardAssignment) -> str:
    """What brings a lost shard back, or ends that it is waited for."""
    journal = "its journal"
    if shard.found_version:
        journal = "its own journal" if shard.found_foreign else "the newest copy of its journal"
    disk = f"start server {shard.on_disk} again with {journal}, or " if shard.on_disk else ""
    return (
        f"To bring it back, {disk}restore a snapshot: `shoal restore {job} --from URL`. It is not"
        f" started over unless you give up the lost shards: `shoal accept-loss {job}`, which says"
        f" what happens to the job's samples."
    )


def explained(job: str, shard: ShardAssignment) -> Explanation:
    """Why a lost shard is not to be had, with all that is known of it."""
    loss = shard.loss
    held_by = f" on {', '.join(loss.servers)}" if loss and loss.servers else ""
    snapshot = f" {loss.snapshot}" if loss and loss.snapshot else ""
    found = _found_on_disk(shard)
    details = {"job": job, "shard": str(shard.shard_id), "epoch": str(shard.epoch)}
    if loss and loss.version:
        details["at_least_version"] = str(loss.version)
    if loss:
        details["lost_unix_s"] = f"{loss.lost_unix_s:.3f}"
        details["servers"] = ",".join(loss.servers)
        details["snapshot"] = loss.snapshot
    if shard.on_disk:
        details["on_disk"] = shard.on_disk
    if shard.found_foreign:
        details["found_foreign"] = "true"
    elif shard.found_version:
        details["found_version"] = str(shard.found_version)
    return Explanation(
        what=f"shard {shard.shard_id} of job {job} was lost with every server that had it",
        seen=f"{known_version(loss)}{held_by}; epoch {shard.epoch} is led by server"
        f" {shard.primary.server_id}, which has nothing of it{found}",
        expected="a server that has its values",
        fix=f"{cure(job, shard)}{snapshot}",
        details={name: text for name, text in details.items() if text},
    )


def _found_on_disk(shard: ShardAssignment) -> str:
    """What the journal that should have a lost shard has in its place, if anything is known."""
    reached = f"version {shard.disk_version} of epoch {shard.disk_epoch} at least"
    if not shard.found_version:
        return ""
    if shard.found_foreign:
        return (
            f"; the journal that server {shard.on_disk} was started with is of another run of the"
            f" job, or of another cluster; its own had reached {reached}"
        )
    return (
        f"; the journal of server {shard.on_disk} is an older copy: it has version"
        f" {shard.found_version}, and had reached {reached}"
    )
