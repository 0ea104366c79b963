"""Gloo groups that can be cut at any moment, with real processes, signals and sockets."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.collectives import stuck_bodies
from support.processes.load import unhurried
from support.processes.ranks import Ranks
from support.training import rank_bodies

from shoal.backends.abortable.waiter import AbortableWaiter, OngoingCollective
from shoal.backends.network.gloo import GlooBackend
from shoal.backends.process_group.interface import Seat


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.long), "kill"])
def test_a_collective_that_waits_for_a_lost_peer_raises_as_soon_as_it_is_cut(
    tmp_path: Path, how: str
) -> None:
    """The error comes within seconds, not at Gloo's timeout of 60 s. Connections outside the group
    keep working."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.stuck_collective, path, r, 3, how) for r in range(3)]
        for survivor in crew[:2]:
            assert survivor.expect("cut")["seconds"] < unhurried(2.0)
            assert survivor.expect("bystander")["received"] == b"still here"
            assert survivor.join() == 0


@pytest.mark.parametrize("dead", [0, 1])
def test_a_bring_up_that_waits_for_a_dead_peer_ends_as_soon_as_it_is_cut(
    tmp_path: Path, dead: int
) -> None:
    """The rank that died is once the one that would connect, and once the one that would accept the
    connection."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.stuck_bring_up, path, r, dead, str(gate)) for r in range(2)]
        assert crew[dead].join() == -signal.SIGKILL
        gate.write_bytes(b"")
        crew[1 - dead].expect("over", timeout_s=unhurried(10.0))
        assert crew[1 - dead].join() == 0


@pytest.mark.long
def test_fifty_generations_in_one_process_neither_freeze_it_nor_leak(tmp_path: Path) -> None:
    """Half of the generations end in the middle of a step. A freeze would last until Gloo's
    timeout, 60 s."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.many_generations, path, r, 3, 50) for r in range(3)]
        for rank in crew:
            done = rank.expect("done")
            assert done["descriptors"] < 10  # one group has as many
            assert done["longest_pause_s"] < 10
            assert rank.join() == 0


def test_a_collective_that_times_out_is_distinguished_from_an_error_of_the_user(
    tmp_path: Path,
) -> None:
    """Gloo's errors have no class of their own; a plain RuntimeError is the user's."""
    assert not GlooBackend().is_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.timed_out_collective, path, rank) for rank in range(2)]
        # Then it stops: a failure of its own would look like the time limit to rank 0.
        crew[1].expect("going")
        for _ in range(2):
            failed = crew[0].expect("failed")
            assert failed["recognised"], failed["text"]
        assert crew[0].join() == 0


def test_a_wait_that_is_aborted_counts_as_a_failure_of_the_group() -> None:
    """The class of the error decides, not its text: for collectives from before the abort and from
    after it."""
    waiter = AbortableWaiter(for_good=True)
    amid = OngoingCollective(dist.Work(), waiter.new_completion())
    waiter.abort("generation 1 is over")
    after = OngoingCollective(dist.Work(), waiter.new_completion())
    for ongoing in (amid, after):
        with pytest.raises(RuntimeError, match="generation 1 is over") as caught:
            ongoing.wait()
        assert GlooBackend().is_failure(caught.value)


def test_a_bring_up_waits_for_the_addresses_of_all_ranks_in_one_call(tmp_path: Path) -> None:
    """A wait for each address would make the store's calls of a generation grow with the square of
    its ranks."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.counted_bring_up, path, r, 4) for r in range(4)]
        for rank in crew:
            up = rank.expect("up")
            assert up["num_waits"] == 1
            assert up["total"] == 4
        assert [rank.join() for rank in crew] == [0] * 4


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (rank_bodies.stuck_for_good, ()),
        (rank_bodies.stuck_message, ("send",)),
        (rank_bodies.stuck_message, ("receive",)),
        *((stuck_bodies.stuck_in, (what,)) for what in stuck_bodies.WAITS),
    ],
    ids=["collective", "send", "receive", *stuck_bodies.WAITS],
)
def test_a_trainer_and_its_process_end_though_an_operation_never_does(
    tmp_path: Path, body: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    """The operation that never ends is a collective, or a message such as one between pipeline
    stages: in a step of each kind of layout, or in the bring-up before it. Another thread waits for
    the operation, for a minute. Neither the trainer nor the exit of the process waits for that
    thread."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(body, path, r, *arguments) for r in range(2)]
        crew[1].expect("going")
        assert crew[0].expect("freed", timeout_s=30)["recognised"]
        crew[0].expect("retired", timeout_s=30)
        assert crew[0].join(timeout_s=30) == 0


class FailsAtTheEnd(dist.HashStore):
    """A store whose `add` fails: torch calls it once it has made the group."""

    reason = ""

    def add(self, key: str, value: int) -> int:
        if self.reason:
            raise ConnectionError("the store is away")
        return super().add(key, value)

    def abort(self, reason: str) -> None:
        self.reason = reason


def test_a_bring_up_that_fails_leaves_nothing_of_torch_in_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's hook for uncaught errors is removed too, which torch sets before it reads the store
    for the last time."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    store = FailsAtTheEnd()
    store.reason = "away"
    seat = Seat(
        generation=1, rank=0, world_size=1, address="127.0.0.1", bring_up_s=60, collective_s=60
    )
    hook = sys.excepthook
    group = GlooBackend().group(seat, store)
    try:
        with pytest.raises(ConnectionError, match="the store is away"):
            group.open()
        assert sys.excepthook is hook
    finally:
        sys.excepthook = hook
        group.retire()
    assert not dist.is_initialized()


class WithoutPeers(dist.HashStore):
    """A store to which no other rank writes: each wait fails at once, and is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[timedelta | None] = []

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.limits.append(timeout)
        raise ConnectionError("no peer")

    def abort(self, reason: str) -> None:
        pass


def test_a_bring_up_waits_for_its_own_limit_and_not_for_that_of_a_collective() -> None:
    store = WithoutPeers()
    seat = Seat(
        generation=1, rank=0, world_size=2, address="127.0.0.1", bring_up_s=60, collective_s=5
    )
    group = GlooBackend().group(seat, store)
    with pytest.raises(ConnectionError, match="no peer"):
        group.open()
    group.retire()
    assert store.limits == [timedelta(seconds=60)]
