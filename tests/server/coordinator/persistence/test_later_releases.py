"""Records of a later release: unknown fields are ignored, an unknown format is left alone."""

import json
from asyncio import sleep, timeout, to_thread
from collections.abc import Callable

import pytest
from support.clusters.coordinator_world import entered, propose, served
from support.clusters.garbage import as_json, good_member, good_record, good_state
from support.clusters.memory_store import MemoryStore

from shoal_server.coordinator.parameters import check_record
from shoal_server.coordinator.persistence import codec, earlier_runs
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.coordinator.persistence.stored_json import state_from_json
from shoal_server.coordinator.repair.inspection import unreadable_records
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValue, Revision
from shoal_server.etcd.json_fields import LaterFormat, UnreadableRecord
from shoal_server.etcd.records import servers

JOB = "digits"
GOOD_RUNS: dict[str, object] = {"last_generation": 7, "expelled": ["1"], "ended_unix_s": 1.5}
GOOD_SERVER: dict[str, object] = {"incarnation": "1", "address": "h:1"}

READERS: dict[str, tuple[str, dict[str, object], Callable[[bytes], object]]] = {
    "a job's own record": (
        keys.job_state(JOB),
        good_state(JOB),
        lambda data: state_from_json(JOB, data),
    ),
    "a generation": (
        keys.generation(JOB, 1),
        good_record(JOB),
        lambda data: stored_record(JOB, 1, data),
    ),
    "a member": (keys.member(JOB, "w0"), good_member(), codec.member_from_json),
    "earlier runs": (keys.reset(JOB), GOOD_RUNS, lambda data: earlier_runs.from_json(JOB, data)),
    "a parameter server": (
        keys.server("ps-0"),
        GOOD_SERVER,
        lambda data: servers.parse(keys.server("ps-0"), data),
    ),
}
OF_A_JOB = [what for what in READERS if what != "a parameter server"]


@pytest.mark.parametrize("what", READERS)
def test_unknown_fields_are_ignored(what: str) -> None:
    _, good, read = READERS[what]
    more = {**good, "format": 1, "of_a_later_release": {"says": ["more"]}}
    assert read(as_json(more)) == read(as_json(good))


@pytest.mark.parametrize("what", READERS)
def test_the_error_for_a_later_format_names_both_formats(what: str) -> None:
    _, good, read = READERS[what]
    with pytest.raises(Exception, match="format 2, of a later release; this release reads up to 1"):
        read(as_json({**good, "format": 2}))


@pytest.mark.parametrize("format_", [0, -1, "1", 1.0, True, None, []], ids=repr)
def test_a_format_that_is_no_positive_integer_is_refused(format_: object) -> None:
    with pytest.raises(UnreadableRecord, match="format is") as raised:
        codec.member_from_json(as_json({**good_member(), "format": format_}))
    assert not isinstance(raised.value, LaterFormat)


@pytest.mark.parametrize("what", OF_A_JOB)
def test_a_record_of_a_later_release_is_not_moved_aside(what: str) -> None:
    key, good, _ = READERS[what]

    def found(value: dict[str, object]) -> tuple[bool, str]:
        item = KeyValue(key, as_json(value), Revision(1), Revision(1), version=1)
        (record,) = unreadable_records(JOB, [item], check_record)
        return record.is_repairable, record.remedy

    assert found({**good, "format": "?"})[0]
    is_mendable, remedy = found({**good, "format": 2})
    assert not is_mendable
    assert "a later release of shoal wrote the record" in remedy


async def test_a_job_record_keeps_the_fields_of_a_later_release() -> None:
    """A coordinator of this release reads and rewrites the record."""
    store = MemoryStore()
    key = keys.job_state("j")
    more = {"of_a_later_release": {"says": ["more"]}}
    async with served(store) as world:
        await world.training("a")
    item = await store.get(key)
    assert item is not None
    await store.put(key, as_json({**json.loads(item.value), **more}))
    await store.delete(keys.member("j", "a"))
    async with served(store) as world:
        b = world.client("b", desired=1)
        await to_thread(b.join)
        await to_thread(propose, b, 5)
        record = await entered(b, 1)
        stored = await until_written(store, key, record.roster.generation)
    assert stored["of_a_later_release"] == more["of_a_later_release"]


async def until_written(store: MemoryStore, key: str, generation: int) -> dict[str, object]:
    """Return the job's record once its newest generation is this one."""
    async with timeout(10.0):
        while True:
            item = await store.get(key)
            value: dict[str, object] = json.loads(item.value) if item is not None else {}
            if value.get("last_generation") == generation:
                return value
            await sleep(0.01)
