"""The rendezvous store holds so many bytes, keys counted too, and nothing of who waited in vain."""

import asyncio

import pytest

from shoal_proto.errors import InvalidSpec, Overloaded
from shoal_server.coordinator import rendezvous
from shoal_server.coordinator.rendezvous import KeySpace
from shoal_server.serving.admission.config import JobLimits


def test_keys_count_as_values_do() -> None:
    """Of a million keys of 4 KiB without a value, 3 GB were held."""
    space = KeySpace(limits=JobLimits(rendezvous_bytes=100_000))
    with pytest.raises(Overloaded, match="is full"):
        for number in range(1000):
            space.set(f"{number:04}" + "k" * 4000, b"")
    assert len(space.values) < 25
    for key in list(space.values):
        assert space.delete(key)
    assert space.num_bytes == 0
    space.set("a", b"x" * 50_000)
    space.set("a", b"x" * 60_000)  # in its place, not beside it


def test_so_many_keys_and_no_more() -> None:
    """One that is there may change; the bound is told with its setting."""
    space = KeySpace(limits=JobLimits(rendezvous_keys=3))
    for key in "abc":
        space.set(key, b"1")
    space.set("a", b"2")
    with pytest.raises(Overloaded, match="--rendezvous-keys"):
        space.set("d", b"")
    assert space.delete("b")
    space.set("d", b"")


async def test_who_waits_in_vain_leaves_nothing() -> None:
    space = KeySpace()
    for number in range(100):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await space.wait_for((f"never {number}",))
    assert (space._waiting_calls, space._wanted_with) == ({}, {})


@pytest.mark.parametrize("value", [b"seven", b"", b"9" * 5000, b"\xff"])
def test_what_is_no_counter_is_not_counted(value: bytes) -> None:
    with pytest.raises(InvalidSpec, match="is not a counter"):
        rendezvous._counter("key", value)
    assert rendezvous._counter("key", b"-7") == -7
