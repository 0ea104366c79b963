"""Records that describe conflicts fit into etcd, whatever the number of members and differences."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import InvalidSpec
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence.stored_generations import (
    MAX_VALUE_BYTES,
    record_to_json,
    size_problem,
)
from shoal_server.core.generations.conflicts import find_conflicts, shorten_conflicts
from shoal_server.core.generations.roster import (
    Candidate,
    Conflict,
    Generation,
    GenerationRecord,
    GenerationRoster,
    MemberInfo,
    Proposal,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.serving.message_bounds import MessageBounds

LIMIT_BYTES = 1_500_000
"""Limit of a request to etcd."""
WHALE = "\U0001f40b"
"""A character of four bytes, and of twelve in JSON."""


def record_of(conflicts: tuple[Conflict, ...]) -> GenerationRecord:
    roster = GenerationRoster(
        generation=Generation(1),
        entries=(),
        source_member_id="",
        step=Step(0),
        planned=False,
        synchronous=True,
        fields={},
    )
    return GenerationRecord(
        job="j",
        roster=roster,
        verdict=Verdict.ABORTED,
        reason="members differ in " + "; ".join(map(str, conflicts)),
        digest="",
        decided_s=0.0,
        conflicts=conflicts,
    )


def candidate(number: int, fields: dict[str, str]) -> Candidate:
    return Candidate(
        member_id=f"{number:0128}",
        incarnation=str(number),
        info=MemberInfo(),
        proposal=Proposal(fields=fields),
    )


def test_conflicts_in_all_fields_are_shortened_to_fit() -> None:
    """Whole, the conflicts of 500 members would make a record that etcd refuses."""
    fields = [{f"{f:03}": f"{number}" + WHALE * 1000 for f in range(30)} for number in range(50)]
    candidates = [candidate(number, each) for number, each in enumerate(fields)]
    candidates += [candidate(number, {}) for number in range(50, 500)]
    conflicts = find_conflicts(candidates)
    assert len(record_to_json(record_of(conflicts))) > LIMIT_BYTES, "too small to test anything"
    summary = shorten_conflicts(conflicts)
    assert len(record_to_json(record_of(summary))) < LIMIT_BYTES
    value, who = summary[0].values[0]
    assert (summary[0].field, value, who[-1]) == ("000", "(absent)", "and 434 more")


def test_short_conflicts_are_not_shortened() -> None:
    conflicts = (Conflict(field="schema", values=(("a", ("w0", "w1")), ("b", ("w2",)))),)
    assert shorten_conflicts(conflicts) == conflicts


def test_the_fields_of_a_proposal_are_bounded_as_a_whole() -> None:
    """Fields may be many, and values may be long, but not both."""
    proposal = pb.Proposal(fields={f"{number}": WHALE * 1000 for number in range(40)})
    with pytest.raises(InvalidSpec, match="Proposal is out of bounds") as raised:
        MessageBounds().check(pb.ProposeRequest(proposal=proposal))
    assert raised.value.details == {"field": "Proposal"}
    largest = Proposal(fields={f"{number}": WHALE * 1000 for number in range(30)})
    roster = record_of(()).roster
    record = GenerationRecord(
        job="j",
        roster=GenerationRoster(**{**roster.__dict__, "fields": largest.fields}),
        verdict=Verdict.COMMITTED,
        reason="",
        digest="",
        decided_s=0.0,
    )
    assert len(record_to_json(record)) < LIMIT_BYTES / 2


def of_hosts(num_members: int, host: str, incarnation: Callable[[], str]) -> GenerationRoster:
    entries = tuple(
        RosterEntry(
            member_id=f"{host}-{n}",
            incarnation=incarnation(),
            rank=n,
            host=f"{host}-{n // 8}",
            address=f"10.{n // 65536}.{n // 256 % 256}.{n % 256}",
        )
        for n in range(num_members)
    )
    return replace(record_of(()).roster, entries=entries)


@pytest.mark.parametrize("num_members", [1, 1000, 10_000])
def test_the_record_of_many_members_fits_in_one_value(num_members: int) -> None:
    host = "ip-10-1-17-17.eu-central-1.compute.internal"
    assert size_problem(of_hosts(num_members, host, new_incarnation)) == ""


def test_a_roster_is_refused_if_its_record_is_too_large() -> None:
    """Members choose their incarnations: long random ones cannot be compressed."""
    roster = of_hosts(1000, "h", lambda: secrets.token_hex(2000))
    record = replace(record_of(()), roster=roster)
    assert len(record_to_json(record)) > MAX_VALUE_BYTES
    assert "bytes in one value" in size_problem(roster)


async def test_a_member_that_makes_the_roster_too_large_is_refused_and_the_others_train_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal comes before the roster is shown. Regression: the job was quarantined once all
    members had accepted."""
    store = MemoryStore()
    async with served(store) as world:
        trainers = await world.training("a", "b")

        def of_three(roster: GenerationRoster) -> str:
            return "3 entries" if len(roster.entries) > 2 else ""

        job = world.coordinator.registry.find("j").job
        monkeypatch.setattr(job, "size_problem", of_three)
        late = await world.joined("c")
        with pytest.raises(InvalidSpec, match="a generation of 3 members of job j could not be"):
            await asyncio.to_thread(late.await_generation, 0, 20.0)
        assert not any(trainer.is_broken(1) for trainer in trainers)
        assert world.coordinator.registry.quarantined == {}
        assert (job.phase.value, sorted(job.members)) == ("running", ["a", "b"])
