"""A process of a script with fixed ranks ends with the script's own exit code, however the script
ends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "collectives" / "fixed_ranks_ending.py"
CODES = {"line": 0, "destroy": 0, "error": 1, "exit": 3}


def ended(strategy: str, end: str, flag: Path) -> list[tuple[int, str]]:
    """Return exit code and output of both ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), strategy, str(flag), end],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "end"),
    [
        *(("zero1", end) for end in CODES),
        *((strategy, "destroy") for strategy in ("ddp", "fsdp", "tensor", "pipeline")),
    ],
)
def test_no_thread_of_gloo_outlives_the_interpreter(
    tmp_path: Path, strategy: str, end: str
) -> None:
    """A thread that frees a tensor meanwhile would end the process by SIGABRT."""
    first, second = ended(strategy, end, tmp_path / "flag")
    assert "freed by gloo" in first[1], first[1]
    for code, output in (first, second):
        assert code == CODES[end], output
        assert output.splitlines()[-1] == "left 0", output
