"""Campaigns: workers push to servers that are killed in turn, and the final values are judged."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from history.checker import Report, check
from history.events import now_s, read_journals
from history.rows import RowMember, RowWork, RowWorker
from history.workers import Reader, Work, Worker, settle
from support.clusters.parameter_cluster import ParameterCluster, Server

PATIENCE_S = 60.0
POLL_S = 0.002
SAME_ID_RATE = 0.2
"""Share of killed servers that start again under their own id; its lease must expire first."""

Found = TypeVar("Found")


class Stuck(AssertionError):
    """An expected event did not happen within PATIENCE_S."""


@dataclass
class Campaign:
    """The workers of one job on a cluster. `seed` decides which servers are killed, and what is
    pushed."""

    cluster: ParameterCluster
    work: Work | RowWork
    seed: int
    workers: Sequence[Worker | RowWorker]
    reader: Reader | None = None
    failovers_s: list[float] = field(default_factory=list)
    """Per kill of a primary: seconds until a push that was sent after the kill is acknowledged."""
    strikes: list[tuple[float, str]] = field(default_factory=list)
    """Time and description of each kill, for the report of a failure."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def await_in_step(self) -> None:
        """Wait until each shard has every copy that it can have."""
        self.awaited(lambda: self.cluster.is_in_step(self.work.job), "all copies in step")

    def await_spread(self) -> None:
        """Wait until each running server is the primary of some shards."""
        self.awaited(lambda: self.cluster.is_spread(self.work.job), "shards on all servers")

    def await_success(self, since_s: float) -> float:
        """Wait for a push that was sent after `since_s`; return the time of its acknowledgement."""

        def look() -> float | None:
            answers = [
                success.answered_s
                for worker in self.workers
                for success in worker.successes[-8:]
                if success.sent_s > since_s
            ]
            return min(answers, default=None)

        return self.awaited(look, "a push is acknowledged")

    def await_all_succeed(self) -> None:
        """Wait until each worker has a push acknowledged that it sent after this call began."""
        since_s = now_s()
        for worker in self.workers:
            self.awaited(
                lambda w=worker: w.successes and w.successes[-1].sent_s > since_s,
                f"{worker.name} pushes",
            )

    def victim(self) -> Server:
        """A primary, drawn at random."""
        return self.rng.choice(self.cluster.primaries(self.work.job))

    def kill_one(self) -> Server:
        """Kill a primary and start another server, sometimes under the same id; wait for the
        failover."""
        victim = self.victim()
        led = [
            shard.shard_id
            for shard in self.cluster.assignments(self.work.job).shards
            if shard.primary.server_id == victim.server_id
        ]
        victim.kill()
        killed_s = now_s()
        self.strikes.append((killed_s, f"{victim.server_id}, which led {led}, is dead"))
        same_id = self.rng.random() < SAME_ID_RATE
        self.cluster.start(victim.server_id if same_id else f"ps-{len(self.cluster.servers)}")
        self.failovers_s.append(self.await_success(killed_s) - killed_s)
        return victim

    def awaited(self, look: Callable[[], Found | None], what: str) -> Found:
        """Poll `look` until it returns a result. Raises Stuck after PATIENCE_S, and the error of a
        worker that has failed meanwhile."""
        give_up_s = now_s() + PATIENCE_S
        while not (found := look()):
            for each in filter(None, (*self.workers, self.reader)):
                if not each.runs:
                    each.stop()
            if now_s() > give_up_s:
                raise Stuck(f"not within {PATIENCE_S:g} s: {what}\n{self.describe()}")
            time.sleep(POLL_S)
        return found

    def describe(self) -> str:
        """Seed, workers and shard assignments, for the message of a failure."""
        ended = "\n".join(
            f"  {w.name}: {len(w.successes)} pushes; {w.failures}" for w in self.workers
        )
        held = self.cluster.assignments(self.work.job)
        return f"seed {self.seed}, {self.work}\n{ended}\n{held}"


@contextmanager
def campaign(
    cluster: ParameterCluster, work: Work, seed: int, num_workers: int
) -> Iterator[Campaign]:
    """Start workers and a reader, which run until the block ends.

    Before and after the block, each worker gets a push acknowledged.
    """
    work.directory.mkdir(parents=True)
    cluster.await_ready()
    workers = [Worker(work, number, seed) for number in range(num_workers)]
    run = Campaign(cluster, work, seed, workers, Reader(work))
    for each in (*workers, run.reader):
        each.start()
    try:
        run.await_all_succeed()
        yield run
        run.await_all_succeed()
    finally:
        for each in (*workers, run.reader):
            each.stop()


@contextmanager
def row_campaign(
    cluster: ParameterCluster, work: RowWork, seed: int, num_workers: int
) -> Iterator[Campaign]:
    """Run `campaign` with workers that push rows of a table, and without a reader.

    Each push must be acknowledged: an error of a worker fails the campaign.
    """
    cluster.await_ready()
    workers = []
    for number in range(num_workers):
        name = f"worker-{number}"
        workers.append(RowWorker(work, name, seed, partial(RowMember, work, name)))
    run = Campaign(cluster, work, seed, workers)
    for worker in workers:
        worker.start()
    try:
        run.await_all_succeed()
        yield run
        run.await_all_succeed()
    finally:
        for worker in workers:
            worker.stop()


def history_of(run: Campaign, report: Report) -> str:
    """Kills and the servers' log lines about the job, for the message of a failure."""
    began = datetime.fromtimestamp(time.time() - now_s() + report.began_s, UTC)
    strikes = (f"  {at_s - report.began_s:.3f} s: {what}" for at_s, what in run.strikes)
    lines = (f"  {line}" for line in run.cluster.log_lines_about(run.work.job))
    return "\n".join([f"times count from {began:%H:%M:%S.%f} UTC", *strikes, *lines])


def judge(work: Work) -> Report:
    """Compare the values that survived with what the workers' journals say was acknowledged."""
    shard_map = settle(work)
    return check(shard_map.shards, work.optimizer, read_journals(work.directory.glob("*.jsonl")))


__all__ = ["Campaign", "Stuck", "campaign", "history_of", "judge", "row_campaign"]
