"""Bodies of ranks in the tests of copies: a module that their processes can import."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.collectives.state_bodies import SHAPES, difference, holding_of, needs_of, whole_state
from support.processes.ranks import Report
from support.training.rank_bodies import AbortableFileStore

from shoal.backends.network.gloo import GlooBackend, GlooGroup
from shoal.backends.process_group.interface import Seat
from shoal.state import transfer
from shoal.state.peer_copies import PeerCopies
from shoal.state.resharding import reshard
from shoal.state.shards import StateShard
from shoal_proto.errors import GenerationBroken

WAIT_S = 3.0
"""Time for which a rank waits for others to begin a copy."""
EVERYWHERE = "model.deep"
"""Name of a tensor that every rank holds, so that it is not copied."""


def travels(name: str) -> bool:
    return name != EVERYWHERE


def part(step: int, rank: int, size: int) -> StateShard:
    """Return a rank's rows of the state at a step."""
    return holding_of(whole_state(step), step, "rows", rank, size)


def wrong_in(held: list[StateShard], step: int, rank: int, num_copies: int, size: int) -> str:
    """Describe how the held parts of a step differ from this rank's snapshot and the copies of the
    preceding ranks; empty if they do not."""
    ours = [state_shard for state_shard in held if state_shard.step == step]
    expected = [part(step, rank, size)]
    for distance in range(1, num_copies + 1):
        theirs = part(step, (rank - distance) % size, size)
        shards = {name: shard for name, shard in theirs.shards.items() if travels(name)}
        expected.append(StateShard(step=step, shards=shards, values=theirs.values))
    if len(ours) != len(expected):
        return f"{len(ours)} holdings of step {step}"
    for got, wanted in zip(ours, expected, strict=True):
        if wrong := difference(got, wanted):
            return f"step {step}: {wrong}"
        if step and got.shards.keys() | got.elsewhere != SHAPES.keys():
            return f"step {step}: does not know {SHAPES.keys() - got.shards.keys()}"
    return ""


def _memory(held: list[StateShard]) -> set[int]:
    shards = [shard for state_shard in held for shard in state_shard.shards.values()]
    return {shard.tensor.untyped_storage().data_ptr() for shard in shards}


def offer_steps(num_copies: int) -> dict[str, Any]:
    """Offer one step after another. Returns what was wrong, and figures for the test."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transfer.MESSAGE_BYTES = 50
    copies = PeerCopies(
        dist.new_group(),
        copies=num_copies,
        every_steps=2,
        travels=travels,
        limit_s=60 if num_copies > 1 else None,
    )
    wrong, memory, sizes = [], [], []
    for step in (0, 2, 4, 6, 8):
        live = part(step, rank, size).copied()
        copies.offer(live)
        for shard in live.shards.values():
            shard.tensor.zero_()  # the next step
        copies.flush()
        held = list(copies.held())
        kept = sorted({max(step - 2, 0), step})
        wrong += [wrong_in(held, each, rank, num_copies, size) for each in kept]
        if sorted({state_shard.step for state_shard in held}) != kept:
            wrong.append(f"holds {[state_shard.step for state_shard in held]} after {step}")
        if copies.complete_step != step:
            wrong.append(f"step {copies.complete_step} is complete after {step}")
        memory.append(_memory(held))
        sizes.append(copies.num_bytes)
    copies.close()
    return {
        "wrong": [each for each in wrong if each],
        "memory is used again": memory[2] == memory[3] == memory[4],
        "bytes": sizes[2:],
        "held": sum(state_shard.num_bytes for state_shard in held),
        "due": [step for step in range(7) if copies.is_due(step)],
    }


def due_steps(copy_s: tuple[float, ...], last: int) -> list[int]:
    """Return the steps up to `last` at which copies are made if each step takes a second, and a
    copy of rank r `copy_s[r]` seconds after a wait for the others, by a clock of this test."""
    rank, size = dist.get_rank(), dist.get_world_size()
    now_s, trainer = 0.0, threading.current_thread()
    moments = itertools.cycle((0.0, 0.0, WAIT_S, WAIT_S + copy_s[rank]))

    def clock() -> float:
        return now_s + (0.0 if threading.current_thread() is trainer else next(moments))

    copies = PeerCopies(dist.new_group(), copies=1, clock=clock)
    made = []
    for step in range(last + 1):
        if copies.is_due(step):
            copies.offer(part(step, rank, size))
            copies.flush()
            made.append(step)
        now_s += 1.0
    copies.close()
    return made


def over_generations() -> dict[str, Any]:
    """Return the steps that are held over several generations."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen: dict[str, Any] = {}

    def look(label: str, copies: PeerCopies) -> None:
        seen[label] = sorted({state_shard.step for state_shard in copies.held()})

    first = PeerCopies(dist.new_group(), copies=1, every_steps=1)
    for step in (4, 5):
        first.offer(part(step, rank, size))
        first.flush()
    first.close()
    second = PeerCopies(dist.new_group(), copies=1, every_steps=1, before=first)
    look("before its first copy", second)
    second.close()
    third = PeerCopies(dist.new_group(), copies=1, every_steps=1, before=second)
    look("after one without any", third)
    third.offer(part(6, rank, size))
    third.flush()
    look("after its first copy", third)
    third.close()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    fourth = PeerCopies(alone, copies=1, every_steps=1, before=third)
    look("alone", fourth)
    seen["due alone"] = fourth.is_due(1)
    fourth.offer(part(7, 0, 1))
    look("alone and going on", fourth)
    try:
        third.offer(part(7, rank, size))
    except GenerationBroken:
        seen["offered after its end"] = "GenerationBroken"
    return seen


def interrupted_generations() -> list[list[int]]:
    """Return the steps held over five generations; all but the first end in their first copy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    real = dist.all_reduce

    def lost(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    seen = []
    copies = None
    for step in (3, 4, 5, 6, 7):
        copies = PeerCopies(dist.new_group(), copies=1, every_steps=1, before=copies)
        dist.all_reduce = real if step == 3 else lost
        copies.offer(part(step, rank, size))
        try:
            copies.flush()
        except RuntimeError as error:
            assert step > 3, error
        copies.close()
        seen.append(sorted({state_shard.step for state_shard in copies.held()}))
    dist.all_reduce = real
    return seen


def different_steps() -> str:
    """Return this rank's error if the other ranks copy another step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    copies = PeerCopies(dist.new_group(), copies=1, every_steps=1)
    copies.offer(part(5 + rank, rank, size))
    try:
        copies.flush()
    except Exception as error:  # noqa: BLE001 - reported to the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _open(path: str, rank: int, size: int, generation: int) -> GlooGroup:
    seat = Seat(
        generation=generation,
        rank=rank,
        world_size=size,
        address="127.0.0.1",
        bring_up_s=60,
        collective_s=60,
    )
    group = GlooBackend().group(seat, AbortableFileStore(f"{path}.{generation}", size))
    group.open()
    return group


def lose_a_rank(report: Report, path: str, rank: int, gate: str, stops: bool) -> None:
    """Kill or stop rank 1 of three in its second copy; the others recover from what they hold.

    They are notified as by a session, once the test opens `gate`, a named pipe: the group is cut
    and the copies are closed, as Gloo does not end every message by itself.
    """
    group = _open(path, rank, 3, 1)
    transfer.MESSAGE_BYTES = 64
    copies = PeerCopies(dist.new_group(), copies=1, every_steps=2)
    copies.offer(part(2, rank, 3))
    copies.flush()
    if rank == 1:
        _fail_after_a_chunk(report, signal.SIGSTOP if stops else signal.SIGKILL)
    copies.offer(part(4, rank, 3))

    def cut_when_open() -> None:
        Path(gate).read_bytes()
        group.cut("test")
        copies.close()

    if rank != 1:
        threading.Thread(target=cut_when_open).start()
    try:
        copies.flush()
    except GenerationBroken:
        report("failed", recognised=True)
    except RuntimeError as error:
        report("failed", recognised=GlooBackend().is_failure(error))
    copies.close()
    group.cut("test")
    group.retire()
    _recover(report, f"{path}.next", copies, {0: 0, 2: 1}[rank])


def _recover(report: Report, path: str, copies: PeerCopies, rank: int) -> None:
    """Reshard the state over the two remaining ranks in the next generation."""
    held = list(copies.held())
    before = {0: 0, 1: 2}[rank]
    known = {"own": part(4, before, 3), "copy": part(4, (before - 1) % 3, 3)}
    halves = [
        state_shard
        for state_shard in held
        if state_shard.step == 4 and all(difference(state_shard, whole) for whole in known.values())
    ]
    group = _open(path, rank, 2, 2)
    world = dist.group.WORLD
    assert world is not None
    got = reshard(world, held, needs_of("rows", rank, 2))
    report(
        "recovered",
        wrong=difference(got, part(2, rank, 2)),
        halves=len(halves),
        copies_of_4=sum(state_shard.step == 4 for state_shard in held) - 1,
    )
    dist.barrier()
    group.retire()


def _fail_after_a_chunk(report: Report, number: int) -> None:
    """Make the process fail once the first of several messages of a copy was sent."""
    real = dist.isend

    def send_once(*args: Any, **kwargs: Any) -> None:
        work = real(*args, **kwargs)
        assert work is not None
        work.wait()
        report("failing")
        os.kill(os.getpid(), number)
        threading.Event().wait()  # the kernel stops one thread after another

    dist.isend = send_once


def close_beside_a_stopped_peer(report: Report, path: str, rank: int, gate: str) -> None:
    """Stop rank 1 of two in a copy; rank 0 closes its copies while the group is not cut."""
    group = _open(path, rank, 2, 1)
    transfer.MESSAGE_BYTES = 64
    copies = PeerCopies(dist.new_group(), copies=1, every_steps=1)
    if rank == 1:
        _fail_after_a_chunk(report, signal.SIGSTOP)
        copies.offer(part(3, rank, 2))
        copies.flush()
    copies.offer(part(3, rank, 2))
    Path(gate).read_bytes()
    waiting = threading.Thread(target=_flush, args=(report, copies))
    waiting.start()
    copies.close()
    waiting.join()
    report("closed", steps=[state_shard.step for state_shard in copies.held()])
    (thread,) = (each for each in threading.enumerate() if each.name == "peer-copies")
    group.cut("test")
    thread.join(30)
    report("thread", alive=thread.is_alive())
    group.retire()


def _flush(report: Report, copies: PeerCopies) -> None:
    try:
        copies.flush()
    except GenerationBroken as error:
        report("freed", reason=str(error))
