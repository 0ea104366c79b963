"""Faults planted into the core that ships: the simulation runs this core, and must find them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from support.sim.replication.schedule import simulate_replication

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing import journal_claims
from shoal_server.core.replication.backing.copies import Copies, CopyPhase
from shoal_server.core.replication.backing.journal_claims import JournalClaims
from shoal_server.core.replication.backing.missing_shards import MissingShards
from shoal_server.core.replication.leading.followers import Follower
from shoal_server.core.replication.leading.led_shard import LedShard
from shoal_server.core.replication.lease import Lease
from shoal_server.core.replication.protocol.effects import Effect, SendReply
from shoal_server.core.replication.protocol.events import ShardAssigned
from shoal_server.core.replication.protocol.messages import Key, UpdateMessage
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.core.shards import rebalance
from shoal_server.core.shards.abandoned_loads import AbandonedLoads
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.rebalance import Servers
from shoal_server.core.shards.sightings import Sightings

MAX_SEEDS = 400

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def no_fence_after_the_lease(patch: Patch) -> None:
    """A primary that may have been declared dead still acknowledges pushes."""

    def renewed(lease: Lease, sent_s: float) -> None:
        lease.ends_s = math.inf

    patch.setattr(Lease, "renewed", renewed)


def a_joiner_counts_for_nothing_until_it_is_known_to_be_in_step(patch: Patch) -> None:
    """The write that puts the joiner in step may already have been made."""

    def required(led: LedShard) -> Iterator[Follower]:
        for follower in led.followers.values():
            if follower.holder in led.assignment.backups:
                yield follower

    patch.setattr(LedShard, "_required", required)


def a_lost_backup_counts_for_nothing_before_that_is_written(patch: Patch) -> None:
    """The backup may be alive, and take over."""
    real = LedShard._required

    def required(led: LedShard) -> Iterator[Follower]:
        return (follower for follower in real(led) if follower.holder not in led.lost)

    patch.setattr(LedShard, "_required", required)


def a_backup_leads_before_it_has_settled(patch: Patch) -> None:
    """Updates that the backup received and has not applied were acknowledged."""
    real = ReplicationCore._to_lead

    def to_lead(
        core: ReplicationCore, key: Key, new: ShardAssignment, *, stopped: bool = False
    ) -> Iterator[Effect]:
        copy = core._copies.find(key)
        if copy is not None and copy.phase is CopyPhase.HELD and core.leading.find(key) is None:
            core._copies.take(key)
            led = core.leading.led(key, new, copy.received, origin=copy.epoch, born=copy.born)
            yield from core._begin(led)
        else:
            yield from real(core, key, new, stopped=stopped)

    patch.setattr(ReplicationCore, "_to_lead", to_lead)


def a_version_is_durable_before_the_record_names_the_disk(patch: Patch) -> None:
    """Servers would never look for the version on that disk."""
    patch.setattr(LedShard, "durable_version", property(lambda led: led._disk.version))


def a_disk_is_led_from_while_its_last_process_may_live(patch: Patch) -> None:
    """A server's id does not tell which of its processes is alive."""
    real = JournalClaims.revised

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

    patch.setattr(JournalClaims, "revised", revised)


def a_process_is_dead_once_another_has_its_id(patch: Patch) -> None:
    """The same fault in the coordinator."""
    real = Sightings._dead

    def dead(sightings: Sightings, seen: Servers) -> frozenset[Holder]:
        ids = {holder.server_id for holder in seen.present}
        return real(sightings, seen) | {h for h in sightings._away_s if h.server_id in ids}

    patch.setattr(Sightings, "_dead", dead)


def a_lost_shard_begins_anew(patch: Patch) -> None:
    """The loss was not accepted by an operator."""
    real = rebalance._rescue

    def rescue(assignment: ShardAssignment, *others: object) -> ShardAssignment:
        found = real(assignment, *others)  # type: ignore[arg-type]
        lost = found.content is ShardContent.LOST
        fresh = ShardAssignment(shard_id=found.shard_id, epoch=found.epoch, primary=found.primary)
        return fresh if lost else found

    patch.setattr(rebalance, "_rescue", rescue)


def what_a_new_primary_has_is_said_to_be_on_its_followers(patch: Patch) -> None:
    """Followers count as up to date as soon as they are asked."""
    real = Follower.begin

    def begin(follower: Follower, received: int, version: int) -> None:
        real(follower, version, version)

    patch.setattr(Follower, "begin", begin)


def a_copy_follows_whoever_calls(patch: Patch) -> None:
    """The copy also follows a server that the record no longer names."""
    patch.setattr(
        Copies, "_may_tell", lambda copies, assignment, peer, epoch: assignment is not None
    )


def a_copy_that_has_something_else_goes_on(patch: Patch) -> None:
    """The copy continues a deposed primary, whose last updates are in no other copy."""

    def continues(led: LedShard, copy_epoch: int, born: int, version: int) -> bool:
        return born == led.born and led.log.start <= version <= led.version

    patch.setattr(LedShard, "continues", continues)


def an_absence_goes_on_though_nobody_looked(patch: Patch) -> None:
    """A server that was away may have been back meanwhile, and have acknowledged pushes."""

    def init(absences: ServerAbsences[Holder], longest_gap_s: float = 0.0) -> None:
        absences._longest_gap_s = math.inf
        absences._asked_s, absences._since_s = -math.inf, {}

    patch.setattr(ServerAbsences, "__init__", init)


def who_ends_acknowledges_to_the_last(patch: Patch) -> None:
    """Others take the server for dead as soon as it has reported its end."""
    patch.setattr(ReplicationCore, "_lease_ended", lambda core, event: iter(()))


def an_older_copy_of_a_disk_is_led(patch: Patch) -> None:
    """The older copy lacks updates that were durable."""
    patch.setattr(journal_claims, "is_older", lambda assignment, epoch, version: False)


def what_was_held_in_another_run_is_kept(patch: Patch) -> None:
    """Epochs of the next run may be the same."""
    real = ReplicationCore._assigned

    def assigned(core: ReplicationCore, event: ShardAssigned) -> Iterator[Effect]:
        if event.key in core._records.runs:
            core._records._runs[event.key] = event.run
        return real(core, event)

    patch.setattr(ReplicationCore, "_assigned", assigned)


def what_nobody_loads_any_more_is_waited_for(patch: Patch) -> None:
    """The process that restored the job ended halfway."""

    def given_up(
        loads: AbandonedLoads, assignments: JobAssignments, **now: object
    ) -> JobAssignments:
        return assignments

    patch.setattr(AbandonedLoads, "given_up", given_up)


def a_shard_is_handed_over_before_its_copies_have_read_all(patch: Patch) -> None:
    """The successor leads at once; what other copies have not read, they refuse from then on."""
    patch.setattr(LedShard, "is_confirmed", property(lambda led: led.is_safe(led.version)))


def what_follows_on_a_copy_is_refused_of_who_leads_no_longer(patch: Patch) -> None:
    """The update was acknowledged before, and the copy may be the next to lead."""
    real = Copies._record

    def record(
        copies: Copies,
        peer: Holder,
        link: int,
        told: UpdateMessage,
        *more: Any,
    ) -> Iterator[Effect]:
        _, assignment = more
        if copies._may_tell(assignment, peer, told):
            yield from real(copies, peer, link, told, *more)
        else:
            yield SendReply(peer, link, copies._other_holders(told, assignment))

    patch.setattr(Copies, "_record", record)


def a_record_is_discarded_once_one_follower_has_it(patch: Patch) -> None:
    """Another follower still lacks the record."""

    def trim(led: LedShard) -> None:
        needs = (f.needs_from(led.version) for f in led.followers.values())
        led.log.trim(max(needs, default=led.version))

    patch.setattr(LedShard, "trim", trim)


def who_has_nothing_of_a_shard_keeps_its_place_in_the_record(patch: Patch) -> None:
    """Another server neither leads the shard then nor declares it lost."""
    patch.setattr(MissingShards, "revised", lambda missing, key, a: a)


# Two more faults break no invariant. Handover to a successor that is not up to date: the update
# that it lacks was not acknowledged, as the successor counts; the update is sent again, and the old
# primary's copy, which differs, is replaced. An answer of another epoch that counts: messages on a
# link arrive in order, so none of another epoch comes after an offer of this epoch.

FOCUS: Mapping[Fault, Sequence[str]] = {
    a_joiner_counts_for_nothing_until_it_is_known_to_be_in_step: [
        *("cut from etcd", "kill", "newcomer", "slow")
    ],
    a_copy_that_has_something_else_goes_on: ["deposed unheard"],
    an_absence_goes_on_though_nobody_looked: ["away twice"],
    what_nobody_loads_any_more_is_waited_for: ["restore", "kill restorer"],
    an_older_copy_of_a_disk_is_led: ["save disk", "roll back", "kill all"],
    what_follows_on_a_copy_is_refused_of_who_leads_no_longer: ["restart"],
    who_has_nothing_of_a_shard_keeps_its_place_in_the_record: ["kill what failed"],
}
"""Kinds of simulated trouble that meet a planted fault more often than all kinds together do."""

FAULTS: Sequence[Fault] = (
    a_shard_is_handed_over_before_its_copies_have_read_all,
    what_follows_on_a_copy_is_refused_of_who_leads_no_longer,
    no_fence_after_the_lease,
    a_joiner_counts_for_nothing_until_it_is_known_to_be_in_step,
    a_lost_backup_counts_for_nothing_before_that_is_written,
    a_backup_leads_before_it_has_settled,
    a_version_is_durable_before_the_record_names_the_disk,
    a_disk_is_led_from_while_its_last_process_may_live,
    a_process_is_dead_once_another_has_its_id,
    a_lost_shard_begins_anew,
    what_a_new_primary_has_is_said_to_be_on_its_followers,
    a_copy_follows_whoever_calls,
    a_copy_that_has_something_else_goes_on,
    an_absence_goes_on_though_nobody_looked,
    who_ends_acknowledges_to_the_last,
    an_older_copy_of_a_disk_is_led,
    what_was_held_in_another_run_is_kept,
    what_nobody_loads_any_more_is_waited_for,
    who_has_nothing_of_a_shard_keeps_its_place_in_the_record,
    a_record_is_discarded_once_one_follower_has_it,
)
RARE = (
    a_shard_is_handed_over_before_its_copies_have_read_all,
    what_was_held_in_another_run_is_kept,
    what_follows_on_a_copy_is_refused_of_who_leads_no_longer,
    a_joiner_counts_for_nothing_until_it_is_known_to_be_in_step,
    a_version_is_durable_before_the_record_names_the_disk,
    an_absence_goes_on_though_nobody_looked,
    a_copy_follows_whoever_calls,
    a_backup_leads_before_it_has_settled,
    a_process_is_dead_once_another_has_its_id,
    a_copy_that_has_something_else_goes_on,
)
"""Faults that take seconds to find."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.long if f in RARE else (), id=f.__name__) for f in FAULTS],
)
def test_the_simulation_finds(fault: Fault, monkeypatch: Patch) -> None:
    """An invariant fails within some seeds; without the fault the same seed passes."""
    only = FOCUS.get(fault, ())
    for seed in range(MAX_SEEDS):
        with monkeypatch.context() as patch:
            fault(patch)
            is_found = _fails(seed, only)
        if is_found and not _fails(seed, only):
            return
    raise AssertionError(f"not found in {MAX_SEEDS} seeds")


def _fails(seed: int, only: Sequence[str]) -> bool:
    try:
        simulate_replication(seed, only)
    except AssertionError:
        return True
    return False
