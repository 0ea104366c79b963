"""Shards that nobody has any more: what is kept of them, how it is told, and how they are given up.

Pure. That a shard is lost is found by `rebalance`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
    """`after`, in which each shard that `before` had says what is known of it now that it is lost.

    `versions`: the newest that each shard is known to have had. `snapshot`: what became of bringing
    the job back from one.
    """
    held = {h.shard_id: h for h in before.shards}

    def noted(shard: ShardAssignment) -> ShardAssignment:
        last = held.get(shard.shard_id, shard)
        if shard.content is not ShardContent.LOST or last.content is ShardContent.LOST:
            return shard
        loss = ShardLoss(
            version=versions.get(shard.shard_id, 0),
            lost_unix_s=now_unix_s,
            servers=tuple(h.server_id for h in (last.primary, *last.backups)),
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
            lost_unix_s=now_unix_s,
            servers=tuple(h.server_id for h in (last.primary, *last.backups)),
        )
        loss = replace(known, snapshot=why[:MAX_SNAPSHOT_TEXT])
        return replace(anew, content=ShardContent.LOST, loss=loss)

    return replace(wanted, shards=tuple(map(noted, wanted.shards)))


def given_up(shard: ShardAssignment, by: str, now_unix_s: float) -> ShardAssignment:
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
        accepted_loss=AcceptedLoss(loss=loss, by=by, accepted_unix_s=now_unix_s),
    )


def known_version(loss: ShardLoss | None) -> str:
    """The version that a lost shard had come to, as far as it is known."""
    return f"at least version {loss.version}" if loss and loss.version else "no version known"


def shards_in_short(shards: Iterable[ShardAssignment]) -> str:
    """Each with the version that is known: "shard 3 (at least version 812)"."""
    told = [f"shard {h.shard_id} ({known_version(h.loss)})" for h in shards]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")


def cure(job: str, shard: ShardAssignment) -> str:
    """What brings a lost shard back, or ends that it is waited for."""
    disk = f"start server {shard.on_disk} again with its journal, or " if shard.on_disk else ""
    return (
        f"To bring it back, {disk}restore a snapshot: `shoal restore {job} --from URL`. It is not"
        f" begun anew unless you give up what is lost: `shoal accept-loss {job}`. Samples that were"
        f" trained on stay counted; to train from nothing, `shoal rm {job}`."
    )


def explained(job: str, shard: ShardAssignment) -> Explanation:
    """Why a lost shard is not to be had, with all that is known of it."""
    loss = shard.loss
    held_by = f" on {', '.join(loss.servers)}" if loss and loss.servers else ""
    snapshot = f" {loss.snapshot}" if loss and loss.snapshot else ""
    details = {"job": job, "shard": str(shard.shard_id), "epoch": str(shard.epoch)}
    if loss and loss.version:
        details["at_least_version"] = str(loss.version)
    if loss:
        details["lost_unix_s"] = f"{loss.lost_unix_s:.3f}"
        details["servers"] = ",".join(loss.servers)
        details["snapshot"] = loss.snapshot
    if shard.on_disk:
        details["on_disk"] = shard.on_disk
    return Explanation(
        what=f"shard {shard.shard_id} of job {job} was lost with every server that had it",
        seen=f"{known_version(loss)}{held_by}; epoch {shard.epoch} is led by server"
        f" {shard.primary.server_id}, which has nothing of it",
        expected="a server that has its values",
        fix=f"{cure(job, shard)}{snapshot}",
        details={name: text for name, text in details.items() if text},
    )
