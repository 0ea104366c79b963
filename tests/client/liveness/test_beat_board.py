"""The heartbeat board: memory that a launcher shares with its workers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_client.liveness.beat_board import BeatBoard, BeatSlot
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.identity_pb2 import Token

TOKEN = Token(job="j" * 128, member_id="m" * 128, incarnation="first")
FOR_EVER_S = 1e6


@pytest.fixture
def board() -> Iterator[BeatBoard]:
    with BeatBoard(3) as board:
        yield board


def test_a_claim_is_read_in_its_slot(board: BeatBoard) -> None:
    """Token, heartbeat and steps are in the slot with that number, and in no other."""
    worker = BeatSlot.open(board.address(1))
    assert board.slots[1].claimed(os.getpid()) is None
    worker.claim(TOKEN, heartbeat_s=0.25, patience_s=FOR_EVER_S)
    worker.progress(41)
    claim = board.slots[1].claimed(os.getpid())
    assert claim is not None
    assert (claim.token, claim.heartbeat_s, claim.step) == (TOKEN, 0.25, 41)
    assert board.slots[0].claimed(os.getpid()) is None
    worker.withdraw()
    assert board.slots[1].claimed(os.getpid()) is None


def test_another_process_has_no_claim_in_the_slot(board: BeatBoard) -> None:
    """A child process of the worker can find the slot, but its claim does not count."""
    code = (
        "import sys; from shoal_client.liveness.beat_board import BeatSlot, Token;"
        "BeatSlot.open(sys.argv[1]).claim("
        "Token(job='j', member_id='m', incarnation='c'), heartbeat_s=1.0, patience_s=1e6)"
    )
    subprocess.run([sys.executable, "-c", code, board.address(0)], check=True, timeout=60)
    assert board.slots[0].claimed(os.getpid()) is None


def test_a_claim_of_a_worker_that_hangs_expires(board: BeatBoard) -> None:
    """A claim expires once none of the worker's threads has run for the time in the claim."""
    worker = BeatSlot.open(board.address(0))
    worker.claim(TOKEN, heartbeat_s=0.25, patience_s=0.0)
    assert board.slots[0].claimed(os.getpid()) is None
    worker.claim(TOKEN, heartbeat_s=0.25, patience_s=FOR_EVER_S)
    assert board.slots[0].claimed(os.getpid()) is not None


def test_an_accepted_heartbeat_counts_only_for_its_claim(board: BeatBoard) -> None:
    """A heartbeat accepted for an earlier incarnation does not count for the next one in its
    slot."""
    worker, launcher = BeatSlot.open(board.address(0)), board.slots[0]
    worker.claim(TOKEN, heartbeat_s=0.25, patience_s=FOR_EVER_S)
    first = launcher.claimed(os.getpid())
    assert first is not None
    assert not worker.has_recent_beat(within_s=1e-9)
    launcher.record_accepted_heartbeat(first)
    assert worker.has_recent_beat(within_s=FOR_EVER_S)
    worker.claim(
        Token(job="j", member_id="m", incarnation="second"), heartbeat_s=0.25, patience_s=FOR_EVER_S
    )
    launcher.record_accepted_heartbeat(first)
    assert not worker.has_recent_beat(within_s=1.0)


@pytest.mark.parametrize("made", ["nowhere", "file", "number", "text"])
def test_an_address_that_is_no_slot_is_refused_and_not_written(
    board: BeatBoard, tmp_path: Path, made: str
) -> None:
    """An address of another host may name a different file on this one."""
    path = tmp_path / "precious"
    path.write_bytes(bytes(8192))
    addresses = {
        "nowhere": f"/proc/{os.getpid()}/fd/999999:0",
        "file": f"{path}:0",
        "number": board.address(3),
        "text": "precious",
    }
    with pytest.raises((InvalidSpec, OSError)):
        BeatSlot.open(addresses[made])
    assert path.read_bytes() == bytes(8192)
