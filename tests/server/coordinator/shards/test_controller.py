"""The shard controller: a job that hangs or fails does not delay another, and servers that compute
with several versions of torch are reported and keep working."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import Pusher
from support.processes.served_process import awaited

from shoal_proto.errors import Unavailable
from shoal_proto.v1.shards_pb2 import Block, Shard, ShardMap
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.shards import controller as controllers
from shoal_server.coordinator.shards.controller import ShardController, TorchVersions
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import LifetimeFigures
from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.processes import Holder
from shoal_server.core.shards import abandoned_loads
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.loads import ShardMeasure
from shoal_server.core.shards.losses import RestoreAttempt
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.records import assignments, shard_map
from shoal_server.etcd.records.servers import Server
from shoal_server.status.shards import ShardReader

HOLDER = Holder("ps-0", "1")
LIMIT_S = 20.0
OTHER_TORCH = "9.9.9"


class Troubled(MemoryStore):
    """Store in which reading one job hangs, another fails, and a third finds etcd unavailable."""

    async def get(self, key: str) -> KeyValue | None:
        if key == keys.job_state("hangs"):
            await asyncio.Event().wait()
        if key == keys.job_state("fails"):
            raise KeyError("an unexpected error")
        if key == keys.job_state("away"):
            raise Unavailable("etcd does not answer")
        return await super().get(key)


async def place(store: MemoryStore, job: str) -> None:
    shards = (ShardAssignment(shard_id=0, epoch=1, primary=HOLDER),)
    await assignments.place(
        store, JobAssignments(job=job, copies=1, shards=shards, placement_id="r")
    )


async def write_layout(store: MemoryStore, job: str) -> None:
    shard = Shard(shard_id=0, server_id=HOLDER.server_id, blocks=[Block(parameter="w")])
    layout = shard_map.stored(ShardMap(job=job, shards=[shard]))
    await shard_map.write_chunks(store, layout)
    await store.put(layout.head.key, layout.head.value)


async def finish(store: MemoryStore, job: str, **how: Any) -> None:
    state = StateRecord(
        spec=JobSpec(job=job), last_generation=Generation(1), finished=True, reason="done", **how
    )
    await store.put(keys.job_state(job), state_to_json(state))


async def until_deleted(store: MemoryStore, job: str) -> None:
    """Return once the controller has deleted the job's assignments."""
    async with asyncio.timeout(10.0):
        async for _ in store.watch(keys.assignments(job), await _revision(store)):
            if not await store.keys(keys.assignments(job)):
                return


async def until_lost(store: MemoryStore, job: str) -> ShardAssignment:
    """Return the assignment of the job's only shard once it says that the shard is lost."""
    async for _ in store.watch(keys.assignments(job), await _revision(store)):
        (shard,) = (await assignments.read_shards(store, job, [0])).values()
        if shard.content is ShardContent.LOST:
            return shard
    raise AssertionError("the watch has ended")


async def _revision(store: MemoryStore) -> int:
    return (await store.range(keys.ASSIGNMENTS)).revision


async def test_jobs_that_hang_or_fail_do_not_delay_another() -> None:
    store = Troubled()
    for job in ("hangs", "fails", "away", "good"):
        await place(store, job)
    await finish(store, "good")
    async with ShardController(store).working():
        await until_deleted(store, "good")
        # A later job is handled as well.
        await place(store, "later")
        await finish(store, "later")
        await until_deleted(store, "later")
    assert await store.keys(keys.assignments("hangs")) != ()


async def test_a_job_that_can_be_joined_again_keeps_its_assignments() -> None:
    """Assignments of jobs that failed, were stopped or are lost stay: only their servers have the
    jobs' values."""
    store = Troubled()
    over: dict[str, dict[str, Any]] = {
        "failed": {"failed": True},
        "stopped": {"stopping": "enough"},
        "lost": {"lost": "nobody holds it"},
    }
    for job, how in over.items():
        await place(store, job)
        await finish(store, job, **how)
    async with ShardController(store).working():
        # A cleared job is deleted; by its name it is handled after the others.
        await place(store, "zz-cleared")
        await finish(store, "zz-cleared", failed=True, tally=LifetimeFigures(is_cleared=True))
        await until_deleted(store, "zz-cleared")
    assert sorted(await assignments.jobs(store)) == sorted(over)


async def test_a_shard_that_an_ended_coordinator_was_loading_becomes_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The successor first tries to restore the job, which has no snapshot. The log counts the shard
    as lost."""
    monkeypatch.setattr(abandoned_loads, "GIVEN_UP_AFTER_S", 0.0)
    store, asked = MemoryStore(), asyncio.Event()

    async def restore(job: str, lost: Sequence[ShardAssignment]) -> RestoreAttempt:
        asked.set()
        return RestoreAttempt(is_restored=False, reason="No snapshot of it is left.")

    shard = ShardAssignment(shard_id=0, epoch=4, primary=HOLDER, content=ShardContent.LOADING)
    placed = JobAssignments(job="job", copies=1, shards=(shard,), placement_id="r")
    server = {"address": "127.0.0.1:1", "incarnation": HOLDER.incarnation}
    await store.put(keys.server(HOLDER.server_id), json.dumps(server).encode())
    await assignments.place(store, placed)

    def counts() -> tuple[int, int] | None:
        lines = (line for line in logs if line["event"] == "shards_rebalanced")
        return next(((line["rescued"], line["lost"]) for line in lines), None)

    with capture_logs() as logs:
        async with ShardController(store, restore).working(), asyncio.timeout(30.0):
            known = await until_lost(store, "job")
            await asyncio.to_thread(awaited, counts, LIMIT_S, "the change is logged")
    assert asked.is_set()
    assert known.loss is not None and known.loss.snapshot == "No snapshot of it is left."
    assert known.epoch == 5
    assert counts() == (0, 1)


async def test_measuring_a_server_that_hangs_delays_no_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: 200 jobs on a server that hangs delayed the work by 13 s, every 10 s."""
    monkeypatch.setattr(controllers, "MEASURE_EACH_S", 0.01)
    asked = asyncio.Event()

    async def measure(job: str) -> Mapping[int, ShardMeasure]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    store = MemoryStore()
    await write_layout(store, "hung")
    await place(store, "hung")
    controller = ShardController(store, measure=measure)
    async with controller.working(), asyncio.timeout(10.0):
        await asked.wait()
        await place(store, "good")
        await finish(store, "good")
        await until_deleted(store, "good")


def server(name: str, torch_version: str) -> Server:
    return Server(holder=Holder(name, "one"), address="a:1", torch_version=torch_version)


def mixtures(*present: list[Server]) -> list[dict[str, list[str]]]:
    """Return the mixtures logged for these lists of servers, one after the other."""
    versions = TorchVersions()
    with capture_logs() as logs:
        for servers in present:
            versions.note(servers)
    return [line["servers"] for line in logs]


def test_each_mixture_is_logged_when_it_begins() -> None:
    """A mixture that comes back is logged again; a server without a version does not count."""
    a, b, c, silent = server("a", "2.5"), server("b", "2.6"), server("c", "2.6"), server("d", "")
    assert mixtures([a], [a, silent], []) == []
    mixed, wider = {"2.5": ["a"], "2.6": ["b"]}, {"2.5": ["a"], "2.6": ["b", "c"]}
    assert mixtures([a, b], [b, a], [c, b, a], [c, b], [b, a]) == [mixed, wider, mixed]


def test_a_job_on_several_versions_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator's log and the job's status both show the versions."""
    own = torch.__version__
    with capture_logs() as logs, ParameterServers(1) as servers:
        monkeypatch.setattr(torch, "__version__", OTHER_TORCH)
        servers.add("ps-1")

        def warned_of() -> object:
            return next((e["servers"] for e in logs if e["event"] == "torch_versions_differ"), None)

        with closing(Pusher(servers, "w0", weight=1.0)) as member:
            member.push()
            assert awaited(warned_of, LIMIT_S, "the warning is logged") == {
                own: ["ps-0"],
                OTHER_TORCH: ["ps-1"],
            }
            reader = ShardReader(servers.store)
            view = servers.run(reader.read("job"))
            servers.run(reader.close())
    assert view is not None
    assert {each.server_id: each.torch_version for each in view.servers} == {
        "ps-0": own,
        "ps-1": OTHER_TORCH,
    }
