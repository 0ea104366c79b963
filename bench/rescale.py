"""Throughput while parameter servers are added and drained, in bench/results/rescale.json.

    make bench NAME=rescale

Three workers, each a process, push 4 MB of gradients and receive the new values, each at most 20
times a second: the pause stands for the computation of a step, and leaves CPU time to the servers.
Meanwhile the number of servers changes from 1 to 4 to 2.

A server that starts imports torch, which takes seconds of CPU time. In a real cluster this is the
time of another machine. Here the server therefore runs at the lowest priority until it serves, and
then at the priority of the other processes. Only root may raise a priority: see `BUSY_START`.

- `rescale_dip`: largest loss of throughput over one second, as a share of the throughput before.
- `rescale_longest_dip`: longest time in which the throughput of every 100 ms was down by more than
  20 %.
- `rescale_steps_lost`: pushes missing from the versions of a shard in the end, or counted twice.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import mean, median

# A server as a process is part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import structlog
from exchange.parameter_client import Trainer
from rows import Row, publish
from support.processes.served_process import ServedProcess

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import Process, Supervisor

JOB = "rescale"
SHAPES = {f"layer{i}.weight": (256, 256) for i in range(16)}
NUM_WORKERS, STEP_S = 3, 0.05
STEADY_S, START_S, MOVED_S = 5.0, 60.0, 60.0
BIN_S, BINS_A_SECOND = 0.1, 10
TOLERATED = 0.2
LOWEST_PRIORITY = 19
BUSY_START = os.geteuid() != 0
"""True if priorities cannot be raised: the CPU time of starting servers is measured too."""

_processes = multiprocessing.get_context("spawn")


class Stuck(Exception):
    """Shards were not moved in time, or a worker did not respond."""


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _work(coordinator: str, number: int, stop: Event, results: Connection) -> None:
    """Push until `stop` is set, then send the time at which each push was acknowledged."""
    _quiet()
    ends_s = []
    with Trainer(coordinator, job=JOB, number=number, shapes=SHAPES) as trainer:
        results.send([])
        while not stop.is_set():
            began_s = time.monotonic()
            trainer.push()
            ends_s.append(time.monotonic())
            stop.wait(max(0.0, STEP_S - (ends_s[-1] - began_s)))
        results.send(ends_s)


def start_server(etcd: str, directory: Path, supervisor: Supervisor, name: str) -> Process:
    """Start one more server, at the lowest priority until it serves."""
    options = ("--etcd", etcd, "--listen", "127.0.0.1:0", "--id", name)
    nice = () if BUSY_START else ("nice", "-n", str(LOWEST_PRIORITY))
    server = ServedProcess(supervisor, directory, name, "ps", *options, under=nice).ready()
    if not BUSY_START:
        _set_priority(server.process.pid, 0)
    return server.process


def _set_priority(pid: int, priority: int) -> None:
    """Set the priority of all threads of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), priority)


def rescale(first: Process, start: Callable[[str], Process], watcher: Trainer) -> float:
    """Change the number of servers from 1 to 4 to 2; return when that began."""
    time.sleep(STEADY_S)
    began_s = time.monotonic()
    second, *_ = [start(f"ps-{number}") for number in (1, 2, 3)]
    await_servers(watcher, 4)
    print(f"4 servers after {time.monotonic() - began_s:.1f} s", flush=True)
    time.sleep(STEADY_S)
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        if process.wait(MOVED_S) is None:
            raise Stuck(f"{process.name} has not ended after {MOVED_S:g} s")
    await_servers(watcher, 2)
    print(f"2 servers after {time.monotonic() - began_s:.1f} s", flush=True)
    time.sleep(STEADY_S)
    return began_s


def await_servers(watcher: Trainer, num_servers: int) -> None:
    """Return once the shards are on this many servers. Raises Stuck."""
    give_up_s = time.monotonic() + MOVED_S
    while True:
        held_by = {shard.server_id for shard in watcher.client.fetch_map().shards}
        if len(held_by) == num_servers:
            return
        if time.monotonic() > give_up_s:
            raise Stuck(f"shards are on {sorted(held_by)}, expected {num_servers} servers")
        time.sleep(BIN_S)


def per_bin(ends_s: Sequence[float], began_s: float) -> tuple[list[int], list[int]]:
    """Return the pushes acknowledged in each 100 ms before the servers changed, and after that."""

    def count(start_s: float, stop_s: float) -> list[int]:
        bins = [0] * int((stop_s - start_s) / BIN_S)
        for end_s in ends_s:
            index = int((end_s - start_s) / BIN_S)
            if 0 <= index < len(bins):
                bins[index] += 1
        return bins

    # The first second is left out: not all workers pushed yet.
    return count(min(ends_s) + 1.0, began_s), count(began_s, max(ends_s) - BIN_S)


def rows_of(ends_s: Sequence[float], began_s: float, num_lost: int) -> list[Row]:
    before, after = per_bin(ends_s, began_s)
    usual = mean(before)
    seconds = [mean(after[i : i + BINS_A_SECOND]) for i in range(len(after) - BINS_A_SECOND + 1)]
    is_down = [pushes < (1 - TOLERATED) * usual for pushes in after]
    runs = [len(list(run)) for down, run in groupby(is_down) if down]
    return [
        Row(
            metric="rescale_dip",
            value=100 * max(0.0, 1 - min(seconds) / usual),
            unit="%",
            runs=1,
        ),
        Row(metric="rescale_longest_dip", value=max(runs, default=0) * BIN_S, unit="s", runs=1),
        Row(metric="rescale_steps_lost", value=num_lost, unit="steps", runs=len(ends_s)),
        Row(
            metric="rescale_steps_per_second_before",
            value=usual / BIN_S,
            unit="steps/s",
            runs=len(before),
        ),
        Row(
            metric="rescale_steps_per_second_after",
            value=median(after[-int(STEADY_S / BIN_S) :]) / BIN_S,
            unit="steps/s",
            runs=int(STEADY_S / BIN_S),
        ),
    ]


def measure(cluster: LocalCluster, start: Callable[[str], Process]) -> list[Row]:
    stop = _processes.Event()
    workers, ends = [], []
    for number in range(NUM_WORKERS):
        end, sender = _processes.Pipe(duplex=False)
        workers.append(
            _processes.Process(target=_work, args=(cluster.coordinator, number, stop, sender))
        )
        workers[-1].start()
        ends.append(end)
    with Trainer(cluster.coordinator, job=JOB, number=NUM_WORKERS, shapes=SHAPES) as watcher:
        for end in ends:
            _received(end)
        try:
            began_s = rescale(cluster.processes["ps-0"], start, watcher)
        finally:
            stop.set()
        ends_s = [end_s for end in ends for end_s in _received(end)]
        for worker in workers:
            worker.join()
        watcher.client.pull(watcher.values)
        lost = max(abs(version - 1 - len(ends_s)) for version in watcher.client.versions.values())
    return rows_of(ends_s, began_s, lost)


def _received(end: Connection) -> list[float]:
    if not end.poll(START_S):
        raise Stuck(f"a worker sent nothing for {START_S:g} s")
    ends_s: list[float] = end.recv()
    return ends_s


def main() -> None:
    _quiet()
    with tempfile.TemporaryDirectory() as directory:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=1)
        with LocalCluster(config) as cluster, Supervisor() as supervisor:
            start = partial(start_server, cluster.etcd, Path(directory), supervisor)
            rows = measure(cluster, start)
    publish("rescale", rows)


if __name__ == "__main__":
    main()
