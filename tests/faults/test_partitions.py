"""Partitions between workers and the leading coordinator, and between it and etcd."""

import signal
from collections.abc import Iterator

import pytest
from support.clusters.coordinator_processes import Replicas
from support.clusters.fault_world import Cast, Etcd
from support.members.scripted_member import ANSWER
from support.network.gates import Network, Wire
from support.processes.served_process import awaited

from shoal_proto.errors import Fenced

AWAY_S = 30.0


@pytest.fixture
def wire(network: Network, replicas: Replicas) -> Iterator[Wire]:
    """A connection to the leading coordinator that no other member uses."""
    wire = network.wire(replicas.leader().grpc)
    yield wire
    wire.restore()


def test_a_short_partition_costs_no_member(cast: Cast, wire: Wire) -> None:
    """Connections break, and the members are back before one of them counts as lost."""
    members = cast.training("a", "b", at=wire.endpoints)
    wire.cut()
    for member in members:
        member.await_stream_broken()
    wire.restore()
    for member in members:
        member.await_notice("admitted", lambda notice: "generation 1:" in notice.reason)
    c = cast.joins("c")
    assert c.await_training_with("a", "b", "c") == 2
    assert not any(member.breaks() for member in members)
    cast.check_agreement()


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("held", [True, False], ids=["a change forms", "a generation runs"])
def test_a_member_cut_off_for_long_is_lost_and_joins_again(
    cast: Cast, wire: Wire, held: bool
) -> None:
    """The other members continue. The member learns that it is fenced as soon as its calls arrive
    again."""
    for name in ("a", "b"):
        cast.joins(name, desired=3)
    cut_off = cast.joins("c", at=wire.endpoints, desired=3)
    first = cut_off.await_training_with("a", "b", "c")
    if held:
        cut_off.withhold(ANSWER)
        cast.joins("d", desired=3)
        cut_off.await_withheld(ANSWER)
    names = ("a", "b", "d") if held else ("a", "b")
    wire.silence()
    second = cast["a"].await_training_with(*names)
    assert second > first
    assert cast["a"].breaks() == [first]
    wire.restore()
    assert isinstance(cut_off.failed(), Fenced)
    cast.check_fenced(cut_off.token())
    cast.joins("c", at=wire.endpoints, desired=3)
    assert cast["c"].await_training_with(*names, "c") > second
    cast.check_agreement()


@pytest.mark.long
def test_a_joiner_during_an_outage_of_etcd_is_admitted_afterwards(
    cast: Cast, replicas: Replicas, etcd: Etcd
) -> None:
    """The running generation continues, and no member is declared lost, the joiner included."""
    a, b = cast.training("a", "b")
    leader = replicas.leader()
    etcd.signal_all(signal.SIGSTOP)
    try:
        c = cast.joins("c")
        # No coordinator leads without etcd. The joiner's attendance waits until it can be
        # written.
        awaited(lambda: not leader.leads(), AWAY_S, "no coordinator leads")
    finally:
        etcd.restore()
    (generation,) = {member.await_training_with("a", "b", "c") for member in (a, b, c)}
    cast.await_running(generation)
    assert not a.breaks() + b.breaks() + c.breaks()
    cast.check_agreement()


@pytest.mark.long
def test_a_lost_member_stays_fenced_under_the_next_leader(cast: Cast, replicas: Replicas) -> None:
    """A halted process resumes after another coordinator has taken over: it changes nothing."""
    victim = cast.process("victim")
    a = cast.joins("a")
    a.await_training_with("a", "victim")
    victim.send_signal(signal.SIGSTOP)
    generation = a.await_training_with("a")
    old = replicas.leader()
    old.process.send_signal(signal.SIGKILL)
    replicas.leader(other_than=old)
    cast.await_running(generation)
    victim.send_signal(signal.SIGCONT)
    assert victim.rank.expect("ended") == {"error": "Fenced"}
    cast.check_fenced(victim.token(generation))
    assert a.breaks() == [generation - 1]
    cast.check_agreement()
