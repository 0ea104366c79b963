"""Lost shards: the record of a loss, its description for users, and giving a shard up."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from shoal_proto.short_lists import short_list
from shoal_server.core.shards.assignments import (
    AcceptedLoss,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    ShardLoss,
)

MAX_SNAPSHOT_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LossExplanation:
    """Reason why a lost shard is unavailable, in the parts of an error."""

    what: str
    seen: str
    expected: str
    fix: str
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAttempt:
    is_restored: bool
    reason: str = ""


class SamplesAfterLoss(Enum):
    """Choice for the sample ledger when shards are given up."""

    ANEW = "start over"
    KEEP = "stay counted"


def still_trained(
    assignments: JobAssignments, given_up_ids: Collection[int]
) -> list[ShardAssignment]:
    """Shards that keep or may get back trained values if `given_up_ids` are given up."""
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
    """Decide about the samples when shards are given up; None: the operator must choose. `wish`:
    the operator's choice. By default, samples start over if no trained shard is left: the new
    values would otherwise be trained only on the remaining samples."""
    if wish is not None:
        return wish
    return None if still_trained(assignments, given_up_ids) else SamplesAfterLoss.ANEW


def lost(assignments: JobAssignments) -> list[ShardAssignment]:
    return [h for h in assignments.shards if h.content is ShardContent.LOST]


def is_still_lost(current: JobAssignments | None, seen: Collection[ShardAssignment]) -> bool:
    """True if a shard is recorded as lost, or one of the lost shards `seen` has not changed since:
    a shard that was recovered or given up has another epoch or content."""
    unchanged = {(shard.shard_id, shard.epoch, shard.content) for shard in seen}
    return current is not None and any(
        shard.content is ShardContent.LOST
        or (shard.shard_id, shard.epoch, shard.content) in unchanged
        for shard in current.shards
    )


def with_losses(
    before: JobAssignments,
    after: JobAssignments,
    versions: Mapping[int, int],
    snapshot: str,
    now_unix_s: float,
) -> JobAssignments:
    """Return `after`, with a ShardLoss in each lost shard.

    `versions`: newest known versions; `snapshot`: outcome of a restore from a snapshot.
    """
    held = {h.shard_id: h for h in before.shards}

    def noted(shard: ShardAssignment) -> ShardAssignment:
        last = held.get(shard.shard_id, shard)
        if shard.content is not ShardContent.LOST or shard.loss is not None:
            return shard
        last_servers = tuple(h.server_id for h in (last.primary, *last.backups))
        if last.content is ShardContent.LOST:
            # The primary never had the values: it was to load them from a disk.
            last_servers = (last.on_disk,) if last.on_disk else ()
        loss = ShardLoss(
            version=max(versions.get(shard.shard_id, 0), last.disk_version, last.restored_version),
            lost_unix_s=now_unix_s,
            servers=last_servers,
            snapshot=snapshot[:MAX_SNAPSHOT_TEXT],
        )
        return replace(shard, loss=loss)

    return replace(after, shards=tuple(map(noted, after.shards)))


def after_failed_restore(
    before: JobAssignments, wanted: JobAssignments, why: str, now_unix_s: float
) -> JobAssignments:
    """Mark all shards that had values as lost: servers dropped them for a restore that failed.
    `wanted`: the record for the restore."""
    held = {h.shard_id: h for h in before.shards}

    def noted(shard: ShardAssignment) -> ShardAssignment:
        last = held.get(shard.shard_id, shard)
        anew = replace(shard, epoch=shard.epoch + 1, accepted_loss=last.accepted_loss)
        if last.content is ShardContent.NONE:
            return replace(anew, content=ShardContent.NONE)
        known = last.loss or ShardLoss(
            # The shard had the snapshot's version when the snapshot was taken.
            version=max(last.disk_version, last.restored_version, shard.restored_version),
            lost_unix_s=now_unix_s,
            servers=tuple(h.server_id for h in (last.primary, *last.backups)),
        )
        loss = replace(known, snapshot=why[:MAX_SNAPSHOT_TEXT])
        return replace(anew, content=ShardContent.LOST, loss=loss)

    return replace(wanted, shards=tuple(map(noted, wanted.shards)))


def give_up_shard(
    shard: ShardAssignment, by: str, now_unix_s: float, *, samples_anew: bool = False
) -> ShardAssignment:
    """Let a lost shard start over. The epoch rises, so that the new shard is not mistaken for the
    old one. No disk is named, so that no journal brings old values back."""
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
    return f"at least version {loss.version}" if loss and loss.version else "no version known"


def shards_in_short(shards: Iterable[ShardAssignment]) -> str:
    """List shards, such as "shard 3 (at least version 812)"."""
    return short_list((f"shard {h.shard_id} ({known_version(h.loss)})" for h in shards), 8)


def losses_in_words(job: str, shards: Iterable[ShardAssignment]) -> list[str]:
    """Describe lost shards. Shards with the same servers, disk and outcome of a restore share a
    paragraph."""
    alike: dict[tuple[tuple[str, ...], str, str], list[ShardAssignment]] = {}
    for shard in shards:
        loss = shard.loss or ShardLoss(lost_unix_s=0.0)
        alike.setdefault((loss.servers, shard.on_disk, loss.snapshot), []).append(shard)
    lines = []
    for (servers, _, snapshot), gone in alike.items():
        held_by = f" ({', '.join(servers)})" if servers else ""
        what = (
            f"{len(gone)} shards of job {job} were lost with every server that had them"
            if len(gone) > 1
            else f"shard {gone[0].shard_id} of job {job} was lost with every server that had it"
        )
        which = shards_in_short(gone) if len(gone) > 1 else known_version(gone[0].loss)
        text = f"{what}{held_by}: {which}. {recovery_advice(job, gone[0])} {snapshot}"
        lines.append(text.strip())
    return lines


def recovery_advice(job: str, shard: ShardAssignment) -> str:
    journal = "its journal"
    if shard.found_version:
        journal = "its own journal" if shard.found_foreign else "the newest copy of its journal"
    disk = f"start server {shard.on_disk} again with {journal}, or " if shard.on_disk else ""
    return (
        f"To bring it back, {disk}restore a snapshot: `shoal restore {job} --from URL`. The job"
        f" does not start over unless you give up the lost shards: `shoal accept-loss {job}`,"
        f" which says what happens to the job's samples."
    )


def explained(job: str, shard: ShardAssignment) -> LossExplanation:
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
    return LossExplanation(
        what=f"shard {shard.shard_id} of job {job} was lost with every server that had it",
        seen=f"{known_version(loss)}{held_by}; epoch {shard.epoch} is led by server"
        f" {shard.primary.server_id}, which has none of its values{found}",
        expected="a server that has its values",
        fix=f"{recovery_advice(job, shard)}{snapshot}",
        details={name: text for name, text in details.items() if text},
    )


def _found_on_disk(shard: ShardAssignment) -> str:
    """Contents of the journal that should hold the shard, in words; "" if nothing was found."""
    reached = f"version {shard.disk_version} of epoch {shard.disk_epoch} at least"
    if not shard.found_version:
        return ""
    if shard.found_foreign:
        return (
            f"; the journal that server {shard.on_disk} was started with is of another run of the"
            f" job, of its shards before a restore, or of another cluster; the server's own journal"
            f" had reached {reached}"
        )
    return (
        f"; the journal of server {shard.on_disk} is an older copy: it has version"
        f" {shard.found_version}; the newest copy had reached {reached}"
    )
