"""The Job of workers that end when their training does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.scripts import credentials

from shoal_client.cli import installed_commands, read_config
from shoal_proto.names import is_name

FILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "worker-job.yaml"
DRAINED = 143


@pytest.fixture
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


@pytest.fixture
def job_set() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.with_name("worker-jobset.yaml").read_text())
    return loaded


def test_the_job_set_has_the_same_job(job: dict[str, Any], job_set: dict[str, Any]) -> None:
    """Schemas of JobSet are not available: only its Job is validated, and the other fields are
    compared with those of `jobset.x-k8s.io/v1alpha2` by name."""
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    fields = {"network", "failurePolicy", "successPolicy", "ttlSecondsAfterFinished"}
    assert set(job_set["spec"]) == fields | {"replicatedJobs"}
    [replicated] = job_set["spec"]["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"}
    own = {k: v for k, v in job["spec"].items() if k != "ttlSecondsAfterFinished"}
    assert replicated["template"] == {"spec": own}
    assert job_set["metadata"] == job["metadata"]


def test_the_job_has_a_workers_certificate_and_token(job: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    [secret] = [v["secret"] for v in pod["volumes"] if "secret" in v]
    assert secret["secretName"] == "shoal-worker"
    assert {item["key"] for item in secret["items"]} == set(credentials.parts()["worker"])
    [container] = pod["containers"]
    [path] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "own"]
    assert {"name": "SHOAL_TLS", "value": path} in container["env"]


def test_the_job_is_valid() -> None:
    """The schemas are Kubernetes' own, with no unknown field allowed."""
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", FILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_job_ends_with_the_training(job: dict[str, Any]) -> None:
    """A completed pod is not started again; a drain and an eviction do not count as failures."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"], "else scaling is refused"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    rules = spec["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule] == [[DRAINED]]
    assert spec["podReplacementPolicy"] == "Failed", "the one that goes with a failure policy"


def test_the_jobs_command_parses(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds fit the number of pods; a pod's index is the id of its member."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    monkeypatch.setenv("SHOAL_COORDINATOR", variables["SHOAL_COORDINATOR"]["value"])
    program, *arguments = container["command"]
    assert program == "shoal"
    run = read_config(arguments, installed_commands())
    assert run.restart.finished_ok, "a pod may be replaced once the training has ended"
    assert run.min_members <= run.desired_members == job["spec"]["parallelism"] <= run.max_members
    assert run.job == job["metadata"]["name"]
    assert run.restart.grace_s < job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    path = variables["SHOAL_MEMBER_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "job-completion-index" in path
    assert is_name("0")
