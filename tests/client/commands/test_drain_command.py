"""`shoal drain` with a coordinator and members over gRPC."""

import asyncio
import socket
import time
from collections.abc import Sequence
from itertools import chain, count, repeat
from typing import Self

import pytest
from support.clusters.http_world import served_over_http
from support.processes.load import unhurried

from shoal_client.cli import parse
from shoal_client.commands import drain as command
from shoal_client.commands import status
from shoal_client.commands.address import StatusAddress
from shoal_client.commands.drain import DrainConfig, drain
from shoal_client.commands.status import StatusClient
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


def train_on(member: MemberSession, draining: "asyncio.Task[int]") -> GenerationRecord | None:
    """Take steps until the members agree to stop, and return the record of the next generation;
    None if the command ends first."""
    for step in count():
        record = member.begin_step(step)
        if record is not None or draining.done():
            return record
        member.progress(step + 1)
        time.sleep(0.001)  # a step
    raise AssertionError("no end")


async def drained(member: MemberSession, draining: "asyncio.Task[int]") -> GenerationRecord:
    """Train until the command has returned 0; return the record of the generation without the
    drained member."""
    record = await asyncio.to_thread(train_on, member, draining)
    if record is not None:
        await asyncio.to_thread(member.ready, record)
    assert await draining == 0
    assert record is not None, "the command ended before the member left"
    return record


@pytest.mark.long
async def test_the_command_returns_once_the_member_has_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints the generation that runs without the member."""
    async with served_over_http() as at:
        a, _ = await at.members.training("a", "b")
        draining = asyncio.create_task(at.shoal("drain", "b", "--job", "j"))
        record = await drained(a, draining)
        assert [entry.member_id for entry in record.roster.entries] == ["a"]
        # The output has log lines of a member as well.
        lines = capsys.readouterr().out.splitlines()
        (shown,) = [line for line in lines if line.startswith("b left job j after ")]
        assert shown.endswith(f"; generation {record.roster.generation} runs with 1 member")


@pytest.mark.long
async def test_each_request_goes_to_the_coordinator_that_leads_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command knows the status page only, which first names a coordinator that has ended."""
    async with served_over_http() as at:
        a, _ = await at.members.training("a", "b")
        leaders = chain(["127.0.0.1:1"], repeat(at.members.address))
        monkeypatch.setattr(StatusClient, "leader", lambda client: next(leaders))
        monkeypatch.setattr(command, "ANSWER_WITHIN_S", unhurried(0.3))
        run = parse(["drain", "b", "--job", "j", "--http", at.url])
        draining = asyncio.create_task(asyncio.to_thread(run))
        await drained(a, draining)


@pytest.mark.long
async def test_the_error_for_an_unknown_member_or_job_lists_the_known_ones() -> None:
    """The error is the coordinator's."""
    async with served_over_http() as at:
        await at.members.training("a", "b")
        with pytest.raises(UnknownMember, match="one of a, b"):
            await at.shoal("drain", "c", "--job", "j")
        with pytest.raises(UnknownJob, match="one of j"):
            await at.shoal("drain", "a", "--job", "k")


@pytest.mark.long
async def test_the_wait_for_a_member_that_does_not_leave_ends() -> None:
    """The error has the member's state."""
    async with served_over_http() as at:
        await at.members.training("a", "b")
        with pytest.raises(DeadlineExceeded, match="b has not left job j yet; saw the member is "):
            await at.shoal("drain", "b", "--job", "j", "--timeout", "0.3")


class ChangingLeaders:
    """Fake of both clients: calls fail as during a change of leaders, and then succeed."""

    def __init__(self, *failures: ShoalError, first: Sequence[ShoalError] = ()) -> None:
        """`first`: errors of the calls that look the member up."""
        self.failures, self.first = list(failures), list(first)
        self.num_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def call(self, method: object, request: DrainRequest, *, timeout_s: float) -> None:
        self._fail()
        self.num_calls += 1

    def leader(self) -> str:
        return "127.0.0.1:1"

    def job_of(self, member_id: str) -> str:
        return "j"

    def member(self, job: str, member_id: str) -> dict[str, dict[str, str]]:
        if self.first:
            raise self.first.pop(0)
        return {"member": {"public_id": "first"}}

    def job(self, job: str) -> dict[str, object]:
        self._fail()
        summary = {"phase": "collect", "shown_state": "waiting", "reason": "for members"}
        return {"members": [], "summary": summary}

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def drain_with(at: ChangingLeaders, monkeypatch: pytest.MonkeyPatch) -> int:
    """Drain member b of job j, with this fake in place of the connections."""
    monkeypatch.setattr(command, "StatusClient", lambda urls: at)
    monkeypatch.setattr(command, "Coordinators", lambda addresses: at)
    address = StatusAddress(http="http://127.0.0.1:1")
    return drain(DrainConfig(member="b", job="j", address=address, timeout_s=unhurried(30.0)))


def test_a_drain_is_requested_again_after_a_change_of_leaders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next leader may not know of the request."""
    at = ChangingLeaders(
        DeadlineExceeded("no answer in time"), NotLeader("a standby"), Unavailable("nobody leads")
    )
    assert drain_with(at, monkeypatch) == 0
    assert at.num_calls == 1 and not at.failures
    assert "b left job j" in capsys.readouterr().out


def test_a_slow_page_is_asked_for_the_member_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is busy for some seconds answers later."""
    at = ChangingLeaders(first=[DeadlineExceeded("no answer in time"), NotLeader("a standby")])
    assert drain_with(at, monkeypatch) == 0
    assert at.num_calls == 1 and not at.first


def test_a_page_that_does_not_answer_in_time_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow answer is not reported as a wrong address."""
    monkeypatch.setattr(status, "ANSWER_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with StatusClient(url) as client, pytest.raises(DeadlineExceeded, match=url):
            client.jobs()


def test_an_unknown_member_in_a_repeated_request_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the first request was lost. In a first request it is an error."""
    at = ChangingLeaders(Unavailable("nobody leads"), UnknownMember("no member b"))
    assert drain_with(at, monkeypatch) == 0
    unknown = ChangingLeaders(UnknownMember("no member b"))
    with pytest.raises(UnknownMember):
        drain_with(unknown, monkeypatch)


@pytest.mark.long
async def test_the_error_without_a_coordinator_has_its_address() -> None:
    """The error is Unavailable."""
    async with served_over_http() as at:
        with pytest.raises(Unavailable, match=r"no coordinator answers at http://127\.0\.0\.1:1"):
            await at.shoal("drain", "a", "--job", "j", "--http", "http://127.0.0.1:1")
