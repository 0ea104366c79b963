"""Rosters that members get by the digests of their chunks, over real gRPC."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.clusters.coordinator_world import Served, entered, served

from shoal_client.membership.shared_chunks import SharedChunks
from shoal_proto.digest import roster_digest
from shoal_proto.packing import roster_chunks
from shoal_proto.packing.roster_chunks import digest_of
from shoal_server.coordinator.jobs.streams import NamedChunks
from shoal_server.etcd.memory import MemoryStore


class Asked:
    """The digests that members of a coordinator asked for, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[bytes]] = []
        answer = NamedChunks.answer

        def noted(chunks: NamedChunks, digests: Sequence[bytes]) -> bytes:
            self.calls.append(list(digests))
            return answer(chunks, digests)

        monkeypatch.setattr(NamedChunks, "answer", noted)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Of a world in which rosters of three are large."""
    monkeypatch.setattr(roster_chunks, "CHUNK_ENTRIES", 2)
    return Asked(monkeypatch)


async def train(world: Served, *names: str, shared: Path | None = None) -> None:
    members = [
        await world.joined(name, desired=len(names), shared_directory=shared) for name in names
    ]
    records = await asyncio.gather(*(entered(member, 0) for member in members))
    for record in records:
        assert [entry.member_id for entry in record.roster.entries] == sorted(names)
        assert roster_digest(record.roster) == record.digest == records[0].digest


async def test_the_members_of_a_host_ask_once_for_what_all_of_them_need(
    asked: Asked, tmp_path: Path
) -> None:
    """Two chunks of names and the states, of three members."""
    async with served(MemoryStore()) as world:
        await train(world, "a", "b", "c", shared=tmp_path)
    assert len(asked.calls) == 1
    assert len(asked.calls[0]) == 3


async def test_a_member_asks_only_for_what_changed(asked: Asked) -> None:
    """Of the second generation: the chunk that the newcomer is in, and the states."""
    async with served(MemoryStore()) as world:
        await train(world, "a", "b", "c")
        before = len(asked.calls)
        newcomer = await world.joined("d", desired=3)
        record = await asyncio.to_thread(newcomer.await_generation, 0, 10.0)
        assert len(record.roster.entries) == 4
    sizes = sorted(len(digests) for digests in asked.calls[before:])
    assert sizes == [2, 2, 2, 3]


def test_a_file_that_is_not_what_its_name_says_is_fetched_again(tmp_path: Path) -> None:
    """And who stands still with the lock holds nobody up for long."""
    chunk = b"a chunk"
    digest = digest_of(chunk)
    (tmp_path / digest.hex()).write_bytes(b"another")
    fetched: list[Sequence[bytes]] = []

    def fetch(missing: Sequence[bytes]) -> Mapping[bytes, bytes]:
        fetched.append(missing)
        if len(fetched) == 1:
            closed = threading.Event()
            closed.set()
            inner = SharedChunks(tmp_path, closed)
            assert inner.get([digest], lambda missing: {digest: chunk}) == {digest: chunk}
        return {digest: chunk}

    shared = SharedChunks(tmp_path, threading.Event())
    assert shared.get([digest], fetch) == {digest: chunk}
    assert shared.get([digest], fetch) == {digest: chunk}
    assert fetched == [[digest]]
