"""Cost and losses of faults of all kinds, in bench/results/faults.json.

    make bench NAME=faults
    .venv/bin/python bench/faults.py --kills 1000 --moves 300
    .venv/bin/python bench/faults.py --kills 0 --moves 0 --partitions 60 --seed 2    # a part of it

Three servers that keep a copy of each other's shards, three workers that push without a pause,
etcd and a coordinator, all on this machine. Jobs use SGD with momentum or, for half of the kills
and for about half of the faults that need root, Adam.

- Kills: a primary is drawn and killed as soon as every shard has its copy again; another server is
  started in its place. `failover_p99`: time from the kill until a push that was sent after it is
  acknowledged.
- Moves: a server is added, or one leaves. `move_pause_p99`: the longest push of any worker while
  shards move, minus the usual time of a push.
- Partitions, pauses and outages, of 0.5 to 20 s (one outage in ten of 30 s): every server, etcd and
  the coordinator have network namespaces of their own, and a router between them drops packets or
  reports the destination as unreachable, in one direction or both. A server is cut off from etcd
  only, from its peers, from the coordinator, from the workers, or from all; processes are halted
  and continued; etcd is killed, halted or unreachable. This needs root. `recovery_p99`: time from
  the end of such a fault until every shard has its copies and each worker's pushes succeed;
  `KIND_longest_push`: the longest push that was in progress during any fault of that kind.

Each worker logs its pushes and their outcomes. In the end the values must equal, to the last bit, a
serial replay of all acknowledged pushes and of some whose outcome is unknown. `pushes_lost` and
`pushes_applied_twice` count two kinds of deviation; any other deviation ends the bench.
"""

import argparse
import gc
import logging
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import structlog
import torch

# The checker and the cluster are part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from history import faults
from history.campaign import Campaign, campaign, judge
from history.checker import Kind, Report
from history.events import now_s
from history.workers import OPTIMIZERS, Work
from rows import Row, publish, spread
from support.clusters.parameter_cluster import ParameterCluster
from support.network.namespaces import RoutedHosts, why_unavailable

NUM_KILLS, NUM_MOVES = 200, 100
NUM_PARTITIONS, NUM_PAUSES, NUM_OUTAGES = 24, 12, 12
NUM_SERVERS, NUM_WORKERS = 3, 3
FAULTS_A_JOB = 25


class Contradiction(Exception):
    """Raised if the surviving updates differ from the acknowledged ones in a way that no figure
    counts."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off. All workers are threads of this process, which keeps all
    their logs: a collection would stop them for 0.2 s now and then, which would count as a slow
    push."""
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


@dataclass(kw_only=True)
class Measured:
    """Figures of all parts of the bench."""

    failovers_s: list[float] = field(default_factory=list)
    move_pauses_s: list[float] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    longest_pushes_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Longest push during each fault, by kind of fault."""
    reports: list[Report] = field(default_factory=list)

    def judged(self, work: Work) -> None:
        report = judge(work)
        print(f"{work.job}: {report}", flush=True)
        self.reports.append(report)


def fail_over(kind: str, num_kills: int, directory: Path, seed: int, measured: Measured) -> None:
    with ParameterCluster(directory, NUM_SERVERS) as cluster:
        work = new_work(cluster, kind, directory)
        with without_collector(), campaign(cluster, work, seed, NUM_WORKERS) as run:
            for number in range(num_kills):
                cluster.await_ready()
                run.await_in_step()
                victim = run.kill_one()
                took_s = run.failovers_s[-1]
                print(f"{kind}: kill {number + 1}, {victim.server_id}: {took_s:.3f} s", flush=True)
        measured.failovers_s += run.failovers_s
        measured.judged(work)


def move(num_moves: int, directory: Path, seed: int, measured: Measured) -> None:
    """Make planned moves: a server is added, or the oldest one is asked to leave."""
    with ParameterCluster(directory, NUM_SERVERS) as cluster:
        work = new_work(cluster, "sgd", directory)
        with without_collector(), campaign(cluster, work, seed, NUM_WORKERS) as run:
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
                pause_s = longest_push_s(run, since_s) - usual_push_s(run)
                measured.move_pauses_s.append(pause_s)
                print(f"move {number + 1}: {pause_s * 1e3:.0f} ms", flush=True)
        measured.judged(work)


def strike(planned: Sequence[faults.Fault], directory: Path, seed: int, measured: Measured) -> None:
    """Inject the faults into one cluster. After every FAULTS_A_JOB faults the job's pushes are
    judged, and a new job starts."""
    if not planned:
        return
    if why := why_unavailable():
        raise SystemExit(f"partitions, pauses and outages are not possible: {why}")
    with RoutedHosts() as hosts, ParameterCluster(directory, NUM_SERVERS, hosts=hosts) as cluster:
        for first in range(0, len(planned), FAULTS_A_JOB):
            number = first // FAULTS_A_JOB
            kind = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
            work = new_work(cluster, kind, directory / str(number))
            with without_collector(), campaign(cluster, work, seed, NUM_WORKERS) as run:
                run.await_spread()
                for fault in planned[first : first + FAULTS_A_JOB]:
                    strike_once(run, hosts, fault, measured)
            measured.judged(work)


def strike_once(run: Campaign, hosts: RoutedHosts, fault: faults.Fault, measured: Measured) -> None:
    since_s = now_s()
    faults.strike(run, hosts, fault)
    took_s = now_s() - since_s
    longest_s = longest_push_s(run, since_s)
    measured.recoveries_s.append(took_s - fault.lasts_s)
    measured.longest_pushes_s[fault.kind].append(longest_s)
    print(f"{fault}: recovered after {took_s:.1f} s, longest push {longest_s:.1f} s", flush=True)


def longest_push_s(run: Campaign, since_s: float) -> float:
    """The longest push of any worker that was answered after the time `since_s`."""
    return max(
        success.answered_s - success.sent_s
        for worker in run.workers
        for success in worker.successes
        if success.answered_s > since_s
    )


def usual_push_s(run: Campaign) -> float:
    return median(
        success.answered_s - success.sent_s
        for worker in run.workers
        for success in worker.successes
    )


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for what, default in (
        ("kills", NUM_KILLS),
        ("moves", NUM_MOVES),
        ("partitions", NUM_PARTITIONS),
        ("pauses", NUM_PAUSES),
        ("outages", NUM_OUTAGES),
        ("seed", 1),
    ):
        parser.add_argument(f"--{what}", type=int, default=default)
    return parser.parse_args()


def contradictions(reports: Sequence[Report]) -> Mapping[Kind, int]:
    counted = {Kind.LOST: 0, Kind.TWICE: 0}
    for report in reports:
        for fault in report.faults:
            if fault.kind not in counted:
                raise Contradiction(str(report))
            counted[fault.kind] += 1
    return counted


def rows(measured: Measured) -> list[Row]:
    counted = contradictions(measured.reports)
    pushed = sum(report.num_acknowledged for report in measured.reports)
    struck = len(measured.failovers_s) + len(measured.move_pauses_s) + len(measured.recoveries_s)
    runs = {"runs": struck}
    found = [
        Row(metric="pushes_lost", value=counted[Kind.LOST], unit="pushes", **runs),
        Row(metric="pushes_applied_twice", value=counted[Kind.TWICE], unit="pushes", **runs),
        Row(metric="pushes_acknowledged", value=pushed, unit="pushes", **runs),
    ]
    if measured.failovers_s:
        found += spread("failover", measured.failovers_s, "s")
    if measured.move_pauses_s:
        found += spread("move_pause", [s * 1e3 for s in measured.move_pauses_s], "ms")
    if measured.recoveries_s:
        found += spread("recovery", measured.recoveries_s, "s")
    for kind, longest_s in sorted(measured.longest_pushes_s.items()):
        metric = f"{kind}_longest_push"
        found.append(Row(metric=metric, value=max(longest_s), unit="s", runs=len(longest_s)))
    return found


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # As on the servers: if all cores are busy, the threads of one kernel wait for each other.
    torch.set_num_threads(1)
    want = asked()
    measured = Measured()
    rng = random.Random(want.seed)
    planned = [
        *faults.plan(faults.PARTITIONS, want.partitions, rng),
        *faults.plan(faults.PAUSES, want.pauses, rng),
        *faults.plan(faults.OUTAGES, want.outages, rng),
    ]
    rng.shuffle(planned)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for kind in OPTIMIZERS if want.kills else ():
            num_kills = want.kills // len(OPTIMIZERS)
            fail_over(kind, num_kills, directory / kind, want.seed, measured)
        if want.moves:
            move(want.moves, directory / "move", want.seed, measured)
        strike(planned, directory / "strike", want.seed, measured)
    publish("faults", rows(measured))


if __name__ == "__main__":
    main()
