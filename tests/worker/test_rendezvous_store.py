"""The store of a generation: torch's contract of any store, checked with the real service."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.processes.load import unhurried

from shoal.membership import rendezvous_store
from shoal.membership.join_config import JoinConfig
from shoal.membership.rendezvous_store import RendezvousStore
from shoal_client.connection.coordinators import Coordinators
from shoal_client.local.cluster import LocalCluster
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import DeadlineExceeded, Fenced, GenerationBroken, RejoinError
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2 import StoreGetRequest


@pytest.fixture(scope="module")
def membership(cluster: LocalCluster) -> Iterator[MemberSession]:
    """The only member of a running generation."""
    config = JoinConfig(job="store-contract", coordinators=(cluster.coordinator,))
    membership = MemberSession(config.member())
    membership.join()
    membership.propose({"strategy": "none"}, synchronous=True, step=0, has_state=False)
    membership.ready(membership.await_generation(above=0))
    yield membership
    membership.leave(completed=True, reason="tested")


@pytest.fixture
def real(membership: MemberSession) -> RendezvousStore:
    return RendezvousStore(membership.coordinators, membership.token, timeout_s=10)


@pytest.fixture(params=["coordinator", "file"])
def store(
    request: pytest.FixtureRequest, membership: MemberSession, tmp_path: Path
) -> Iterator[Any]:
    """Shoal's store and, to check the tests, one of torch's own. Keys are new in each test."""
    inner: Any = dist.FileStore(str(tmp_path / "store"), 1)
    if request.param == "coordinator":
        inner = RendezvousStore(membership.coordinators, membership.token, timeout_s=10)
    # torch keeps only its own half of a store written in Python: keep the other half alive here.
    yield dist.PrefixStore(uuid.uuid4().hex, inner)
    del inner


def test_a_value_is_read_as_it_was_set(store: Any) -> None:
    """Values are any bytes; the last one set counts."""
    store.set("key", "first")
    store.set("key", bytes(range(256)))
    assert store.get("key") == bytes(range(256))
    store.set("empty", "")
    assert store.get("empty") == b""


def test_a_value_is_not_stale_after_a_wait(store: Any) -> None:
    """A wait may prefetch the value; a later write is seen all the same."""
    store.set("key", "old")
    store.wait(["key"])
    store.set("key", "new")
    assert store.get("key") == b"new"


def test_counters_add_up(store: Any) -> None:
    """Counters start from zero, and accept negative amounts."""
    assert store.add("count", 5) == 5
    assert store.add("count", -2) == 3
    assert store.add("count", 0) == 3


class LosingAnswers(Coordinators):
    """Coordinators whose first answer to each call is lost: the call is repeated."""

    def call(self, method_of: Any, request: Any, **limits: Any) -> Any:
        super().call(method_of, request, **limits)
        return super().call(method_of, request, **limits)


def test_a_repeated_call_counts_once(cluster: LocalCluster, membership: MemberSession) -> None:
    """An addition, a value that is appended, and a barrier of two."""
    with closing(LosingAnswers([cluster.coordinator])) as coordinators:
        store = RendezvousStore(coordinators, membership.token, timeout_s=10)
        key = uuid.uuid4().hex
        assert [store.add(key, 1), store.add(key, 1)] == [1, 2]
        store.append(f"{key}/text", "a")
        store.append(f"{key}/text", "a")
        assert store.get(f"{key}/text") == b"aa"
        with ThreadPoolExecutor() as pool:
            met = [pool.submit(store.barrier, f"{key}/barrier", 2) for _ in range(2)]
            for each in met:
                each.result(unhurried(10.0))


def test_compare_set_sets_only_what_was_expected(store: Any) -> None:
    """An absent key is set if the expected value is empty."""
    assert store.compare_set("key", "", "one") == b"one"
    assert store.compare_set("key", "other", "two") == b"one"
    assert store.compare_set("key", "one", "two") == b"two"
    assert store.get("key") == b"two"


def test_keys_are_checked_counted_and_deleted(store: Any) -> None:
    """A deleted key is gone."""
    assert not store.check(["a"])
    before = store.num_keys()
    store.set("a", "1")
    assert store.num_keys() == before + 1
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_several_keys_go_in_one_call(real: RendezvousStore) -> None:
    """Values come in the requested order. `append` adds to the value; `delete_key` says if the key
    existed."""
    store = dist.PrefixStore("several", real)
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    store.append("a", "23")
    assert store.get("a") == b"123"
    assert real.delete_key("several/a")
    assert not real.delete_key("several/a")


def test_many_values_that_are_alike_come_as_they_were_set(real: RendezvousStore) -> None:
    """Values are sent compressed, and no old ones are returned once one of them has changed."""
    store = dist.PrefixStore("alike", real)
    values = {f"{rank}": bytes(2000) + rank.to_bytes(8) for rank in range(64)}
    store.multi_set(list(values), list(values.values()))
    assert store.multi_get(list(values)) == list(values.values())
    values["7"] = b"another"
    store.set("7", "another")
    assert store.multi_get(list(values)) == list(values.values())


def test_a_waiting_member_goes_on_when_the_key_is_set(store: Any, real: RendezvousStore) -> None:
    """The key comes from another thread, as from another member."""
    setter = threading.Timer(0.1, lambda: store.set("late", "here"))
    setter.start()
    store.wait(["late"], timedelta(seconds=10))
    assert store.get("late") == b"here"
    setter.join()


def test_a_wait_for_a_missing_key_times_out_with_its_name(real: RendezvousStore) -> None:
    """torch's own callers look for the word "timeout"."""
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"timeout after 0\.2 s for never"):
        real.wait(["never"], timedelta(seconds=0.2))
    assert time.monotonic() - started_s < unhurried(2.0)


def test_a_wait_of_several_calls_names_its_whole_limit(
    real: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator limits each call; the error shows the limit that the caller gave."""
    monkeypatch.setattr(rendezvous_store, "CALL_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"wait timeout after 0\.5 s for never"):
        real.wait(["never"], timedelta(seconds=0.5))


def test_an_abort_ends_waits_and_refuses_later_calls(
    membership: MemberSession, cluster: LocalCluster
) -> None:
    """The wait ends at once, by another thread."""
    store = RendezvousStore(membership.coordinators, membership.token, timeout_s=60)
    aborter = threading.Timer(0.1, lambda: store.abort("test"))
    aborter.start()
    started_s = time.monotonic()
    with pytest.raises(GenerationBroken, match="test"):
        store.get("never")
    assert time.monotonic() - started_s < unhurried(5.0)
    with pytest.raises(GenerationBroken):
        store.set("key", "value")
    aborter.join()


def test_only_members_of_the_generation_may_use_the_store(membership: MemberSession) -> None:
    """Another incarnation is refused, and so is another generation."""
    own = membership.token
    strangers = [
        Token(job=own.job, generation=own.generation, member_id=own.member_id, incarnation="x"),
        Token(job=own.job, generation=99, member_id=own.member_id, incarnation=own.incarnation),
    ]
    for token in strangers:
        store = RendezvousStore(membership.coordinators, token, timeout_s=5)
        with pytest.raises(RejoinError) as refused:
            store.set("key", "stolen")
        assert isinstance(refused.value, Fenced | GenerationBroken)


def test_values_that_all_ranks_read_are_requested_once_per_host(
    membership: MemberSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of few values is requested by each rank itself, and so is any group by a rank without
    a shared directory."""
    calls: list[int] = []
    call = membership.coordinators.call

    def noted(method: Any, request: Any, **options: Any) -> Any:
        if isinstance(request, StoreGetRequest):
            calls.append(len(request.keys))
        return call(method, request, **options)

    monkeypatch.setattr(membership.coordinators, "call", noted)

    def store(directory: Path | None) -> RendezvousStore:
        return RendezvousStore(
            membership.coordinators, membership.token, timeout_s=10, shared_directory=directory
        )

    ranks = [store(tmp_path) for _ in range(4)]
    keys = [f"all/{rank}" for rank in range(100)]
    values = [bytes([rank]) * 200 for rank in range(100)]
    ranks[0].multi_set(keys, values)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda rank: rank.multi_get(keys), ranks)) == [values] * 4
    assert calls == [100]
    assert store(None).multi_get(keys) == values
    assert ranks[1].multi_get(keys[:10]) == values[:10]
    assert calls == [100, 100, 10]
