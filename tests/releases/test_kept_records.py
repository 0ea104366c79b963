"""What earlier releases wrote into etcd: this one goes on with it.

`support/releases/record_etcd.py` kept it.
"""

import base64
import json

import pytest
from support.clusters.coordinator_world import served
from support.releases.record_etcd import KEPT

from shoal_server.coordinator.repair.inspection import RecordKind, broken, kind_of, records_of
from shoal_server.etcd import keys
from shoal_server.etcd.memory import MemoryStore
from shoal_server.etcd.records import servers, shard_map

RELEASES = sorted(path.stem.removeprefix("etcd-") for path in KEPT.glob("etcd-*.json"))
JOBS = ("async", "begun-anew", "finished", "sync")


async def kept(version: str) -> MemoryStore:
    store = MemoryStore()
    records = json.loads((KEPT / f"etcd-{version}.json").read_text())
    for key, value in records.items():
        if key != keys.LEADER:
            await store.put(key, base64.b64decode(value))
    return store


@pytest.mark.parametrize("version", RELEASES)
async def test_all_records_can_be_read(version: str) -> None:
    store = await kept(version)
    found: set[RecordKind | None] = set()
    for job in JOBS:
        items = await records_of(store, job)
        assert broken(job, items) == []
        found |= {kind_of(job, item.key) for item in items}
    assert found >= set(RecordKind), "a kind of record is not among those that were kept"
    assert {server.holder.server_id for server in await servers.read(store)} == {"ps-0", "ps-1"}
    assert shard_map.parse("async", await records_of(store, "async")) is not None


@pytest.mark.parametrize("version", RELEASES)
async def test_a_coordinator_goes_on_with_the_jobs(version: str) -> None:
    async with served(await kept(version)) as world:
        registry = world.coordinator.registry
        assert not registry.quarantined
        standing = {actor.job.spec.job: actor.job for actor in registry.actors()}
        assert set(standing) == {"async", "finished", "sync"}
        assert standing["finished"].phase.value == "finished"
        for name in ("async", "sync"):
            assert len(standing[name].members) == 2
            assert standing[name].last_generation == 1
        assert standing["sync"].state.progress.has_trained
