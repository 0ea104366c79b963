"""A run over all surfaces, for some time or some number of inputs, by one seed.

make fuzz                                               # a minute, by a seed that is printed
.venv/bin/python -m fuzzing.campaign --seconds 300 --seed 7        # with tests/ on PYTHONPATH
"""

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzzing.calls import CallFuzzer
from fuzzing.cluster import OTHER_JOBS, FuzzedCluster
from fuzzing.files import FileFuzzer
from fuzzing.findings import CORPUS, Findings
from fuzzing.frames import FrameFuzzer
from fuzzing.http_requests import HttpFuzzer
from fuzzing.messages import MessageMaker
from fuzzing.records import RecordFuzzer
from support.network import http

CALLS, FRAMES, REQUESTS, FILES, RECORDS = 1500, 60, 120, 1500, 150
"""Inputs of each surface in one round."""
RECORD_ROUNDS = 25
"""Rounds between two that put records: the coordinator is restarted to read them."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    findings: Findings
    depositions: Sequence[str]
    """The log line of each."""
    rss_growth_bytes: int
    """Growth of the memory of a coordinator or parameter server after its first rounds."""

    @property
    def num_inputs(self) -> int:
        return self.findings.num_inputs.total()

    @property
    def num_depositions(self) -> int:
        return len(self.depositions)


class Campaign:
    """Rounds against one cluster."""

    def __init__(self, cluster: FuzzedCluster, seed: int, directory: Path) -> None:
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._maker = MessageMaker(self._draw, cluster.known())
        self._files = FileFuzzer(self._draw, directory)
        self._records = RecordFuzzer(self._draw, cluster.etcd)
        self._frames = FrameFuzzer(self._maker, self._draw)
        self._num_rounds = 0
        self.findings = Findings()

    def round(self, size: float = 1.0) -> None:
        """Send some inputs to each surface."""
        self._num_rounds += 1
        self._cluster.renew()
        self._maker.known = dict(self._cluster.known())
        for _ in range(int(FILES * size)):
            self._files.read(self._files.draw_input(), self.findings)
        asyncio.run(self._over_the_wire(size))
        if self._num_rounds % RECORD_ROUNDS == 1:
            self._put_records(int(RECORDS * size))
        for line in self._cluster.not_foreseen():
            self.findings.found(None, line)

    async def _over_the_wire(self, size: float) -> None:
        cluster, findings = self._cluster, self.findings
        calls = CallFuzzer(self._maker, self._draw, cluster.coordinator.grpc, cluster.server.grpc)
        url = f"{cluster.coordinator.http}/openapi.json"
        document = (await asyncio.to_thread(http.get, url)).json()
        known = {
            "job": [cluster.job, *OTHER_JOBS],
            "member": [cluster.token.member_id],
            "generation": ["1"],
        }
        known["incarnation"] = [cluster.token.incarnation]
        requests = HttpFuzzer(self._draw, document, known)
        page = cluster.coordinator.http.removeprefix("http://")
        try:
            for _ in range(int(FRAMES * size)):
                offer = await asyncio.to_thread(cluster.offer, self._draw)
                await self._frames.send(self._frames.draw_input(), offer, findings)
            for _ in range(int(REQUESTS * size)):
                await requests.send(requests.draw_input(), page, findings)
            await calls.run(int(CALLS * size), findings)
        finally:
            await calls.close()

    def _put_records(self, num: int) -> None:
        inputs = self._records.draw_inputs(num)
        self._records.put(inputs, self.findings)
        self._cluster.restart_coordinator()
        self._records.remove(inputs)

    def close(self) -> None:
        self._records.close()


def run(
    seed: int,
    *,
    seconds: float,
    directory: Path,
    num_inputs: int = 0,
    size: float = 1.0,
    before: Callable[[FuzzedCluster, Findings], object] = lambda cluster, findings: None,
) -> Outcome:
    """Run rounds until the time is over and at least `num_inputs` inputs were sent."""
    began_s = time.monotonic()
    with FuzzedCluster(directory) as cluster:
        campaign, memory = Campaign(cluster, seed, directory / "files"), MemoryGrowth()
        before(cluster, campaign.findings)
        try:
            while True:
                campaign.round(size)
                memory.note(cluster)
                sent = campaign.findings.num_inputs.total()
                if time.monotonic() - began_s >= seconds and sent >= num_inputs:
                    break
            cluster.await_served()
            return Outcome(
                findings=campaign.findings,
                depositions=cluster.depositions(),
                rss_growth_bytes=memory.growth_bytes,
            )
        finally:
            campaign.close()


class MemoryGrowth:
    """The largest growth of any process' memory after its first rounds."""

    WARM_ROUNDS = 3

    def __init__(self) -> None:
        self._rounds: Counter[int] = Counter()
        self._first_bytes: dict[int, int] = {}
        self.growth_bytes = 0

    def note(self, cluster: FuzzedCluster) -> None:
        for pid, now_bytes in cluster.rss_bytes().items():
            self._rounds[pid] += 1
            if self._rounds[pid] <= self.WARM_ROUNDS:
                self._first_bytes[pid] = now_bytes
            self.growth_bytes = max(self.growth_bytes, now_bytes - self._first_bytes[pid])


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a real cluster.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=0, help="at least so many")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
        outcome = run(
            arguments.seed,
            seconds=arguments.seconds,
            num_inputs=arguments.inputs,
            directory=Path(folder),
        )
    tell(outcome)
    outcome.findings.keep(CORPUS)
    return 1 if outcome.findings.unhandled or outcome.num_depositions else 0


def tell(outcome: Outcome) -> None:
    findings = outcome.findings
    for surface, count in sorted(findings.num_inputs.items()):
        print(f"{surface}: {count} inputs")
    for answer, count in findings.outcomes.most_common(40):
        print(f"  {count:8} {answer}")
    kinds = dict.fromkeys(what[:2000] for _, what in findings.unhandled)
    for what in list(kinds)[:20]:
        print(f"NOT FORESEEN: {what}")
    for line in outcome.depositions:
        print(f"DEPOSED: {line[:2000]}")
    print(
        f"fuzz_inputs {outcome.num_inputs}, fuzz_unhandled {len(findings.unhandled)},"
        f" fuzz_depositions {outcome.num_depositions},"
        f" fuzz_rss_growth {outcome.rss_growth_bytes / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
