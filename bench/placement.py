"""Placement of shards at scale: 100 servers, a real etcd, the coordinator's own code.

    make bench NAME=placement
    .venv/bin/python bench/placement.py tables    # one of the two

Two jobs, each on its own etcd: `dense_1tb`, a transformer of 1 TB, and `tables`, 100 tables of 64
shards. The servers are simulated in this process, without parameters: they change the records in
etcd as real servers do, as if each copy arrived at once. Everything shares this machine.

`place_call`: time of the call that places the shards. `place`: time from that call until every
shard has its backup. `fail_over`: time from the death of a server until each of its shards has
another primary; the other servers know of the death at once. `whole_again`: time from the death
until every shard has its copies again. `move`: time to empty a leaving server. `..._written`: bytes
of keys and values written to etcd meanwhile. `largest_request`, `most_operations`: maxima over all
transactions; etcd allows 1.5 MiB and 128. `map`: size of the answer with the shard map; `map_call`:
time of that call.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog

# Servers without parameters are part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from rows import Row, publish
from support.clusters.record_keepers import (
    CountedClient,
    RecordKeepers,
    holds_nothing,
    is_whole,
    leads_nothing,
    record_keepers,
)
from support.models.large_jobs import hundred_tables, transformer_of_a_terabyte

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import Supervisor
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, PlaceRequest
from shoal_server.coordinator.shards.controller import ShardController
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd.remote.config import EtcdConfig

NUM_SERVERS = 100
LIMIT_S = 300.0
JOBS: Mapping[str, Callable[[str], PlaceRequest]] = {
    "dense_1tb": transformer_of_a_terabyte,
    "tables": hundred_tables,
}


async def anybody(token: Token) -> None:
    """Admit every caller: there are no members here."""


async def whoever_is_listed(addresses: Mapping[Holder, str]) -> Mapping[Holder, str]:
    """Report every listed server as reachable: no process listens at these addresses."""
    return addresses


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one job."""

    job: str
    cluster: RecordKeepers
    rows: list[Row] = field(default_factory=list)
    start_s: float = 0.0

    def begin(self) -> None:
        """Start the counters and the clock."""
        self.start_s = time.monotonic()
        self.cluster.tally.written_bytes = 0

    def add(self, metric: str, value: float, unit: str) -> None:
        self.rows.append(Row(metric=f"{self.job}_{metric}", value=value, unit=unit, runs=1))
        print(f"{self.job}_{metric}: {value:.4g} {unit}", flush=True)

    def add_time(self, metric: str) -> None:
        """Add the time since `begin`."""
        self.add(metric, time.monotonic() - self.start_s, "s")

    async def until(self, metric: str, is_so: Callable[[JobAssignments], bool]) -> None:
        """Wait until `is_so` holds; add the time since `begin`, and the bytes written."""
        await self.cluster.until(self.job, is_so, LIMIT_S)
        self.add_time(metric)
        self.add(f"{metric}_written", self.cluster.tally.written_bytes, "bytes")


async def measure(measured: Measurement, request: PlaceRequest) -> None:
    cluster = measured.cluster
    service = ShardsService(cluster.store, anybody, choose=whoever_is_listed)
    measured.begin()
    await service.Place(request, None)  # type: ignore[arg-type]
    measured.add_time("place_call")
    await measured.until("place", is_whole)
    measured.begin()
    shard_map = await service.GetMap(GetMapRequest(token=request.token), None)  # type: ignore[arg-type]
    measured.add_time("map_call")
    measured.add("map", shard_map.ByteSize(), "bytes")
    measured.add("shards", len(shard_map.shards), "shards")

    lost = cluster.servers[NUM_SERVERS // 2]
    measured.begin()
    killing = asyncio.create_task(cluster.kill(lost))
    await measured.until("fail_over", leads_nothing(lost.me))
    await killing
    await measured.until(
        "whole_again", lambda held: is_whole(held) and holds_nothing(lost.me)(held)
    )

    leaving = cluster.servers[0]
    measured.begin()
    await leaving.register(leaving=True)
    await measured.until("move", holds_nothing(leaving.me))

    tally = cluster.tally
    measured.add("largest_value", tally.largest_value_bytes, "bytes")
    measured.add("largest_request", tally.largest_request_bytes, "bytes")
    measured.add("most_operations", tally.most_operations, "operations")
    measured.add("transactions", tally.num_transactions, "transactions")
    measured.add("transactions_refused", tally.num_refused, "transactions")


async def measure_on(endpoint: str, job: str) -> list[Row]:
    config = EtcdConfig(endpoints=(endpoint,))
    async with AsyncExitStack() as stack:
        keepers = record_keepers(lambda: CountedClient(config), NUM_SERVERS)
        cluster = await stack.enter_async_context(keepers)
        await stack.enter_async_context(ShardController(cluster.store).working())
        measured = Measurement(job=job, cluster=cluster)
        await measure(measured, JOBS[job](job))
        return measured.rows


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = []
    for job in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory() as directory, Supervisor() as supervisor:
            (etcd,) = start_etcd(supervisor.spawn, Path(directory) / "etcd")
            rows += asyncio.run(measure_on(etcd.endpoint, job))
    publish("placement", rows)


if __name__ == "__main__":
    main()
