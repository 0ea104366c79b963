"""A worker is one member: its second process that joins is refused by name."""

import os
import subprocess
import sys

import pytest

from shoal.membership.join_config import read_config
from shoal_client.liveness.beat_board import BeatBoard
from shoal_proto.errors import InvalidSpec

JOIN = """
import os
from shoal.membership.join_config import read_config
read_config({"job": "j", "coordinator": "127.0.0.1:1"}, os.environ).member()
print("joins", flush=True)
input()
"""


@pytest.mark.long
def test_a_process_that_a_worker_spawns_cannot_join_as_the_same_member() -> None:
    """Regression: with torch.multiprocessing.spawn left in a script, all processes that it starts
    were the same member, and replaced each other until the job was done."""
    with BeatBoard(1) as board:
        environment = {"SHOAL_BEATS": board.address(0), "SHOAL_MEMBER_ID": "w0"}
        first = subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert first.stdout is not None
        assert first.stdout.readline() == "joins\n"
        config = read_config({"job": "j", "coordinator": "127.0.0.1:1"}, environment)
        with pytest.raises(InvalidSpec, match=rf"process {first.pid}, .*multiprocessing.spawn"):
            config.member()
        first.communicate("\n")
        slot = config.member().beat_slot
        assert slot is not None
        config.member()  # a second session of the same process
        slot.lifeline.release()
