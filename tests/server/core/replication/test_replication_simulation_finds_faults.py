"""Faults planted into the shipped core: the simulation runs this core, and must find them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from support.sim.errors import fails
from support.sim.replication.schedule import simulate_replication

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing import journal_claims
from shoal_server.core.replication.backing.copies import Copies, CopyPhase
from shoal_server.core.replication.backing.journal_claims import JournalClaims
from shoal_server.core.replication.backing.missing_shards import MissingShards
from shoal_server.core.replication.leading.followers import Follower
from shoal_server.core.replication.leading.led_shard import LedShard
from shoal_server.core.replication.protocol.effects import Effect, SendReply
from shoal_server.core.replication.protocol.events import ShardAssigned
from shoal_server.core.replication.protocol.messages import Key, UpdateMessage
from shoal_server.core.replication.replication_core import Lease, ReplicationCore
from shoal_server.core.shards import rebalance
from shoal_server.core.shards.abandoned_loads import AbandonedLoads
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.observed_servers import ObservedServers
from shoal_server.core.shards.rebalance import Servers

MAX_SEEDS = 400

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def no_fence_after_the_lease(patch: Patch) -> None:
    """A primary that may have been declared dead still acknowledges pushes."""

    def renewed(lease: Lease, sent_s: float) -> None:
        lease.ends_s = math.inf

    patch.setattr(Lease, "renewed", renewed)


def a_joining_server_is_not_required_while_its_write_is_in_progress(patch: Patch) -> None:
    """The write that puts the server in step may already have taken effect."""

    def required(led: LedShard) -> Iterator[Follower]:
        for follower in led.followers.values():
            if follower.holder in led.assignment.backups:
                yield follower

    patch.setattr(LedShard, "_required", required)


def a_lost_backup_is_not_required_before_its_removal_is_written(patch: Patch) -> None:
    """A lost backup may be alive, and take over without the updates acknowledged since."""
    real = LedShard._required

    def required(led: LedShard) -> Iterator[Follower]:
        return (follower for follower in real(led) if follower.holder not in led.lost)

    patch.setattr(LedShard, "_required", required)


def a_backup_leads_before_it_has_settled(patch: Patch) -> None:
    """Updates that it has received but not applied may be acknowledged."""
    real = ReplicationCore._to_lead

    def to_lead(
        core: ReplicationCore, key: Key, new: ShardAssignment, *, stopped: bool = False
    ) -> Iterator[Effect]:
        copy = core._copies.find(key)
        if copy is not None and copy.phase is CopyPhase.HELD and core.leading.find(key) is None:
            core._copies.pop(key)
            led = core.leading.make_led_shard(
                key, new, copy.received, origin=copy.epoch, born=copy.born
            )
            yield from core._begin(led)
        else:
            yield from real(core, key, new, stopped=stopped)

    patch.setattr(ReplicationCore, "_to_lead", to_lead)


def a_version_is_durable_before_the_record_names_the_disk(patch: Patch) -> None:
    """No server would look for the version on that disk."""
    patch.setattr(LedShard, "durable_version", property(lambda led: led._disk.version))


def a_disk_is_led_from_while_its_last_process_may_live(patch: Patch) -> None:
    """A server treats its own earlier process, and that one's backups, as dead."""
    real = JournalClaims.wanted_record

    def revised(
        claims: JournalClaims, key: Key, a: ShardAssignment, now_s: float
    ) -> ShardAssignment:
        known = claims._dead
        if a.primary.server_id == claims._me.server_id:
            claims._dead = known | {a.primary, *a.backups}
        try:
            return real(claims, key, a, now_s)
        finally:
            claims._dead = known

    patch.setattr(JournalClaims, "wanted_record", revised)


def a_process_is_dead_once_another_has_its_id(patch: Patch) -> None:
    """The coordinator treats an earlier process of a server's id as dead."""
    real = ObservedServers._dead

    def dead(sightings: ObservedServers, seen: Servers) -> frozenset[Holder]:
        ids = {holder.server_id for holder in seen.present}
        return real(sightings, seen) | {h for h in sightings._away_s if h.server_id in ids}

    patch.setattr(ObservedServers, "_dead", dead)


def a_lost_shard_begins_anew(patch: Patch) -> None:
    """No operator has accepted the loss."""
    real = rebalance._rescue

    def rescue(assignment: ShardAssignment, *others: object) -> ShardAssignment:
        found = real(assignment, *others)  # type: ignore[arg-type]
        lost = found.content is ShardContent.LOST
        fresh = ShardAssignment(shard_id=found.shard_id, epoch=found.epoch, primary=found.primary)
        return fresh if lost else found

    patch.setattr(rebalance, "_rescue", rescue)


def followers_count_as_up_to_date_at_once(patch: Patch) -> None:
    """A new primary counts its version as received by its followers."""
    real = Follower.begin

    def begin(follower: Follower, received: int, version: int) -> None:
        real(follower, version, version)

    patch.setattr(Follower, "begin", begin)


def a_copy_follows_any_caller(patch: Patch) -> None:
    """The copy also follows a server that the record no longer names."""
    patch.setattr(
        Copies,
        "_is_sent_by_primary",
        lambda copies, assignment, peer, epoch: assignment is not None,
    )


def a_copy_of_another_history_continues(patch: Patch) -> None:
    """The copy has updates of a deposed primary that no other copy has."""

    def continues(led: LedShard, copy_epoch: int, born: int, version: int) -> bool:
        return born == led.born and led.log.start <= version <= led.version

    patch.setattr(LedShard, "continues", continues)


def an_absence_is_counted_over_gaps(patch: Patch) -> None:
    """A missing server may have been present meanwhile, and have acknowledged pushes."""

    def init(absences: ServerAbsences[Holder], longest_gap_s: float = 0.0) -> None:
        absences._longest_gap_s = math.inf
        absences._asked_s, absences._since_s = -math.inf, {}

    patch.setattr(ServerAbsences, "__init__", init)


def a_server_that_ends_acknowledges_on(patch: Patch) -> None:
    """Other servers treat the server as dead once it has reported its end."""
    patch.setattr(ReplicationCore, "_lease_ended", lambda core, event: iter(()))


def an_older_copy_of_a_disk_is_led(patch: Patch) -> None:
    """The older copy lacks updates that were durable."""
    patch.setattr(journal_claims, "is_older", lambda assignment, epoch, version: False)


def copies_of_another_run_are_kept(patch: Patch) -> None:
    """The next run may have the same epochs."""
    real = ReplicationCore._assigned

    def assigned(core: ReplicationCore, event: ShardAssigned) -> Iterator[Effect]:
        if event.key in core._records.placement_ids:
            core._records._placement_ids[event.key] = event.placement_id
        return real(core, event)

    patch.setattr(ReplicationCore, "_assigned", assigned)


def abandoned_loads_are_waited_for(patch: Patch) -> None:
    """The coordinator that restored the job ended before all shards were loaded."""

    def given_up(
        loads: AbandonedLoads, assignments: JobAssignments, **now: object
    ) -> JobAssignments:
        return assignments

    patch.setattr(AbandonedLoads, "mark_lost", given_up)


def a_shard_is_handed_over_before_its_copies_have_read_all_updates(patch: Patch) -> None:
    """The other copies refuse what they have not read once the successor leads."""
    patch.setattr(LedShard, "is_confirmed", property(lambda led: led.is_replicated(led.version)))


def updates_of_a_former_primary_are_refused(patch: Patch) -> None:
    """The refused updates may be acknowledged already, and the copy may be the next primary."""
    real = Copies._record

    def record(
        copies: Copies,
        peer: Holder,
        link: int,
        told: UpdateMessage,
        *more: Any,
    ) -> Iterator[Effect]:
        _, assignment = more
        if copies._is_sent_by_primary(assignment, peer, told):
            yield from real(copies, peer, link, told, *more)
        else:
            yield SendReply(peer, link, copies._other_holders(told, assignment))

    patch.setattr(Copies, "_record", record)


def a_record_is_discarded_once_one_follower_has_it(patch: Patch) -> None:
    """Another follower still lacks the record."""

    def trim(led: LedShard) -> None:
        needs = (f.needs_records_after(led.version) for f in led.followers.values())
        led.log.trim(max(needs, default=led.version))

    patch.setattr(LedShard, "trim", trim)


def a_server_without_a_copy_stays_in_the_record(patch: Patch) -> None:
    """No other server leads the shard or declares it lost."""
    patch.setattr(MissingShards, "wanted_record", lambda missing, key, a: a)


# Two more faults break no invariant. One hands a shard over to a successor that is not up to date:
# the update that it lacks was not acknowledged, because the successor is required. It is pushed
# again, and the old primary's copy, which differs, is replaced. The other counts replies of another
# epoch: a link keeps the order of its messages, so that none follows the offer of this epoch.

FOCUS: Mapping[Fault, Sequence[str]] = {
    a_joining_server_is_not_required_while_its_write_is_in_progress: [
        *("cut from etcd", "kill", "newcomer", "slow")
    ],
    a_copy_of_another_history_continues: ["deposed without notice"],
    an_absence_is_counted_over_gaps: ["away twice"],
    abandoned_loads_are_waited_for: ["restore", "kill restorer"],
    an_older_copy_of_a_disk_is_led: ["save disk", "roll back", "kill all"],
    updates_of_a_former_primary_are_refused: ["restart"],
    a_server_without_a_copy_stays_in_the_record: ["kill what failed"],
}
"""Kinds of simulated faults with which the planted one is found sooner than with all kinds."""

FAULTS: Sequence[Fault] = (
    a_shard_is_handed_over_before_its_copies_have_read_all_updates,
    updates_of_a_former_primary_are_refused,
    no_fence_after_the_lease,
    a_joining_server_is_not_required_while_its_write_is_in_progress,
    a_lost_backup_is_not_required_before_its_removal_is_written,
    a_backup_leads_before_it_has_settled,
    a_version_is_durable_before_the_record_names_the_disk,
    a_disk_is_led_from_while_its_last_process_may_live,
    a_process_is_dead_once_another_has_its_id,
    a_lost_shard_begins_anew,
    followers_count_as_up_to_date_at_once,
    a_copy_follows_any_caller,
    a_copy_of_another_history_continues,
    an_absence_is_counted_over_gaps,
    a_server_that_ends_acknowledges_on,
    an_older_copy_of_a_disk_is_led,
    copies_of_another_run_are_kept,
    abandoned_loads_are_waited_for,
    a_server_without_a_copy_stays_in_the_record,
    a_record_is_discarded_once_one_follower_has_it,
)
RARE = (
    a_shard_is_handed_over_before_its_copies_have_read_all_updates,
    copies_of_another_run_are_kept,
    updates_of_a_former_primary_are_refused,
    a_joining_server_is_not_required_while_its_write_is_in_progress,
    a_version_is_durable_before_the_record_names_the_disk,
    an_absence_is_counted_over_gaps,
    a_copy_follows_any_caller,
    a_backup_leads_before_it_has_settled,
    a_process_is_dead_once_another_has_its_id,
    a_copy_of_another_history_continues,
)
"""Faults that take seconds to find."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.long if f in RARE else (), id=f.__name__) for f in FAULTS],
)
def test_the_simulation_finds_the_fault(fault: Fault, monkeypatch: Patch) -> None:
    """An invariant fails within `MAX_SEEDS` seeds; without the fault the same seed passes."""
    only = FOCUS.get(fault, ())
    for seed in range(MAX_SEEDS):
        simulated = partial(simulate_replication, seed, only)
        with monkeypatch.context() as patch:
            fault(patch)
            is_found = fails(simulated)
        if is_found and not fails(simulated):
            return
    raise AssertionError(f"not found in {MAX_SEEDS} seeds")
