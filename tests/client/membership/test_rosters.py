"""Rosters that notices omit, over real gRPC: members fetch them by their digests."""

import asyncio
import threading
from pathlib import Path

import pytest
from support.clusters.coordinator_world import Served, entered, served
from support.clusters.memory_store import MemoryStore

from shoal_client.membership.host_files import HostFiles
from shoal_client.membership.rosters import KEPT_ROSTERS, Rosters
from shoal_proto import rosters
from shoal_proto.deflated import pack
from shoal_proto.errors import InternalError, Unavailable, UnknownGeneration
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.jobs.streams import NewestRosters


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that members fetched; a roster of three counts as large here."""
    digests: list[str] = []
    answer = NewestRosters.answer

    def noted(newest: NewestRosters, digest: str) -> bytes:
        digests.append(digest)
        return answer(newest, digest)

    monkeypatch.setattr(rosters, "LARGE_ENTRIES", 2)
    monkeypatch.setattr(NewestRosters, "answer", noted)
    return digests


async def train(world: Served, *names: str, shared: Path | None = None) -> None:
    members = [
        await world.joined(name, desired=len(names), shared_directory=shared) for name in names
    ]
    records = await asyncio.gather(*(entered(member, 0) for member in members))
    for record in records:
        assert [entry.member_id for entry in record.roster.entries] == sorted(names)
        assert roster_digest(record.roster) == record.digest == records[0].digest


async def test_each_member_fetches_a_large_roster_once(fetched: list[str]) -> None:
    """The deciding record is about a roster that the member already has."""
    async with served(MemoryStore()) as world:
        await train(world, "a", "b", "c")
    assert len(fetched) == 3
    assert len(set(fetched)) == 1


async def test_the_members_of_a_host_fetch_a_roster_once(
    fetched: list[str], tmp_path: Path
) -> None:
    async with served(MemoryStore()) as world:
        await train(world, "a", "b", "c", shared=tmp_path)
    assert len(fetched) == 1


async def test_a_joiner_fetches_the_same_roster_as_the_other_members(fetched: list[str]) -> None:
    async with served(MemoryStore()) as world:
        await train(world, "a", "b", "c")
        newcomer = await world.joined("d", desired=3)
        record = await asyncio.to_thread(newcomer.await_generation, 0, 10.0)
        assert len(record.roster.entries) == 4
        assert fetched.count(record.digest) == 4


def roster(generation: int) -> pb.Roster:
    return pb.Roster(generation=generation, entries=[pb.RosterEntry(member_id="a")])


def outcome(generation: int, *, with_roster: bool) -> pb.Notice:
    whole = roster(generation)
    record = pb.GenerationRecord(
        roster=whole if with_roster else pb.Roster(generation=generation),
        digest=roster_digest(whole),
        verdict=pb.VERDICT_COMMITTED,
    )
    return pb.Notice(outcome=record)


def nobody(digest: str, timeout_s: float) -> bytes:
    raise AssertionError("it was shown before")


def test_a_known_roster_is_inserted_into_the_notice() -> None:
    """The roster is kept while others are shown: an attempt may fail."""
    known = Rosters(nobody)
    for generation in range(1, KEPT_ROSTERS + 1):
        known.complete(outcome(generation, with_roster=True), 1.0)
    for generation in range(1, KEPT_ROSTERS + 1):
        completed = known.complete(outcome(generation, with_roster=False), 1.0)
        assert completed.outcome.roster == roster(generation)


def test_an_aborted_attempt_needs_no_roster() -> None:
    record = pb.GenerationRecord(roster=pb.Roster(generation=3), verdict=pb.VERDICT_ABORTED)
    notice = pb.Notice(outcome=record)
    assert Rosters(nobody).complete(notice, 1.0) == notice


def test_a_member_attends_again_if_its_roster_is_no_longer_served() -> None:
    def over(digest: str, timeout_s: float) -> bytes:
        raise UnknownGeneration("no such roster")

    with pytest.raises(Unavailable, match="Attend again"):
        Rosters(over).complete(outcome(1, with_roster=False), 1.0)


@pytest.mark.parametrize("answer", [b"", pack(roster(2))], ids=["nothing", "another"])
def test_an_answer_other_than_the_roster_is_refused(answer: bytes, tmp_path: Path) -> None:
    shared = HostFiles(tmp_path, threading.Event(), 1.0)
    for known in (Rosters(lambda *_: answer), Rosters(lambda *_: answer, shared)):
        with pytest.raises(InternalError, match="another digest than the requested one"):
            known.complete(outcome(1, with_roster=False), 1.0)
