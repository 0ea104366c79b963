"""The pods of the Kubernetes manifests, run as plain containers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.kustomization import find, render
from deploy.pods import ask, log, make_secrets, passes, started, wait_until_ready
from deploy.stack import IMAGES, Stack, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def images() -> Iterator[str]:
    stack = Stack(images="shoal-pods-test")
    stack.compose("build", timeout_s=1200)
    yield stack.images
    run("docker", "image", "rm", *(f"{stack.images}/{name}:dev" for name in IMAGES))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    # Processes of Docker must be able to enter the folder.
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    make_secrets(render(KUBERNETES / "base"), folder)
    return folder


def test_etcd_serves_on_without_one_of_three_members(images: str, secrets: Path) -> None:
    """Three pods find each other by their names; if one is stopped, the other two stay ready. The
    last one by itself is alive, and not ready."""
    with started(render(KUBERNETES / "base"), {"etcd"}, images, secrets) as pods:
        wait_until_ready(pods, 60)
        run("docker", "stop", pods["etcd-1"].docker_name)
        assert passes(pods["etcd-0"], "livenessProbe")
        rest = {name: pod for name, pod in pods.items() if name != "etcd-1"}
        wait_until_ready(rest, 30)
        run("docker", "stop", pods["etcd-2"].docker_name)
        assert not passes(pods["etcd-0"], "readinessProbe"), "one of three is not a quorum"
        assert passes(pods["etcd-0"], "livenessProbe"), "and no reason to restart it"


def test_every_role_becomes_ready_and_a_worker_drains(images: str, secrets: Path) -> None:
    """Pods started all at once pass their probes in any order, and the job trains.

    A worker that gets SIGTERM leaves the job in order, within half its grace period.
    """
    resources = render(KUBERNETES / "overlays/dev")
    worker = find(resources, kinds={"Deployment"}, name="worker")["spec"]["template"]["spec"]
    [container] = worker["containers"]
    container["args"].append("--epochs=1000")  # still trains during the checks
    with started(resources, {"etcd", "coordinator", "ps", "worker"}, images, secrets) as pods:
        wait_until_ready(pods, 180)
        url = "/api/v1/jobs/digits"
        job = ask(pods["worker-0"], url)
        assert {m["member"]["member_id"] for m in job["members"]} == {"worker-0", "worker-1"}

        began_s = time.monotonic()
        run("docker", "stop", "--time", "60", pods["worker-1"].docker_name)
        took_s = time.monotonic() - began_s
        assert took_s < worker["terminationGracePeriodSeconds"] / 2, log(pods["worker-1"])
        ended = run(
            "docker", "inspect", "--format={{.State.ExitCode}}", pods["worker-1"].docker_name
        )
        assert ended.strip() == "143", "it drained, and was not killed"
        events = ask(pods["worker-0"], f"{url}/events")["events"]
        last = [event for event in events if event["member_id"] == "worker-1"][-1]
        assert any(word in last["reason"] for word in ("left", "drained")), "it was not lost"
        assert passes(pods["worker-0"], "readinessProbe")
