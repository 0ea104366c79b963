"""Lifelines: the death of a process is noticed at once, with its exit code."""

import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal_client.liveness.beat_board import BeatBoard, BeatSlot
from shoal_client.liveness.lifeline import ExitWatch, Lifeline, exit_code_of

DEADLINE_S = 30.0
HOLD = """
import os, sys
from shoal_client.liveness.beat_board import BeatSlot
slot = BeatSlot.open(sys.argv[1])
assert slot.lifeline.hold()
print("holds", flush=True)
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def board() -> Iterator[BeatBoard]:
    with BeatBoard(2) as board:
        yield board


@pytest.fixture
def start(board: BeatBoard) -> Iterator[Start]:
    """Return a function that starts a process which holds the first slot's lifeline and runs
    code."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD + code, board.address(0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def watched(board: BeatBoard, pid: int) -> tuple[ExitWatch, "queue.SimpleQueue[int]"]:
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    return ExitWatch(board.slots[0].lifeline, pid, codes.put), codes


@pytest.mark.parametrize(
    ("code", "expected"),
    [("os.kill(os.getpid(), 9)", -9), ("sys.exit(3)", 3), ("os.abort()", -signal.SIGABRT)],
)
def test_an_exit_is_reported_with_its_code(
    board: BeatBoard, start: Start, code: str, expected: int
) -> None:
    """The watch reports an exit with its code before any process has waited for the process that
    exited."""
    process = start(f"sys.stdin.readline(); {code}")
    watch, codes = watched(board, process.pid)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert codes.get(timeout=DEADLINE_S) == expected
    assert process.wait(DEADLINE_S) == expected
    watch.close()


def test_a_kill_is_noticed_before_the_memory_is_freed(board: BeatBoard, start: Start) -> None:
    """The process has a gigabyte, which the kernel takes time to free."""
    process = start("held = bytearray(b'1') * (1 << 30); print('full', flush=True); input()")
    assert process.stdout is not None
    assert process.stdout.readline() == "full\n"
    held = threading.Event()
    seen: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def on_exit(code: int) -> None:
        gone = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        seen.put((code, gone is not None))

    lifeline = board.slots[0].lifeline
    threading.Thread(
        target=lambda: (
            held.set(),
            lifeline.await_exit(process.pid) and on_exit(exit_code_of(process.pid) or 0),
        ),
        daemon=True,
    ).start()
    held.wait(DEADLINE_S)
    process.kill()
    assert seen.get(timeout=DEADLINE_S) == (-9, False)


def test_a_released_lifeline_is_no_exit(board: BeatBoard, start: Start) -> None:
    """A worker that leaves its job releases it. Its later exit is not reported by the watch."""
    leave = "slot.withdraw(); print('released', flush=True)"
    process = start(f"{leave}; sys.stdin.readline(); sys.exit(4)")
    watch, codes = watched(board, process.pid)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "released\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(DEADLINE_S) == 4
    watch.close()
    assert codes.empty()


def test_an_exec_is_no_exit(board: BeatBoard, start: Start) -> None:
    """The kernel releases the lock at an exec; the new program may hold the lifeline again."""
    again = "import sys; exec(sys.argv[2]); sys.stdin.readline(); sys.exit(5)"
    process = start(
        f"os.execv(sys.executable, [sys.executable, '-c', {again!r}, sys.argv[1], {HOLD!r}])"
    )
    watch, codes = watched(board, process.pid)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert codes.get(timeout=DEADLINE_S) == 5
    watch.close()


def test_a_slot_can_be_used_by_one_process_after_another(board: BeatBoard, start: Start) -> None:
    for _ in range(3):
        process = start("input()")
        watch, codes = watched(board, process.pid)
        process.kill()
        assert codes.get(timeout=DEADLINE_S) == -9
        process.wait()
        watch.close()
        board.slots[0].clear()


def test_only_the_main_thread_can_hold_a_lifeline(board: BeatBoard) -> None:
    """Another thread may end before its process does."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    slot = BeatSlot.open(board.address(1))
    thread = threading.Thread(target=lambda: answers.put(slot.lifeline.hold()))
    thread.start()
    thread.join()
    assert answers.get() is False


def test_a_lifeline_has_at_most_one_holder(board: BeatBoard, start: Start) -> None:
    start("input()")
    assert not BeatSlot.open(board.address(0)).lifeline.hold()


def test_a_living_or_unknown_process_has_no_exit_code() -> None:
    assert exit_code_of(os.getpid()) is None
    assert exit_code_of(2**22 + 1) is None


def test_a_lifeline_works_at_any_offset_of_shared_memory(tmp_path: Path) -> None:
    """A lifeline that is held through one mapping of a file cannot be held through another one, as
    of another process, until it is released."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        first, second = (mmap.mmap(file.fileno(), 0) for _ in range(2))
    launcher, worker = Lifeline(first, 952), Lifeline(second, 952)
    launcher.prepare()
    assert worker.hold()
    assert not launcher.hold()
    worker.release()
    assert launcher.hold()
    launcher.release()


def test_another_holder_is_reported_while_it_lives(board: BeatBoard, start: Start) -> None:
    mine = BeatSlot.open(board.address(0)).lifeline
    assert not mine.other_holder
    process = start("sys.stdin.readline()")
    assert not mine.hold()
    assert mine.other_holder == process.pid
    process.kill()
    process.wait()
    assert not mine.other_holder
    assert mine.hold()
    assert not mine.other_holder
    mine.release()
