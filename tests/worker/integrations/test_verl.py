"""verl's checkpoint engine registry makes actors that publish and rollouts that read.

Runs in an environment of its own: SHOAL_VERL_PYTHON is a Python with verl and Shoal. `make
engine-test` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

PYTHON = os.environ.get("SHOAL_VERL_PYTHON", "")
PROGRAM = Path(__file__).parents[2] / "support" / "frameworks" / "verl_program.py"


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="SHOAL_VERL_PYTHON names no Python with verl")
def test_a_rollout_receives_what_the_actors_of_that_step_sent(tmp_path: Path) -> None:
    """Weights are synchronised twice by verl's calls; a rollout that starts later gets the newest
    version. A training that starts again at an earlier step sends its own weights."""
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        done = subprocess.run(
            [PYTHON, str(PROGRAM), "rl/policy"],
            env={**os.environ, "SHOAL_COORDINATOR": cluster.coordinator},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    found = [json.loads(line.partition(" ")[2]) for line in lines]
    receives = {"receives": [True]}
    assert found == [
        {"what": "topology", "actors": {}, "rollouts": receives, "wire_format": "named_tensors"},
        {"what": "synchronised", "step": 10, "version": 1, "same": True, "names": 3},
        {"what": "synchronised", "step": 20, "version": 2, "same": True, "names": 3},
        {"what": "late", "value": 20.0},
        {"what": "synchronised", "step": 10, "version": 3, "same": True, "names": 3},
        {"what": "synchronised", "step": 10, "version": 4, "same": True, "names": 3},
    ]
