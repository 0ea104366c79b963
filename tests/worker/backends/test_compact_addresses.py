"""Addresses of Gloo's ranks, compacted: as short for thousands of ranks as for a few."""

import threading
import tracemalloc
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.network.compact_addresses import MAX_WORDS, compact, expand, without_runs
from shoal.backends.network.stores import AddressStore
from shoal.torch_private.c10d import ProcessGroupGloo, Store, gloo_options
from shoal_proto.errors import MalformedMessage

HEAD = bytes(range(154))


def address(world_size: int, rank: int, first: int = 7) -> bytes:
    """Return an address as Gloo writes it: the listener, then the number of each pair; -1 for the
    rank itself."""
    numbers = np.arange(first, first + world_size)
    numbers[rank:] -= 1
    numbers[rank] = -1
    return HEAD + numbers.astype("<i8").tobytes()


@pytest.mark.long
@given(st.binary(max_size=200))
def test_every_value_is_the_same_after_compacting_and_expanding(value: bytes) -> None:
    compacted = compact(value)
    assert expand(compacted) == value
    assert len(compacted) <= len(value) + 1


@pytest.mark.long
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.binary(max_size=7), st.integers(1, 300))
def test_runs_of_numbers_are_the_same_after_compacting_and_expanding(
    numbers: list[int], rest: bytes, times: int
) -> None:
    value = rest + np.repeat(np.array(numbers, dtype="<i8"), times).tobytes()
    assert expand(compact(value)) == value


@pytest.mark.parametrize("world_size", [100, 10_000])
@pytest.mark.parametrize("rank", [0, 41, 99])
def test_a_compacted_address_takes_less_than_400_bytes(world_size: int, rank: int) -> None:
    value = address(world_size, rank)
    assert expand(compact(value)) == value
    assert len(compact(value)) < 400


@given(st.binary(max_size=250), st.binary(min_size=16, max_size=16), st.integers(0, 3000))
def test_a_listeners_address_is_found_beside_the_numbers_of_pairs(
    before: bytes, listener: bytes, pairs: int
) -> None:
    numbers = np.arange(pairs, dtype="<i8").tobytes()
    for value in (before + listener + numbers, numbers + listener + numbers + before):
        assert listener in without_runs(value)
    assert len(without_runs(before + listener + numbers)) < 1000


def test_a_store_does_not_keep_the_numbers_of_ten_thousand_peers() -> None:
    store = AddressStore(seen := Seen(), 0, 10_000)
    store.set("group/0", address(10_000, 0))
    tracemalloc.start()
    for rank in range(50):
        seen.set(f"group/{rank}", compact(address(10_000, rank)))
        assert store.get(f"group/{rank}") == address(10_000, rank)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store.announced(HEAD[-20:])
    assert kept < 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        b"\2abc",
        b"\1\x08" + bytes(8),
        b"\1\x03ab",
        b"\1\0" + bytes(11),
        b"\1\0" + np.array([(1, MAX_WORDS), (1, 1)], dtype="<i8,<u4").tobytes(),
    ],
)
def test_malformed_addresses_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="address"):
        expand(data)


class Seen(Store):
    """A store that records what ranks have set."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = bytes(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), timedelta(seconds=60))

    def has_extended_api(self) -> bool:
        return False


def test_gloo_connects_by_compacted_addresses() -> None:
    """Five ranks in threads connect; the store contains only their announced addresses."""
    seen, sums, alive = Seen(), [], []

    def rank_of(rank: int) -> None:
        store = AddressStore(seen, rank, 5)
        options = gloo_options("127.0.0.1", timeout_s=60.0)
        group = ProcessGroupGloo(store, rank, 5, options)
        value = torch.tensor([float(rank)])
        group.allreduce([value]).wait()
        sums.append(float(value))
        alive.append((group, store))

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [10.0] * 5
    announced = [expand(value) for value in seen.values.values()]
    assert all(store.announced(b"\x7f\0\0\1") for _, store in alive)
    assert len(announced) == 5
    assert {len(value) for value in announced} == {len(announced[0])}
