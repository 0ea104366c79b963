"""Bring-up of torch.distributed by two stores: the coordinator's, and a TCPStore.

    make bench NAME=rendezvous

Each rank is a process. A round starts once all ranks have the roster, and ends with the first
all-reduce at the last rank; the stores take turns. The socket of the TCPStore is bound, and its
port is known to all ranks, before the round starts; its server starts within the round. With
either store, Shoal's group reads the store by Python code that watches for listeners;
`TCPStore-plain` is torch's own init_process_group, which cannot be interrupted.

`store_host_kill` and `store_host_halt`: SIGKILL and SIGSTOP of rank 0, the host of the TCPStore,
while the three others bring the group up; seconds until the last of them raises an error, at most
GIVE_UP_S. The exit or the halt is reported to the coordinator, as `shoal run` does.
`store_leader_kill`: the same with the leading coordinator, while another is on standby.
"""

import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row, publish
from training.jobs import await_file
from training.store_ranks import (
    BRING_UP_S,
    COORDINATOR,
    TCP,
    TCP_PLAIN,
    World,
    bring_up,
    lose_host,
)

from shoal_client.host.reports import HostReporter
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import ChildCommand, Supervisor
from shoal_proto.v1.membership_pb2 import ReportExitRequest, ReportHaltRequest

WORLD_SIZES = (2, 4, 8)
KINDS = [COORDINATOR, TCP, TCP_PLAIN]
DEFAULT_ROUNDS = 15
WARM_UP = 3
NUM_LOSSES = 3
LOSS_WORLD_SIZE = 4
GIVE_UP_S = 1.5 * BRING_UP_S
IN_STORE_S = 0.5
"""Time after which all ranks wait in the store; no event reports that they do."""
START_S = 120.0

# The fork server imports torch once for all ranks.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["training.store_ranks"])


class Ranks:
    """Rank processes of one job; all are killed at the end of the `with` block."""

    def __init__(
        self, coordinators: Sequence[str], size: int, body: Callable[..., None], *more: Any
    ) -> None:
        # Keep a reference: the semaphores of `world` are removed when it is collected.
        self._world = world = World(
            job=f"bench-{secrets.token_hex(4)}",
            coordinators=tuple(coordinators),
            size=size,
            barrier=context.Barrier(size),
            port=context.Value("i", 0),
        )
        self.job = world.job
        self.pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            pipe, child = context.Pipe(duplex=False)
            process = context.Process(target=body, args=(child, world, *more), daemon=True)
            process.start()
            child.close()
            self.pipes.append(pipe)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def collect(self, num_messages: int, within_s: float) -> list[tuple[Any, ...]]:
        """Receive this many messages in the order of arrival; fewer once `within_s` is over."""
        seen: list[tuple[Any, ...]] = []
        open_pipes = list(self.pipes)
        deadline_s = time.monotonic() + within_s
        while len(seen) < num_messages and open_pipes and time.monotonic() < deadline_s:
            for pipe in wait(open_pipes, max(0.0, deadline_s - time.monotonic())):
                assert isinstance(pipe, Connection)
                try:
                    seen.append(pipe.recv())
                except EOFError:
                    open_pipes.remove(pipe)
        return seen


def bring_up_times_s(coordinator: str, size: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round after the first `WARM_UP`, by store."""
    rounds = WARM_UP + num_rounds
    with Ranks([coordinator], size, bring_up, KINDS, rounds) as ranks:
        messages = ranks.collect(size * (rounds * len(KINDS) + 1), 5 * START_S)
    reported = [message for message in messages if message is not None]
    if len(reported) < size * rounds * len(KINDS):
        raise SystemExit(f"{size} ranks: only {len(reported)} of their bring-ups were reported")
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for attempt in range(WARM_UP, rounds):
            own = [message[2:] for message in reported if message[:2] == (kind, attempt)]
            times[kind].append(max(end for _, end in own) - min(start for start, _ in own))
    return times


def leader_loss_time_s() -> float:
    """Return the seconds from the SIGKILL of the leading coordinator until the last rank raises an
    error, while another coordinator is on standby."""
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        directory = Path(name)
        config = LocalClusterConfig(directory=directory, num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            ready = directory / "second.json"
            arguments = (
                *(sys.executable, "-m", "shoal_client", "coordinator", "--etcd", cluster.etcd),
                *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ready-file", str(ready)),
            )
            supervisor.spawn(
                ChildCommand(name="second", arguments=arguments, log_path=directory / "second.log")
            )
            await_file(ready)
            both = [cluster.coordinator, json.loads(ready.read_text())["grpc"]]
            with Ranks(both, LOSS_WORLD_SIZE, lose_host, COORDINATOR) as ranks:
                ranks.collect(LOSS_WORLD_SIZE, START_S)
                time.sleep(IN_STORE_S)
                struck_s = time.monotonic()
                cluster.processes["coordinator"].kill()
                return last_raised_s(ranks, COORDINATOR, struck_s)


def loss_time_s(coordinator: str, kind: str, number: int) -> float:
    """Return the seconds from the signal to rank 0 until the last of the other ranks raises an
    error; GIVE_UP_S if not all of them do."""
    with Ranks([coordinator], LOSS_WORLD_SIZE, lose_host, kind) as ranks:
        reported = ranks.collect(LOSS_WORLD_SIZE, START_S)
        time.sleep(IN_STORE_S)
        _, member_id, pid = next(message for message in reported if message[0] == "hosts")
        with HostReporter([coordinator]) as reporter:
            host = os.uname().nodename
            common = {"job": ranks.job, "member_id": member_id, "pid": pid, "host": host}
            struck_s = time.monotonic()
            os.kill(pid, number)
            if number == signal.SIGKILL:
                reporter.report(ReportExitRequest(**common, exit_code=-number))
            else:
                reporter.report(ReportHaltRequest(**common, halted=True))
            return last_raised_s(ranks, kind, struck_s)


def last_raised_s(ranks: Ranks, kind: str, struck_s: float) -> float:
    raised = ranks.collect(LOSS_WORLD_SIZE - 1, GIVE_UP_S)
    if len(raised) < LOSS_WORLD_SIZE - 1:
        print(f"{kind}: {len(raised)} of {LOSS_WORLD_SIZE - 1} gave up within {GIVE_UP_S:g} s")
        return GIVE_UP_S
    print(f"{kind}: {sorted({message[1] for message in raised})}")
    return max(message[2] for message in raised) - struck_s


def rows_of(metric: str, unit: str, times: dict[str, Sequence[float]]) -> list[Row]:
    scale = 1e3 if unit == "ms" else 1.0
    own = times[COORDINATOR]
    return [
        Row(
            metric=metric,
            value=median(own) * scale,
            unit=unit,
            runs=len(own),
            peer=peer,
            peer_value=median(of_peer) * scale,
        )
        for peer, of_peer in times.items()
        if peer != COORDINATOR
    ]


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_ROUNDS
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for size in WORLD_SIZES:
                times = bring_up_times_s(cluster.coordinator, size, num_rounds)
                rows += rows_of(f"rendezvous_{size}", "ms", times)
            for name, number in (("kill", signal.SIGKILL), ("halt", signal.SIGSTOP)):
                losses = {
                    kind: [
                        loss_time_s(cluster.coordinator, kind, number)
                        for _ in range(NUM_LOSSES if name == "kill" else 1)
                    ]
                    for kind in (COORDINATOR, TCP)
                }
                rows += rows_of(f"store_host_{name}", "s", losses)
    leader_s = leader_loss_time_s()
    rows.append(Row(metric="store_leader_kill", value=leader_s, unit="s", runs=1))
    publish("rendezvous", rows)


if __name__ == "__main__":
    main()
