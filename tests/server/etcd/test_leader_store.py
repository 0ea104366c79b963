"""The store of a leader: after its term, each write fails and reports that the term is over."""

import asyncio
from collections.abc import Sequence

import pytest
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import NotLeader
from shoal_server.etcd import keys, leader_store
from shoal_server.etcd.api import Compare, Delete, Get, Put, Revision, absent, created_at
from shoal_server.etcd.leader_store import LeaderStore


class LateStore(HookedStore):
    """A store in which conditional transactions wait for `answers`."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.answers = asyncio.Event(), asyncio.Event()

    async def before(self, transaction: Transaction) -> None:
        if transaction.compares:
            self.has_begun.set()
            await self.answers.wait()


class Term:
    """A coordinator's term, and the reasons with which it was deposed."""

    def __init__(self, store: MemoryStore, conditions: Sequence[Compare] | None) -> None:
        self.conditions = conditions
        self.why_deposed: list[str] = []
        self.store = LeaderStore(store, self._leadership, self.why_deposed.append)

    def _leadership(self) -> Sequence[Compare]:
        if self.conditions is None:
            raise NotLeader("no term")
        return self.conditions


async def leading(store: MemoryStore) -> Term:
    revision = await store.put(keys.LEADER, b"{}")
    return Term(store, [created_at(keys.LEADER, revision)])


async def test_a_leader_writes() -> None:
    store = MemoryStore()
    term = await leading(store)
    result = await term.store.transact([absent("a")], [Put("a", b"1"), Get("a")], [Get("a")])
    assert (result.succeeded, result.reads[0][0].value) == (True, b"1")


async def test_a_failed_condition_of_the_write_itself_ends_no_term() -> None:
    store = MemoryStore()
    term = await leading(store)
    await store.put("a", b"1")
    result = await term.store.transact([absent("a")], [Put("a", b"2")], [Get("a")])
    assert not result.succeeded
    assert [[item.value for item in read] for read in result.reads] == [[b"1"]]
    assert term.why_deposed == []


@pytest.mark.parametrize("key_is_gone", [True, False], ids=["no leader", "another leader"])
async def test_a_deposed_leader_writes_nothing_and_its_term_ends(key_is_gone: bool) -> None:
    store = MemoryStore()
    term = await leading(store)
    await store.delete(keys.LEADER)
    if not key_is_gone:
        await store.put(keys.LEADER, b"{}")
    # The write's own condition may fail as well, which makes no difference.
    for compares in ([], [absent(keys.LEADER)], [created_at("a", Revision(9))]):
        with pytest.raises(NotLeader):
            await term.store.transact(compares, [Put("a", b"1"), Delete("b")], [Get("a")])
    assert await store.get("a") is None
    assert len(term.why_deposed) == 3


@pytest.mark.parametrize("leads_again", [True, False])
@pytest.mark.parametrize("call", ["transact", "confirm"])
async def test_a_call_of_an_earlier_term_ends_no_later_one(call: str, leads_again: bool) -> None:
    """etcd's answer to the call comes after the coordinator was elected again, or stepped down."""
    store = LateStore()
    term = await leading(store)
    write = term.store.transact([], [Put("a", b"1")]) if call == "transact" else None
    late = asyncio.ensure_future(write or term.store.confirm())
    await store.has_begun.wait()
    await store.delete(keys.LEADER)
    term.conditions = None
    if leads_again:
        term.conditions = [created_at(keys.LEADER, await store.put(keys.LEADER, b"{}"))]
    store.answers.set()
    with pytest.raises(NotLeader):
        await late
    assert term.why_deposed == []
    if leads_again:
        await term.store.confirm()


async def test_outside_of_a_term_only_reads_are_made() -> None:
    store = MemoryStore()
    await store.put("a", b"1")
    term = Term(store, None)
    assert (await term.store.transact([], [Get("a")])).reads[0][0].value == b"1"
    with pytest.raises(NotLeader):
        await term.store.transact([], [Delete("a")])
    assert await store.get("a") is not None


async def test_a_term_begins_without_the_reason_for_the_end_of_the_last() -> None:
    """The reason is logged if the new term ends in another way."""
    term = leader_store.Term()
    term.begin(())
    term.depose("another coordinator leads")
    term.begin(())
    assert (term.why_deposed, term.deposed.is_set()) == ("", False)
