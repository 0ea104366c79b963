"""The compose file trains the demo's job for real, while workers are lost and stopped."""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from cryptography import x509
from deploy.stack import CERTS_VALID_S, OWN, Stack, brought_up, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

EPOCHS = 300
UNDER_WAY_STEPS = 20
MIN_ACCURACY = 0.95
OUTLIVED_S = 45.0
# Prints `in` if the server continues after the handshake: in gRPC the server speaks first. With TLS
# 1.3 a client learns only then that it was refused.
DIAL = """
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
if len(sys.argv) > 3:
    context.load_cert_chain(sys.argv[3] + ".crt", sys.argv[3] + ".key")
try:
    tls = context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10))
    print("in" if tls.recv(1) else "out")
except TimeoutError:
    print("no answer")
except OSError:
    print("out")
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with brought_up(Stack()) as stack:
        yield stack


class Training:
    """A job of three workers on the stack, watched over HTTP."""

    def __init__(self, stack: Stack, strategy: str, name: str, epochs: int = EPOCHS) -> None:
        self.stack = stack
        self.name = name
        self._settings = {
            "SHOAL_JOB": name,
            "SHOAL_STRATEGY": strategy,
            "SHOAL_EPOCHS": str(epochs),
        }

    def start(self) -> None:
        """Start three workers, in place of those of the last job."""
        self.stack.compose("up", "--detach", "--no-build", "worker", settings=self._settings)

    def scale(self, workers: int) -> None:
        """Change the number of workers, and wait until surplus ones have ended."""
        command = ("up", "--detach", "--no-build", "--no-recreate", f"--scale=worker={workers}")
        self.stack.compose(*command, "worker", settings=self._settings)

    def job(self) -> dict[str, Any]:
        detail: dict[str, Any] = self.stack.get(f"/api/v1/jobs/{self.name}")
        return detail

    def under_way(self) -> dict[str, Any] | None:
        """The job, once all three workers train and have taken some steps."""
        job = self.job()
        summary = job["summary"]
        trains = summary["num_training"] == 3 and summary["step"] >= UNDER_WAY_STEPS
        return job if trains else None

    def finished(self) -> dict[str, Any] | None:
        job = self.job()
        return job if job["summary"]["phase"] == "finished" else None

    def committed(self, above: int) -> list[dict[str, Any]]:
        """The committed generations above a number, oldest first."""
        return [
            generation
            for generation in reversed(self.job()["generations"])
            if generation["generation"] > above and generation["verdict"] == "committed"
        ]

    def removed(self) -> dict[str, str]:
        """Reasons of the members that left the job or were lost, by member."""
        events = self.stack.get(f"/api/v1/jobs/{self.name}/events")["events"]
        return {
            event["member_id"]: event["reason"].removeprefix(f"{event['member_id']}: ")
            for event in events
            if event["kind"] == "member_removed"
        }


def roster(generation: dict[str, Any]) -> dict[str, str]:
    """Incarnation by member id in a generation."""
    return {entry["member_id"]: entry["public_id"] for entry in generation["members"]}


@pytest.mark.parametrize("strategy", ["async-sgd", "ddp"])
def test_trains_through_the_loss_of_a_worker(stack: Stack, strategy: str) -> None:
    """A container is killed: the others agree and continue, it comes back, and the job finishes."""
    training = Training(stack, strategy, f"digits-{strategy}")
    training.start()
    job = stack.wait_for("training with three workers", training.under_way, 180)
    number, step = job["summary"]["generation"], job["summary"]["step"]
    containers = stack.containers("worker")
    members = {m["member"]["member_id"]: m["member"] for m in job["members"]}
    assert set(members) == set(containers), "a worker's member id is its container's host name"
    # Choose rank 0, on which the others depend most.
    victim = min(members, key=lambda member: members[member]["rank"])
    survivors = {name: members[name]["public_id"] for name in members if name != victim}

    run("docker", "kill", "--signal", "KILL", containers[victim]["Id"])
    after = stack.wait_for("a later generation", lambda: training.committed(number) or None, 60)[0]
    assert members[victim]["public_id"] not in roster(after).values()
    assert survivors.items() <= roster(after).items(), "survivors keep their processes"

    # Docker does not restart a container after `docker kill`; it would restart one that failed.
    run("docker", "start", containers[victim]["Id"])
    back = stack.wait_for(
        "a generation with the replacement",
        lambda: [g for g in training.committed(number) if victim in roster(g)] or None,
        120,
    )[0]
    assert roster(back)[victim] != members[victim]["public_id"]
    assert survivors.items() <= roster(back).items()
    stack.wait_for("going on", lambda: training.job()["summary"]["step"] > step or None, 60)

    check_outcome(stack, stack.wait_for("finished", training.finished, 600))


def test_trains_through_the_loss_of_the_coordinator(stack: Stack) -> None:
    """The coordinator is killed and comes back: the same processes train on in the same generation.

    The test watches for longer than any lease lasts, so that a late loss would show.
    """
    training = Training(stack, "async-sgd", "digits-headless", epochs=100_000)
    training.start()
    job = stack.wait_for("training with three workers", training.under_way, 180)
    [coordinator] = [container["Id"] for container in stack.containers("coordinator").values()]
    run("docker", "kill", "--signal", "KILL", coordinator)
    killed_s = time.monotonic()
    run("docker", "start", coordinator)

    def outlived() -> dict[str, Any] | None:
        now = training.job()
        same = now["summary"]["generation"] == job["summary"]["generation"]
        assert same, f"{now['summary']}\n{stack.state()}"
        trains = now["summary"]["num_training"] == 3
        return now if trains and time.monotonic() - killed_s > OUTLIVED_S else None

    now = stack.wait_for("training after the leases' end", outlived, 120)
    assert now["summary"]["step"] > job["summary"]["step"]
    workers = stack.containers("worker").values()
    assert [container["RestartCount"] for container in workers] == [0, 0, 0]
    stack.compose("stop", "worker", timeout_s=120)


def test_a_stopped_worker_drains(stack: Stack) -> None:
    """A worker that is removed by scaling down hands over: the others stop at an agreed step. When
    all get SIGTERM, no worker can take over: they end as drained, and none waits.

    When all get SIGTERM, no worker can take over: they end as drained, and none waits.
    """
    training = Training(stack, "ddp", "digits-drained", epochs=100_000)
    training.start()
    job = stack.wait_for("training with three workers", training.under_way, 180)
    incarnations = {
        each["member"]["member_id"]: each["member"]["public_id"] for each in job["members"]
    }
    for member in incarnations:
        assert "it trains" in stack.operate("why", member, f"--job={training.name}")
    status = stack.operate("status", "--json")
    assert training.name in {each["summary"]["job"] for each in json.loads(status)}

    training.scale(2)
    rest = stack.containers("worker")
    [gone] = set(incarnations) - set(rest)
    after = training.committed(job["summary"]["generation"])[0]
    assert after["planned"], "no member broke off"
    assert roster(after) == {member: incarnations[member] for member in rest}
    assert training.removed() == {gone: "drained: SIGTERM"}
    step = training.job()["summary"]["step"]
    stack.wait_for("going on", lambda: training.job()["summary"]["step"] > step or None, 60)

    stack.compose("stop", "worker", timeout_s=120)
    ended = stack.containers("worker").values()
    assert [container["State"]["ExitCode"] for container in ended] == [143, 143]
    assert set(training.removed()) == set(incarnations)
    assert training.job()["members"] == []


def test_a_cluster_outlives_its_certificates(stack: Stack) -> None:
    """Certificates of the start run out: no process restarts, and a new one is admitted."""
    training = Training(stack, "ddp", "digits-renewed", epochs=100_000)
    training.start()
    job = stack.wait_for("training with three workers", training.under_way, 180)
    at_first = {part: certificate(stack, part) for part in ("coordinator", "ps-0", "worker")}
    ends = max(each.not_valid_after_utc for each in at_first.values())
    stack.wait_for(
        "past the first certificates",
        lambda: datetime.now(UTC) > ends + timedelta(seconds=5) or None,
        CERTS_VALID_S + 60,
    )
    for part, old in at_first.items():
        new = certificate(stack, part)
        assert new.serial_number != old.serial_number
        assert new.not_valid_after_utc > datetime.now(UTC)
    now = training.job()
    assert now["summary"]["generation"] == job["summary"]["generation"], "no member was lost"
    assert now["summary"]["step"] > job["summary"]["step"]

    # New connections use the current files: in a process that began with others, and in a new
    # process.
    containers = stack.containers("worker")
    victim = min(containers)
    run("docker", "kill", "--signal", "KILL", containers[victim]["Id"])
    run("docker", "start", containers[victim]["Id"])
    stack.wait_for(
        "a generation with the replacement",
        lambda: (
            [
                each
                for each in training.committed(job["summary"]["generation"])
                if victim in roster(each)
            ]
            or None
        ),
        120,
    )
    # Coordinator and servers reconnect to etcd, too.
    [etcd] = [container["Id"] for container in stack.containers("etcd").values()]
    run("docker", "restart", etcd)
    number = training.job()["summary"]["generation"]
    training.scale(2)
    stack.wait_for("a change that etcd holds", lambda: training.committed(number) or None, 120)
    for part in ("coordinator", "ps-0", "ps-1"):
        [container] = stack.containers(part).values()
        assert container["RestartCount"] == 0, part
    stack.compose("stop", "worker", timeout_s=120)


def certificate(stack: Stack, service: str) -> x509.Certificate:
    role = "server" if service.startswith("ps") else service
    path = f"{OWN}/{role}.crt"
    return x509.load_pem_x509_certificate(
        stack.compose("exec", "-T", service, "cat", path).encode()
    )


def test_each_service_has_only_its_own_files(stack: Stack) -> None:
    """Services hold no key of another part or of an authority; none runs as root or can write to
    its image."""
    common, client = {"ca.crt"}, {"etcd-ca.crt", "etcd-client.crt", "etcd-client.key"}
    expected = {
        "coordinator": common | client | {"coordinator.crt", "coordinator.key", "tokens"},
        "ps-0": common | client | {"server.crt", "server.key"},
        "etcd": common | {"etcd.crt", "etcd.key"},
    }
    for service, files in expected.items():
        shell = ("exec", "-T", service, "sh", "-c")
        assert set(stack.compose(*shell, f"ls -A {OWN}").split()) == files
        found = stack.compose(*shell, "find / -xdev -name '*.key' -user shoal 2>/dev/null; true")
        keys = {line.removeprefix(f"{OWN}/") for line in found.split()}
        assert keys <= {name for name in files if name.endswith(".key")}
        assert stack.compose(*shell, "id -u").strip() == "10001"
        assert "refused" in stack.compose(*shell, "touch /usr/x 2>/dev/null || echo refused")


def test_callers_without_token_or_certificate_are_refused(stack: Stack) -> None:
    """The page asks for a token; gRPC and etcd ask for a certificate of their own authority."""
    assert httpx.get(f"{stack.url}/api/v1/jobs", verify=False).status_code == 401
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{stack.http_port}/api/v1/jobs")
    ask = ("run", "--rm", "--no-deps", "-T", "--entrypoint=python", "shoal", "-c", DIAL)
    own = f"{OWN}/operator"
    assert stack.compose(*ask, "coordinator", "7700", own).strip() == "in", "the dial works"
    assert stack.compose(*ask, "coordinator", "7700").strip() == "out"
    assert stack.compose(*ask, "ps-0", "7710").strip() == "out"
    assert stack.compose(*ask, "etcd", "2379", own).strip() == "out", "another authority's"


def check_outcome(stack: Stack, job: dict[str, Any]) -> None:
    """The job completed all its samples; each worker ended with exit code 0 and a good model."""
    assert "completed" in job["summary"]["reason"], job["summary"]
    if not job["synchronous"]:
        samples = job["samples"]
        assert samples["completed"] == EPOCHS * samples["dataset_size"]
        assert samples["in_flight"] == 0
        assert samples["ignored"] == 0
    ids = [container["Id"] for container in stack.containers("worker").values()]
    assert len(ids) == 3
    ended = run("docker", "wait", *ids, timeout_s=60).split()
    assert ended == ["0", "0", "0"], stack.state()
    for container in ids:
        found = re.findall(r"test accuracy ([0-9.]+)", run("docker", "logs", container))
        assert len(found) == 1, "each container completed the job once"
        assert float(found[0]) >= MIN_ACCURACY
