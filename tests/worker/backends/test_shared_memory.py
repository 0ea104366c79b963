"""Ranks of one machine meet in shared memory, and learn when one of them is gone."""

import ctypes
import functools
import mmap
import multiprocessing
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.collectives import shared_memory_bodies
from support.collectives.shared_memory_bodies import exchange_values
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.backends.shared_memory import opening
from shoal.backends.shared_memory.regions import MemoryRegion
from shoal.backends.shared_memory.semaphores import SEMAPHORE_BYTES, Semaphore


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_values_written_before_a_barrier_are_read_after_it(world_size: int) -> None:
    """Many barriers, for world sizes that are powers of two and others."""
    sizes = run_on_gloo(world_size, shared_memory_bodies.run_barriers, 500)
    assert len(sizes) == world_size
    assert min(sizes) >= 4096


@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_reach_all_ranks_through_shared_memory(world_size: int) -> None:
    """Messages of a round that some rank did not receive are never received as those of the next
    round."""
    ended = run_on_gloo(world_size, functools.partial(exchange_values, shares=True), 200)
    assert all("ranks no longer share memory" in each for each in ended)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_that_all_ranks_have_sent_are_received_though_the_barrier_is_cut(
    world_size: int,
) -> None:
    """A rank that received the messages may have committed a step because of them and left: the
    others see that as a cut. If one rank has not sent its message, no rank receives the messages.
    """
    body = shared_memory_bodies.receive_after_a_cut
    for received, then in run_on_gloo(world_size, functools.partial(body, all_send=True)):
        assert received == [[10 + rank] for rank in range(world_size)]
        assert "ranks no longer share memory" in then
    *others, last = run_on_gloo(world_size, functools.partial(body, all_send=False))
    assert all("ranks no longer share memory" in received for received, _ in others)
    assert last[0] == "nothing sent"


def test_messages_reach_all_ranks_over_their_group() -> None:
    ended = run_on_gloo(3, functools.partial(exchange_values, shares=False), 5)
    assert ended == [""] * 3


def test_all_ranks_avoid_shared_memory_for_messages_that_are_too_long() -> None:
    assert run_on_gloo(3, shared_memory_bodies.gathered, 4000) == [[True] * 3] * 3
    assert run_on_gloo(3, shared_memory_bodies.gathered, 5000) == [[True, True, False]] * 3


@pytest.mark.sampled()
@pytest.mark.parametrize("how", ["kill", "kill rank 0", "cut"])
def test_ranks_that_wait_learn_at_once_of_a_lost_rank(tmp_path: Path, how: str) -> None:
    """The limit is an hour away. Rank 0 passes a loss on; the end of rank 0 is seen by all."""
    with Ranks() as ranks:
        body, path = shared_memory_bodies.meet_until_a_rank_is_missing, str(tmp_path / "store")
        crew = [ranks.start(body, path, rank, 4, how) for rank in range(4)]
        lost = {"kill": [1], "kill rank 0": [0], "cut": []}[how]
        for rank in set(range(4)) - set(lost):
            assert "ranks no longer share memory" in crew[rank].expect("failed")["text"]


def test_a_rank_that_stops_is_waited_for_up_to_the_limit(tmp_path: Path) -> None:
    with Ranks() as ranks:
        body, path = shared_memory_bodies.meet_until_a_rank_is_missing, str(tmp_path / "store")
        crew = [ranks.start(body, path, rank, 3, "stop") for rank in range(3)]
        texts = [crew[rank].expect("failed")["text"] for rank in (0, 2)]
    assert any("expected within 0.5 s" in text for text in texts)


def test_a_rank_that_leaves_in_good_order_is_no_loss() -> None:
    assert run_on_gloo(3, shared_memory_bodies.leave_early) == ["this rank has left", "", ""]


def test_a_process_that_a_rank_forks_is_no_rank() -> None:
    """Memory that the child releases, when it ends or earlier, stays with the rank."""
    assert run_on_gloo(3, shared_memory_bodies.meet_after_a_fork) == [""] * 3


def test_if_one_rank_cannot_share_memory_none_does() -> None:
    assert run_on_gloo(3, shared_memory_bodies.is_shared) == [True] * 3
    assert run_on_gloo(3, shared_memory_bodies.is_shared, 2) == [False] * 3
    assert run_on_gloo(3, shared_memory_bodies.is_shared, 0) == [False] * 3


def test_ranks_go_on_without_shared_memory_if_the_system_gives_none() -> None:
    """Ranks do not wait for a rank 0 that has no memory to share."""
    began_s = time.monotonic()
    assert run_on_gloo(3, shared_memory_bodies.is_shared, -1, 1 << 62) == [False] * 3
    assert time.monotonic() - began_s < 60


def is_hung_up(connection: socket.socket) -> bool:
    """True if the peer has hung up, also if it left received data unread."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "greeting",
    [opening.GREETING.pack(1, bytes(32)), bytes(3), b""],
    ids=["another key", "half a greeting", "nothing"],
)
@pytest.mark.parametrize("num_strangers", [1, 3 * opening.MAX_SILENT // 2])
def test_a_stranger_gets_no_memory(
    greeting: bytes, num_strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger has found the socket's name but does not know the key. Regression: a rank that
    connected after a silent stranger waited for it, until no rank had the memory."""
    monkeypatch.setattr(opening, "OPEN_S", 30.0)
    key = bytes(range(32))
    handed: list[object] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(opening.socket_address(key))
        listener.listen()
        maker = threading.Thread(
            target=lambda: handed.append(opening.serve(listener, key, 2, MemoryRegion.create(4096)))
        )
        maker.start()
        strangers = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            for _ in range(num_strangers)
        ]
        for stranger in strangers:
            stranger.connect(opening.socket_address(key))
            if greeting:
                stranger.sendall(greeting)
        began_s = time.monotonic()
        opened = opening.receive(key, 1, None)
        maker.join()
        assert time.monotonic() - began_s < opening.OPEN_S / 2
        assert all(map(is_hung_up, strangers))
    assert opened.region.num_bytes == 4096
    assert len(handed) == 1


@pytest.mark.parametrize("agrees", [True, False])
def test_a_rank_that_has_the_memory_waits_for_the_decision_of_rank_0(
    agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may decide when this rank's own time is over: other ranks share the memory then."""
    monkeypatch.setattr(opening, "OPEN_S", 0.5)
    key, region = bytes(range(32)), MemoryRegion.create(4096)
    outcomes: list[object] = []

    def receive() -> None:
        try:
            outcomes.append(opening.receive(key, 1, None).region.num_bytes)
        except opening._Refused:
            outcomes.append("refused")
        except OSError as error:
            outcomes.append(error)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(opening.socket_address(key))
        listener.listen()
        rank = threading.Thread(target=receive)
        rank.start()
        connection, _ = listener.accept()
        with connection:
            connection.recv(opening.GREETING.size)
            message = opening._REGION.pack(region.num_bytes, region.region_id)
            socket.send_fds(connection, [message], [region.descriptor, region.descriptor])
            assert connection.recv(1) == opening._DONE
            rank.join(3 * opening.OPEN_S)
            if agrees:
                connection.sendall(opening._AGREED)
        rank.join()
    region.close()
    assert outcomes == [4096 if agrees else "refused"]


def test_a_semaphore_admits_as_many_waits_as_posts() -> None:
    """Holds for a rank that sleeps on the semaphore, and for one that polls."""
    mapped = mmap.mmap(-1, SEMAPHORE_BYTES)
    semaphore = Semaphore(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
    semaphore.initialise()
    assert not semaphore.wait(time.monotonic() - 1)
    assert not semaphore.spin_wait(time.monotonic() + 60)
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=semaphore.post)
    child.start()
    assert semaphore.wait(time.monotonic() + 60)
    child.join()
    child = fork.Process(target=semaphore.post)
    child.start()
    child.join()
    assert semaphore.spin_wait(time.monotonic() + 60)
    assert not semaphore.wait(time.monotonic() + 0.01)
