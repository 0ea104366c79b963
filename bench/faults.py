"""What random `kill -9` of parameter servers costs and loses, in bench/results/faults.json.

    make bench NAME=faults
    .venv/bin/python bench/faults.py 1000 300    # kills and moves instead of the default

Three servers that keep a copy of each other's shards, three workers that push without a pause,
etcd and a coordinator, all of them processes of this machine. A primary is drawn and killed as
soon as every shard has its copy again; another server is started in its place. Half of the kills
with SGD with momentum, half with Adam.

Each worker writes down what it pushed and what it was told. In the end the values must be, to the
last bit, those of the serial replay of exactly the acknowledged pushes and some whose outcome
nobody knows: `pushes_lost` and `pushes_applied_twice` count what contradicts it, and any other
contradiction ends the bench. `failover_p99` goes from the kill until a push that was sent after it
is acknowledged. `move_pause_p99` is the longest push that any worker makes while a server comes, or
one leaves, and shards move for it, less the usual time of a push.
"""

import gc
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import structlog

# The checker and the cluster that may be killed are those of the tests.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from history.campaign import campaign, judge
from history.checker import Kind, Report
from history.events import now_s
from history.workers import OPTIMIZERS, Success, Work, Worker
from rows import Row, publish, spread
from support.clusters.parameter_cluster import ParameterCluster

NUM_KILLS, NUM_MOVES = 200, 100
NUM_SERVERS, NUM_WORKERS = 3, 3
SEED = 1


class Contradiction(Exception):
    """What survived is not what was acknowledged, in a way that no figure here stands for."""


@contextmanager
def without_collector() -> Iterator[None]:
    """What all workers write down lies in this one process, and they are threads of it. Python's
    collector would go through it now and then and stop all of them for 0.2 s, longer than anything
    that is measured here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def new_work(cluster: ParameterCluster, kind: str, directory: Path) -> Work:
    return Work(
        coordinators=[cluster.coordinator.grpc],
        job=f"{directory.name}-{kind}",
        optimizer=OPTIMIZERS[kind],
        directory=directory / kind,
    )


def fail_over(kind: str, num_kills: int, directory: Path) -> tuple[list[float], Report]:
    """Seconds of each failover, and what the checker says."""
    with ParameterCluster(directory, NUM_SERVERS) as cluster:
        work = new_work(cluster, kind, directory)
        with without_collector(), campaign(cluster, work, SEED, NUM_WORKERS) as run:
            for number in range(num_kills):
                cluster.await_ready()
                run.await_in_step()
                victim = run.kill_one()
                took_s = run.failovers_s[-1]
                print(f"{kind}: kill {number + 1}, {victim.server_id}: {took_s:.3f} s", flush=True)
        return run.failovers_s, judge(work)


def move(num_moves: int, directory: Path) -> list[float]:
    """Seconds that pushes paused for in each planned move: a server comes, or the oldest is asked
    to leave."""
    pauses_s = []
    with ParameterCluster(directory, NUM_SERVERS) as cluster:
        work = new_work(cluster, "sgd", directory)
        with without_collector(), campaign(cluster, work, SEED, NUM_WORKERS) as run:
            for number in range(num_moves):
                run.await_in_step()
                since_s = now_s()
                if number % 2:
                    cluster.dismiss(cluster.present[0])
                else:
                    cluster.start(f"ps-{len(cluster.servers)}")
                    cluster.await_ready()
                run.await_spread()
                run.await_all_succeed()
                pauses_s.append(max(longest_pause_s(worker, since_s) for worker in run.workers))
                print(f"move {number + 1}: {pauses_s[-1] * 1e3:.0f} ms", flush=True)
        report = judge(work)
    if report.faults:
        raise Contradiction(str(report))
    return pauses_s


def longest_pause_s(worker: Worker, since_s: float) -> float:
    """The longest push of a worker from some time on, less a usual one."""

    def took_s(success: Success) -> float:
        return success.answered_s - success.sent_s

    recent = [success for success in worker.successes if success.answered_s > since_s]
    return max(map(took_s, recent)) - median(map(took_s, worker.successes))


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asked = [int(argument) for argument in sys.argv[1:]]
    num_kills = asked[0] if asked else NUM_KILLS
    num_moves = asked[1] if len(asked) > 1 else NUM_MOVES
    failovers_s: list[float] = []
    reports = []
    with tempfile.TemporaryDirectory() as name:
        for kind in OPTIMIZERS:
            taken_s, report = fail_over(kind, num_kills // len(OPTIMIZERS), Path(name) / kind)
            print(f"{kind}: {report}", flush=True)
            failovers_s += taken_s
            reports.append(report)
        pauses_s = move(num_moves, Path(name) / "move")
    counted = {Kind.LOST: 0, Kind.TWICE: 0}
    for report in reports:
        for fault in report.faults:
            if fault.kind not in counted:
                raise Contradiction(str(report))
            counted[fault.kind] += 1
    pushed = sum(report.num_acknowledged for report in reports)
    runs = {"runs": len(failovers_s)}
    publish(
        "faults",
        [
            Row(metric="pushes_lost", value=counted[Kind.LOST], unit="pushes", **runs),
            Row(metric="pushes_applied_twice", value=counted[Kind.TWICE], unit="pushes", **runs),
            Row(metric="pushes_acknowledged", value=pushed, unit="pushes", **runs),
            *spread("failover", failovers_s, "s"),
            *spread("move_pause", [pause_s * 1e3 for pause_s in pauses_s], "ms"),
        ],
    )


if __name__ == "__main__":
    main()
