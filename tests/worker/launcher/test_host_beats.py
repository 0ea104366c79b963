"""Reports of a launcher about its workers, as a coordinator takes them: alive, or halted."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clusters.coordinator_world import Served, served
from support.clusters.memory_store import MemoryStore

from shoal_server.core.limits import Limits
from shoal_server.status.views import MemberView

LIMITS = Limits(heartbeat_s=0.4, join_s=14.0)
HOLD_S = 5
"""Longer than the permitted silence, and shorter than a step may take."""
assert LIMITS.silence_s < HOLD_S < LIMITS.watchdog_s
DEADLINE_S = 60.0

WORKER = f"""
import ctypes, os, signal, sys, time
from shoal.membership.join_config import read_config
from shoal_client.membership.member_session import MemberSession

member = read_config({{}}, os.environ).member()
membership = MemberSession(member)
membership.join()
membership.progress(7)
while member.beat_slot and not member.beat_slot.has_recent_beat(within_s={DEADLINE_S}):
    time.sleep(0.01)  # until the launcher has taken over
print("pid", os.getpid(), flush=True)
if os.environ.get("HOLD"):
    print("holds", flush=True)
    ctypes.PyDLL(None).sleep({HOLD_S})  # keeps Python's lock, unlike time.sleep
    print("held", flush=True)
while membership.failure is None:
    time.sleep(0.01)
print("over:", type(membership.failure).__name__, flush=True)
sys.exit("another error that followed from it")
"""


class Started:
    """A process and its output; `line` waits for a line of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def line(self, wanted: str) -> str:
        """Return the next line that contains `wanted`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while raw := await self.process.stdout.readline():
                self.said.append(raw.decode())
                if wanted in self.said[-1]:
                    return self.said[-1].strip()
        raise AssertionError(f"{wanted!r} did not come in {self.said}")

    async def pid(self) -> int:
        """Return the worker's pid, once the worker is a member."""
        return int((await self.line("pid ")).rpartition(" ")[2])


class World:
    def __init__(self, coordinator: Served, directory: Path) -> None:
        self._coordinator = coordinator
        self._script = directory / "worker.py"
        self._script.write_text(WORKER)
        self.started: list[Started] = []

    async def start(self, *command: str, hold: bool = False) -> Started:
        """Start the worker's script, by `command`."""
        environment = {
            **os.environ,
            "SHOAL_COORDINATOR": self._coordinator.address,
            "SHOAL_JOB": "j",
            "SHOAL_MAX_MEMBERS": "1",
            "HOLD": "1" if hold else "",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            str(self._script),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(Started(process))
        return self.started[-1]

    async def run(self, *, hold: bool = False, restarts: int = 0) -> Started:
        run = ("-m", "shoal_client", "run", "--job", "j", "--max-restarts", str(restarts))
        return await self.start(*run, hold=hold)

    def member(self, pid: int) -> MemberView | None:
        """Return the status page's entry for the process."""
        jobs = self._coordinator.coordinator.view.jobs()
        members = [detail.member for job in jobs for detail in job.members]
        found = [each for each in members if each.process.pid == pid]
        return found[0] if found else None

    def reasons(self) -> str:
        """Return the reasons for which members were removed."""
        board = self._coordinator.coordinator.board
        return "; ".join(each.reason for each in board.events("j") if each.kind == "member_removed")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def world_in(directory: Path) -> AsyncIterator[World]:
    async with served(MemoryStore(), LIMITS) as coordinator:
        world = World(coordinator, directory)
        try:
            yield world
        finally:
            for each in world.started:
                if each.process.returncode is None:
                    each.process.send_signal(signal.SIGCONT)
                    each.process.kill()
                await each.process.wait()


@pytest.mark.long
async def test_a_worker_that_holds_pythons_lock_is_not_taken_for_lost(tmp_path: Path) -> None:
    """The launcher sends the worker's heartbeats, with its steps. The same worker without a
    launcher is lost."""
    async with world_in(tmp_path) as world:
        launched, alone = await world.run(hold=True), await world.start(hold=True)
        launched_pid, alone_pid = await launched.pid(), await alone.pid()
        joined = world.member(launched_pid)
        await asyncio.gather(launched.line("holds"), alone.line("holds"))
        await asyncio.gather(launched.line("held"), alone.line("held"))
        await alone.line("over: Fenced")
        after = world.member(launched_pid)
        assert joined is not None and after is not None, world.reasons()
        assert after.public_id == joined.public_id
        assert after.step == 7
        assert world.member(alone_pid) is None


@pytest.mark.long
async def test_workers_of_a_halted_launcher_are_not_lost(tmp_path: Path) -> None:
    """The launcher is stopped by SIGSTOP: its worker sends heartbeats itself for longer than the
    permitted silence."""
    async with world_in(tmp_path) as world:
        launched = await world.run()
        pid = await launched.pid()
        launched.process.send_signal(signal.SIGSTOP)
        halted_s = time.time()

        def beats_on() -> bool:
            seen = world.member(pid)
            assert seen is not None, world.reasons()
            return seen.last_seen_unix_s > halted_s + LIMITS.silence_s + LIMITS.lease_s

        await until(beats_on)


@pytest.mark.long
async def test_a_halted_worker_is_lost_by_its_launchers_report(tmp_path: Path) -> None:
    """The worker is stopped by SIGSTOP: it is lost as halted and not as silent. Once it continues
    it is fenced, and its launcher starts a new incarnation of the same member."""
    async with world_in(tmp_path) as world:
        launched = await world.run(restarts=1)
        pid = await launched.pid()
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: world.reasons() != "")
        assert "SIGSTOP" in world.reasons()
        assert world.member(pid) is None
        os.kill(pid, signal.SIGCONT)
        await launched.line("over: Fenced")
        await launched.line("was fenced (exit code 1); started again in 0.5 s")
        again = world.member(await launched.pid())
        assert again is not None, world.reasons()
