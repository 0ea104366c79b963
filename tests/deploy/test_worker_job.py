"""The Job of workers that end when their training does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_client.cli import installed_commands, read_config
from shoal_proto.names import is_name

FILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "worker-job.yaml"
DRAINED = 143


@pytest.fixture
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_it_is_valid() -> None:
    """By Kubernetes' own schemas: no unknown field."""
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", FILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_ends_with_the_training(job: dict[str, Any]) -> None:
    """A pod that completed is not started again; a drain and an eviction count as no failure."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"], "else scaling is refused"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    rules = spec["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule] == [[DRAINED]]
    assert spec["podReplacementPolicy"] == "Failed", "the one that goes with a failure policy"


def test_its_command_parses(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds fit the number of pods, each of which is a member by its index."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    monkeypatch.setenv("SHOAL_COORDINATOR", variables["SHOAL_COORDINATOR"]["value"])
    program, *arguments = container["command"]
    assert program == "shoal"
    run = read_config(arguments, installed_commands())
    assert run.min_members <= run.desired_members == job["spec"]["parallelism"] <= run.max_members
    assert run.job == job["metadata"]["name"]
    assert run.restart.grace_s < job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    path = variables["SHOAL_MEMBER_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "job-completion-index" in path
    assert is_name("0")
