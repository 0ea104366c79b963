"""Pods of the rendered manifests as plain containers, for machines without a Kubernetes.

This module does what a kubelet would do with a pod's own fields: command and arguments with their
variables, user, read-only root, volumes, restarts and probes. It does not do what a cluster does
(scheduling, scaling, Services, budgets). A pod's names come from aliases in a Docker network; its
Secrets are folders that the maker of the Secrets fills.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.kustomization import Resource, find, workloads
from deploy.stack import POLL_S, ROOT, run

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A replica of a workload, and the container that stands for it."""

    name: str
    workload: Resource
    container: Resource
    docker_name: str

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.workload["spec"]["template"]["spec"]
        return found

    def aliases(self) -> list[str]:
        service = self.workload["spec"].get("serviceName")
        own = f"{self.name}.{service}" if service else self.name
        return [own, self.workload["metadata"]["name"]]

    def fields(self) -> dict[str, str]:
        # Docker assigns the address only when the container runs; its name serves as well.
        return {"metadata.name": self.name, "status.podIP": self.aliases()[0]}


def variables(
    resources: list[Resource], container: Resource, fields: dict[str, str]
) -> dict[str, str]:
    """Environment variables of a container."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= config(resources, source["configMapRef"]["name"])
    for entry in container.get("env", ()):
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        elif "fieldRef" in entry["valueFrom"]:
            found[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            reference = entry["valueFrom"]["configMapKeyRef"]
            found[entry["name"]] = config(resources, reference["name"])[reference["key"]]
    return found


def config(resources: list[Resource], name: str) -> dict[str, str]:
    data: dict[str, str] = find(resources, kinds={"ConfigMap"}, name=name)["data"]
    return data


def expand(arguments: list[str], known: dict[str, str]) -> list[str]:
    """Arguments with their variables expanded, as the kubelet passes them on. Raises KeyError for
    an unknown variable."""
    return [re.sub(r"\$\(([A-Z_]+)\)", lambda match: known[match[1]], item) for item in arguments]


def make_secrets(resources: list[Resource], folder: Path) -> None:
    """Write the Secrets of the Deployment `credentials`, each into a folder of its own."""
    maker = find(resources, kinds={"Deployment"}, name="credentials")
    [container] = maker["spec"]["template"]["spec"]["containers"]
    program, kind, *arguments = container["command"]
    assert (program, kind) == ("shoal-credentials", "secrets")
    once = [each for each in arguments if not each.startswith("--every-h")]
    script = str(ROOT / "deploy" / "credentials.py")
    run(sys.executable, script, "files", f"--to={folder}", *once)
    owner = maker["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, owner, owner)


@contextmanager
def started(
    resources: list[Resource], names: set[str], images: str, secrets: Path
) -> Iterator[dict[str, Pod]]:
    """Start all replicas of the named workloads at once, as a cluster would; yield them by pod
    name."""
    prefix = f"shoal-pods-{os.getpid()}"
    with ExitStack() as stack:
        run("docker", "network", "create", prefix)
        stack.callback(run, "docker", "network", "rm", prefix)
        pods = {}
        for workload in workloads(resources):
            name = workload["metadata"]["name"]
            if name not in names:
                continue
            [container] = workload["spec"]["template"]["spec"]["containers"]
            for ordinal in range(workload["spec"]["replicas"]):
                pod = Pod(
                    name=f"{name}-{ordinal}",
                    workload=workload,
                    container=container,
                    docker_name=f"{prefix}-{name}-{ordinal}",
                )
                stack.callback(run, "docker", "rm", "--force", "--volumes", pod.docker_name)
                run(*docker_run(resources, pod, prefix, images, secrets))
                pods[pod.name] = pod
        yield pods


def docker_run(
    resources: list[Resource], pod: Pod, network: str, images: str, secrets: Path
) -> list[str]:
    """The `docker run` command that stands for the kubelet's start of the pod."""
    security = pod.spec["securityContext"]
    known = variables(resources, pod.container, pod.fields())
    command = ["docker", "run", "--detach", "--name", pod.docker_name, "--hostname", pod.name]
    command += ["--network", network, "--restart", "always"]
    for alias in pod.aliases():
        command += ["--network-alias", alias]
    command += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
    command += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    brought = {each["name"]: each for each in pod.spec.get("volumes", ())}
    for mount in pod.container["volumeMounts"]:
        if secret := brought.get(mount["name"], {}).get("secret"):
            part = secrets / secret["secretName"].removeprefix("shoal-")
            assert {item["key"] for item in secret["items"]} == {p.name for p in part.iterdir()}
            command += ["--volume", f"{part}:{mount['mountPath']}:ro"]
            continue
        # The pod's user may write to the volume, as in one from a kubelet.
        owner = f"uid={security['runAsUser']},gid={security['runAsGroup']},mode=0770"
        command += ["--tmpfs", f"{mount['mountPath']}:{owner}"]
    for name, value in known.items():
        command += ["--env", f"{name}={value}"]
    entrypoint = expand(pod.container.get("command", []), known)
    if entrypoint:
        command += ["--entrypoint", entrypoint[0]]
    image = images + pod.container["image"].removeprefix("shoal")
    return [*command, image, *entrypoint[1:], *expand(pod.container.get("args", []), known)]


def passes(pod: Pod, kind: str) -> bool:
    """True if a probe of the pod succeeds now, or is not declared."""
    probe = pod.container.get(kind)
    if probe is None:
        return True
    ports = {port["name"]: port["containerPort"] for port in pod.container.get("ports", ())}
    if "exec" in probe:
        command = probe["exec"]["command"]
    elif "httpGet" in probe:
        request = probe["httpGet"]
        scheme = request.get("scheme", "HTTP").lower()
        url = f"{scheme}://127.0.0.1:{ports[request['port']]}{request['path']}"
        command = ["shoal-probe", "http", url]
    else:
        command = ["shoal-probe", "tcp", f"127.0.0.1:{ports[probe['tcpSocket']['port']]}"]
    result = subprocess.run(
        ["docker", "exec", pod.docker_name, *command], capture_output=True, check=False, timeout=60
    )
    return result.returncode == 0


def wait_until_ready(pods: dict[str, Pod], timeout_s: float) -> None:
    """Wait until each pod passes all its probes. The failure shows the pods that do not, and their
    logs."""
    give_up_s = time.monotonic() + timeout_s
    pending = [(pod, kind) for pod in pods.values() for kind in PROBES]
    while pending:
        pending = [(pod, kind) for pod, kind in pending if not passes(pod, kind)]
        if pending and time.monotonic() > give_up_s:
            logs = "\n".join(
                f"--- {name}\n{log(pods[name])}" for name in {p.name for p, _ in pending}
            )
            raise AssertionError(f"{[(pod.name, kind) for pod, kind in pending]} fail:\n{logs}")
        time.sleep(POLL_S)


def log(pod: Pod) -> str:
    """The end of the pod's log."""
    result = subprocess.run(
        ["docker", "logs", "--tail", "40", pod.docker_name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.stdout


def ask(pod: Pod, path: str) -> Any:
    """JSON of the leader's answer, requested from a pod with a token; None for a refusal."""
    script = (
        "import json, os, sys\n"
        "from shoal_client.commands.status import StatusClient\n"
        "from shoal_proto.tls import identity\n"
        "identity.use(identity.from_environment())\n"
        "print(json.dumps(StatusClient(os.environ['SHOAL_HTTP'])._get(sys.argv[1])))\n"
    )
    result = subprocess.run(
        ["docker", "exec", pod.docker_name, "python", "-c", script, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return json.loads(result.stdout) if result.returncode == 0 else None
