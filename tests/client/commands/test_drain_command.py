"""`shoal drain` against a real coordinator with real members."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import pytest
from support.clusters.coordinator_world import Served, served
from support.processes.load import unhurried

from shoal_client.cli import parse
from shoal_client.commands.drain import _drained
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    DeadlineExceeded,
    NotLeader,
    ShoalError,
    Unavailable,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.v1.membership_pb2 import DrainRequest, GenerationRecord
from shoal_server.core.limits import Limits
from shoal_server.etcd.memory import MemoryStore
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class World:
    members: Served
    url: str

    async def shoal_drain(self, *arguments: str) -> int:
        """Run `shoal drain` in a thread, so that the coordinator runs meanwhile."""
        addresses = ("--coordinator", self.members.address, "--http", self.url)
        return await asyncio.to_thread(parse(["drain", *addresses, *arguments]))


def train_on(member: MemberSession) -> GenerationRecord:
    """Take steps until the members agree to stop; return the record of the next generation."""
    for step in count():
        record = member.begin_step(step)
        if record is not None:
            return record
        member.progress(step + 1)
        time.sleep(0.001)  # a step
    raise AssertionError("no end")


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with served(MemoryStore(), LIMITS) as members:
        view, board = members.coordinator.view, members.coordinator.board
        async with StatusServer(build_app(view, board), "127.0.0.1", 0) as http:
            yield World(members=members, url=http.url)


@pytest.mark.long
async def test_one_of_two_leaves_and_the_other_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The command returns when the member has left, and names the generation that runs without
    it."""
    async with world() as at:
        a, _ = await at.members.training("a", "b")
        asked = asyncio.create_task(at.shoal_drain("b", "--job", "j"))
        record = await asyncio.to_thread(train_on, a)
        await asyncio.to_thread(a.ready, record)
        assert await asked == 0
        assert [entry.member_id for entry in record.roster.entries] == ["a"]
        # The log of a member is on this screen, too.
        lines = capsys.readouterr().out.splitlines()
        (shown,) = [line for line in lines if line.startswith("b left job j after ")]
        assert shown.endswith(f"; generation {record.roster.generation} runs with 1 member")


async def test_who_is_not_there_is_named_with_those_who_are() -> None:
    """A wrong name is an error of the coordinator, and no member is drained."""
    async with world() as at:
        await at.members.training("a", "b")
        with pytest.raises(UnknownMember, match="one of a, b"):
            await at.shoal_drain("c", "--job", "j")
        with pytest.raises(UnknownJob, match="one of j"):
            await at.shoal_drain("a", "--job", "k")


async def test_a_member_that_does_not_come_to_its_boundary() -> None:
    """The wait is bounded, and the error says where the member is."""
    async with world() as at:
        await at.members.training("a", "b")
        with pytest.raises(DeadlineExceeded, match="b has not left job j yet; saw it is "):
            await at.shoal_drain("b", "--job", "j", "--timeout", "0.3")


class ChangingLeaders:
    """Fails both kinds of request as during a change of the leading coordinator."""

    def __init__(self, *failures: ShoalError) -> None:
        self.failures = list(failures)
        self.num_asked = 0

    def call(self, method_of: object, request: object, *, timeout_s: float) -> None:
        self._fail()
        self.num_asked += 1

    def job(self, job: str) -> dict[str, list[str]]:
        self._fail()
        return {"members": []}

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def test_a_change_of_leaders_does_not_end_the_wait() -> None:
    """The next leader may not know of the request: it is asked for the drain as well."""
    at = ChangingLeaders(
        DeadlineExceeded("no answer in time"), NotLeader("a standby"), Unavailable("nobody leads")
    )
    request = DrainRequest(job="j", member_id="b")
    give_up_s = time.monotonic() + unhurried(30.0)
    detail = _drained(request, at, at, give_up_s)  # type: ignore[arg-type]
    assert detail == {"members": []}
    assert at.num_asked == 1 and not at.failures


def test_a_member_that_has_left_before_it_is_asked_for_again_has_left() -> None:
    """The answer to the first call was lost; the next leader knows no such member."""
    at = ChangingLeaders(Unavailable("nobody leads"), UnknownMember("no member b"))
    request = DrainRequest(job="j", member_id="b")
    give_up_s = time.monotonic() + unhurried(30.0)
    assert _drained(request, at, at, give_up_s) == {"members": []}  # type: ignore[arg-type]
    with pytest.raises(UnknownMember):
        _drained(request, ChangingLeaders(UnknownMember("no member b")), at, give_up_s)  # type: ignore[arg-type]


async def test_no_coordinator_is_a_clear_error() -> None:
    """The error names the address that does not answer."""
    async with world() as at:
        with pytest.raises(Unavailable, match=r"no coordinator answers at http://127\.0\.0\.1:1"):
            await at.shoal_drain("a", "--job", "j", "--http", "http://127.0.0.1:1")
