"""`shoal jobs`, `wait`, `stop` and `retry` with a coordinator over gRPC and HTTP."""

import asyncio
import json
import os

import pytest
from support.clusters import status_world
from support.clusters.http_world import served_over_http
from support.clusters.status_world import World

from shoal_client.cli import parse
from shoal_client.commands.jobs import check_not_finished
from shoal_client.commands.status import Json, StatusClient
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import InvalidSpec, JobStopped, MemberDrained, UnknownJob


def train_on(member: MemberSession) -> int:
    """Take steps until the member is drained; return the step that it did not begin."""
    step = 0
    while True:
        try:
            member.begin_step(step)
        except MemberDrained as drained:
            member.leave(completed=False, reason=drained.seen)
            return step
        step += 1
        member.progress(step)


@pytest.mark.long
async def test_a_job_can_be_stopped_listed_and_retried(capsys: pytest.CaptureFixture[str]) -> None:
    """Members leave, the job is listed as stopped, and none can join until it is retried."""
    async with served_over_http() as at:
        members = await at.members.training("a", "b")
        trainers = [asyncio.to_thread(train_on, member) for member in members]
        stopping = at.shoal("stop", "j", "--reason", "seen enough")
        code, *_ = await asyncio.gather(stopping, *trainers)
        assert code == 0
        shown = capsys.readouterr().out
        assert "job j: 2 members end at their next step boundary" in shown
        assert "job j is stopped (seen enough)" in shown
        assert await at.shoal("jobs", "--json") == 0
        (job,) = json.loads(capsys.readouterr().out)
        assert (job["job"], job["state"], job["num_restarts"]) == ("j", "stopped", 0)
        assert job["ended_unix_s"] >= job["begun_unix_s"] > 0
        assert await at.shoal("jobs", "--state", "running") == 0
        assert capsys.readouterr().out == "no job is running\n"
        assert await at.shoal("jobs") == 0
        shown = capsys.readouterr().out
        assert "stopped" in shown
        assert max(map(len, shown.splitlines())) <= 80
        with pytest.raises(JobStopped, match="seen enough"):
            await asyncio.to_thread(check_not_finished, [at.members.address], "j")
        assert await at.shoal("stop", "j") == 0, "it is stopped already"
        assert await at.shoal("retry", "j", "--from-scratch") == 0
        await at.members.training("c", "d")
        with pytest.raises(InvalidSpec, match="not over"):
            await at.shoal("retry", "j")


@pytest.mark.long
async def test_the_stop_of_a_job_with_one_member_is_announced_in_the_singular(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served_over_http() as at:
        (member,) = await at.members.training("a")
        trainer = asyncio.to_thread(train_on, member)
        await asyncio.gather(at.shoal("stop", "j"), trainer)
        assert "job j: 1 member ends at its next step boundary\n" in capsys.readouterr().out


@pytest.mark.long
async def test_a_wait_ends_with_the_outcome_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 75 if the job is not over in time, 1 once it is stopped, and 0 once it is
    finished."""
    async with served_over_http() as at:
        members = await at.members.training("a", "b")
        assert await at.shoal("wait", "j", "--wait-s", "0") == os.EX_TEMPFAIL
        assert "job j is not over: running" in capsys.readouterr().out
        trainers = [asyncio.to_thread(train_on, member) for member in members]
        code, *_ = await asyncio.gather(at.shoal("wait", "j"), at.shoal("stop", "j"), *trainers)
        assert code == 1
        assert "job j is stopped" in capsys.readouterr().out
        assert await at.shoal("retry", "j", "--from-scratch") == 0
        assert await at.shoal("wait", "j", "--wait-s", "0") == os.EX_TEMPFAIL
        assert "job j is not over: waiting" in capsys.readouterr().out
        leaves = [
            asyncio.to_thread(member.leave, completed=True, reason="")
            for member in await at.members.training("c", "d")
        ]
        code, *_ = await asyncio.gather(at.shoal("wait", "j"), *leaves)
        assert code == 0
        assert "job j is finished" in capsys.readouterr().out


async def test_a_wait_for_a_quarantined_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a job is not over: an operator may repair it."""
    async with served_over_http() as at:
        await at.members.training("a", "b")
        at.members.coordinator.registry.quarantine("j", ValueError("a record that does not parse"))
        assert await at.shoal("wait", "j", "--wait-s", "0.5") == os.EX_TEMPFAIL
        shown = capsys.readouterr().out
        assert "job j is not over: not known" in shown and "a record that does not parse" in shown


def test_a_wait_without_a_coordinator_is_no_failure_of_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A coordinator that starts again is away for a moment."""
    waiting = ["wait", "j", "--wait-s", "0", "--coordinator", "127.0.0.1:1"]
    assert parse(waiting)() == os.EX_TEMPFAIL
    shown, errors = capsys.readouterr()
    assert "job j is not over: not known (no coordinator answers at" in shown
    assert "127.0.0.1:1" in errors


def jobs_at(url: str) -> Json:
    with StatusClient(url) as client:
        return client.jobs()


async def test_a_job_that_ended_before_training_is_listed_with_the_end_of_its_last_member(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served_over_http() as at:
        member = await at.members.joined("a")
        await asyncio.to_thread(member.leave, completed=False, reason="InvalidSpec('a typo')")
        assert await at.shoal("jobs") == 0
        assert "j is waiting; the last member to leave was a: " in capsys.readouterr().out


@pytest.mark.long
async def test_a_job_that_all_members_left_is_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job is not shown as running, and the end of its last member is shown."""
    async with served_over_http() as at:
        members = await at.members.training("a", "b")
        assert [job["state"] for job in await asyncio.to_thread(jobs_at, at.url)] == ["running"]
        for member in members:
            reason = "ValueError('no such file')"
            await asyncio.to_thread(member.leave, completed=False, reason=reason)
        (job,) = await asyncio.to_thread(jobs_at, at.url)
        assert (job["state"], job["num_members"], job["ended_unix_s"]) == ("interrupted", 0, 0)
        assert job["last_ending"].startswith("b: ") and "no such file" in job["last_ending"]
        for command in (["jobs"], ["status"], ["why", "j"], ["top", "--once"]):
            assert await at.shoal(*command) == 0
            # The output has log lines of the coordinator as well.
            lines = capsys.readouterr().out.splitlines()
            shown = "\n".join(line for line in lines if "[debug " not in line)
            assert "interrupted" in shown and "collect" not in shown
            assert command[0] == "top" or "no such file" in shown


@pytest.mark.parametrize(("state", "names"), [("waiting", ["other"]), ("running", ["digits"])])
def test_jobs_are_selected_by_the_state_that_is_shown(
    world: World, url: str, capsys: pytest.CaptureFixture[str], state: str, names: list[str]
) -> None:
    """A job that waits for members is not listed as running."""
    world.put(status_world.job("other", phase="collect", members=()))
    assert parse(["jobs", "--state", state, "--json", "--http", url])() == 0
    assert [job["job"] for job in json.loads(capsys.readouterr().out)] == names


@pytest.mark.long
async def test_the_error_for_an_unknown_job_has_its_name() -> None:
    async with served_over_http() as at:
        for command in ("wait", "stop", "retry"):
            with pytest.raises(UnknownJob, match="no job 'x'"):
                await at.shoal(command, "x")


@pytest.mark.parametrize(
    "arguments",
    [
        ("stop", "no job"),
        ("stop", "j", "--wait-s", "-1"),
        ("wait", "j", "--wait-s", "nan"),
        ("retry", "a/b"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSpec):
        parse(list(arguments))()
