"""The chart, rendered by Helm itself, equals the kustomization."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.kustomization import Resource, find, render

from shoal_server.core.generations.roster import JobSpec
from shoal_server.status.http.hosts import AllowedHosts

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "shoal"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or ""
pytestmark = pytest.mark.skipif(not HELM, reason="no helm here, nor a wheel of it for this machine")


def helm(*arguments: str) -> str:
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(values: dict[str, Any] | None = None, namespace: str = "shoal") -> list[Resource]:
    """Resources that Helm would apply, without the pods of `helm test`."""
    given = [] if values is None else [f"--set-json={k}={json.dumps(v)}" for k, v in values.items()]
    text = helm("template", "any-name", str(CHART), f"--namespace={namespace}", *given)
    documents = [document for document in yaml.safe_load_all(text) if document]
    found = [d for d in documents if "helm.sh/hook" not in d["metadata"].get("annotations", {})]
    for resource in found:
        # Helm applies into the namespace; a resource need not name it.
        resource["metadata"].setdefault("namespace", namespace)
    return found


def by_name(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    found = {(r["kind"], r["metadata"]["name"]): r for r in resources}
    assert len(found) == len(resources)
    # The annotation replaces a new name of the config map, by which kustomize rolls the workers.
    worker = found["Deployment", "worker"]["spec"]["template"]["metadata"]
    worker.pop("annotations", None)
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/dev": {
        "etcd.replicas": 1,
        "coordinator.replicas": 1,
        "parameterServer.replicas": 1,
        "worker.replicas": 2,
        "etcd.resources.requests.cpu": "100m",
        "coordinator.resources.requests.cpu": "100m",
        "parameterServer.resources.requests.cpu": "250m",
        "worker.resources.requests.cpu": "250m",
    },
    "overlays/gpu": {
        "worker.image": "worker-cuda",
        "worker.resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"memory": "32Gi", "nvidia.com/gpu": "1"},
        },
        "worker.sharedMemory": "8Gi",
        "worker.tolerations": [
            {
                "key": "node.kubernetes.io/unreachable",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            },
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        ],
    },
}


@pytest.mark.sampled()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_is_the_kustomization(variant: str) -> None:
    """The chart's resources are those of the kustomization, field by field. The chart makes no
    namespace: Helm needs it for its own records before it renders the chart."""
    theirs = by_name(render(DEPLOY / "kubernetes" / variant))
    theirs = {key: resource for key, resource in theirs.items() if key[0] != "Namespace"}
    namespace = theirs["Deployment", "worker"]["metadata"]["namespace"]
    ours = by_name(template(VARIANTS[variant], namespace))
    if variant == "overlays/dev":
        # The base names further members of etcd, which the overlay does not have.
        for each in (theirs, ours):
            [container] = each["Deployment", "credentials"]["spec"]["template"]["spec"][
                "containers"
            ]
            container["command"] = [c for c in container["command"] if "etcd-host" not in c]
    assert set(ours) == set(theirs)
    for key, resource in theirs.items():
        assert ours[key] == resource, key


def test_the_spot_overlay_can_be_expressed_in_values() -> None:
    theirs = by_name(render(DEPLOY / "kubernetes" / "overlays" / "spot"))
    pod = theirs["Deployment", "worker"]["spec"]["template"]["spec"]
    values = {
        "worker.graceSeconds": 12,
        "worker.terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "worker.tolerations": pod["tolerations"],
        "worker.nodeAffinity": pod["affinity"]["nodeAffinity"],
    }
    ours = by_name(template(values))
    assert ours["Deployment", "worker"] == theirs["Deployment", "worker"]


def test_a_script_and_volumes_are_named_in_values() -> None:
    volume = {"name": "training", "persistentVolumeClaim": {"claimName": "training"}}
    mount = {"name": "training", "mountPath": "/training"}
    values = {
        "worker.script": ["train.py", "--lr=0.1"],
        "worker.volumes": [volume],
        "worker.volumeMounts": [mount],
    }
    worker = find(template(values), kinds={"Deployment"}, name="worker")
    pod = worker["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"] == ["train.py", "--lr=0.1"]
    assert pod["volumes"][-1] == volume
    assert container["volumeMounts"][-1] == mount


def test_the_page_answers_to_each_name_of_its_certificate() -> None:
    names = ["shoal.example", "a.example"]
    given = json.dumps(template({"coordinator.hosts": names}))
    assert re.findall(r"--host=([\w.]+)", given) == ["localhost", "coordinator", *names]
    allowed = AllowedHosts(re.findall(r"--http-host=([\w.]+)", given))
    assert all(allowed.allows(name) for name in names)


@pytest.mark.parametrize(
    ("minimum", "budget"),
    [(1, {"minAvailable": 1}), (3, {"minAvailable": 3}), (4, {"maxUnavailable": 1})],
)
def test_a_drain_can_always_evict_a_worker(minimum: int, budget: dict[str, int]) -> None:
    """Four workers: a drain leaves the minimum, or if all four are needed, evicts one at a time."""
    found = template({"job.minMembers": minimum, "worker.replicas": 4})
    given = find(found, kinds={"PodDisruptionBudget"}, name="worker")["spec"]
    assert budget.items() <= given.items()
    assert len({"minAvailable", "maxUnavailable"} & set(given)) == 1
    # Kubernetes cannot compute maxUnavailable for the pods of a Job.
    excluded = given["selector"].get("matchExpressions", [])
    is_needed = "maxUnavailable" in given
    assert excluded == is_needed * [{"key": "job-name", "operator": "DoesNotExist"}]


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("worker.script", "[train.py, --steps, 1000000]"),
        ("worker.script", "[train.py, --log, yes]"),
        ("coordinator.arguments", "[--copies, 3]"),
        ("job.name", "20261130"),
        ("images.tag", "1.10"),
    ],
)
def test_a_number_where_text_is_expected_is_refused(
    tmp_path: Path, path: str, written: str
) -> None:
    """Helm would pass 1000000 on as 1e+06, and 1.10 as 1.1. In quotes, and by `--set-string`, they
    arrive as they are written."""
    part, _, name = path.partition(".")
    values = tmp_path / "values.yaml"
    values.write_text(f"{part}: {{{name}: {written}}}")
    error = refused(f"--values={values}")
    assert part in error and name in error and "string" in error
    quoted = {"worker": {"script": ["train.py", "--steps", "1000000"]}, "images": {"tag": "1.10"}}
    values.write_text(json.dumps(quoted))
    arguments = (f"--values={values}", "--set-string=job.name=7")
    text = helm("template", "any-name", str(CHART), *arguments)
    assert "1000000" in text and "shoal/worker:1.10" in text and 'SHOAL_JOB: "7"' in text


def test_an_unknown_value_is_refused() -> None:
    assert "replica" in refused("--set=worker.replica=8")


@pytest.mark.parametrize(
    ("volumes", "replicas", "accepted"),
    [(0, 3, True), (3, 3, True), (1, 1, True), (1, 3, False), (3, 1, False), (3, 5, False)],
)
def test_a_number_of_etcd_members_other_than_that_of_the_volumes_is_refused(
    volumes: int, replicas: int, accepted: bool
) -> None:
    """New members would make an empty etcd beside the old one."""
    with api_server({f"data-etcd-{number}" for number in range(volumes)}) as url:
        arguments = (
            f"--set=etcd.replicas={replicas}",
            "--dry-run=server",
            f"--kube-apiserver={url}",
        )
        if accepted:
            helm("template", "any-name", str(CHART), *arguments)
        else:
            assert f"etcd.replicas={replicas}, but the namespace default" in refused(*arguments)


@contextmanager
def api_server(claims: Set[str]) -> Iterator[str]:
    """A Kubernetes API with these PersistentVolumeClaims, and nothing else."""
    kind = {"name": "persistentvolumeclaims", "kind": "PersistentVolumeClaim", "namespaced": True}
    answers: dict[str, object] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [{**kind, "singularName": "", "verbs": ["get"]}],
        },
    }
    for name in claims:
        path = f"/api/v1/namespaces/default/persistentvolumeclaims/{name}"
        answers[path] = {"apiVersion": "v1", "kind": kind["kind"], "metadata": {"name": name}}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(found or {"kind": "Status", "code": 404, "reason": "NotFound"})
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *of_request: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def refused(*arguments: str) -> str:
    """Helm's error."""
    command = [HELM, "template", "any-name", str(CHART), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def spec(resources: list[Resource]) -> JobSpec:
    """The bounds that new workers get."""
    job = find(resources, kinds={"ConfigMap"}, name="job")["data"]
    return JobSpec(
        job=job["SHOAL_JOB"],
        min_members=int(job["SHOAL_MIN_MEMBERS"]),
        max_members=int(job["SHOAL_MAX_MEMBERS"]),
        desired_members=int(job["SHOAL_DESIRED_MEMBERS"]),
    )


def test_another_number_of_workers_only_adds_or_removes_workers() -> None:
    """`helm upgrade --set worker.replicas=N` replaces no pod, and the job admits the new ones."""
    before = template()
    pod = find(before, kinds={"Deployment"}, name="worker")["spec"]["template"]
    for replicas in (0, 1, 8, 20):
        after = template({"worker.replicas": replicas})
        worker = find(after, kinds={"Deployment"}, name="worker")["spec"]
        assert worker["replicas"] == replicas
        assert worker["template"] == pod
        assert not spec(after).problem()
        assert spec(before).fits(spec(after))
    assert not spec(template({"worker.replicas": 1, "job.minMembers": 2})).problem()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "old", "new"), [("job.name", "a", "b"), ("coordinator.replicas", 1, 2)]
)
def test_another_job_or_coordinator_rolls_the_workers(name: str, old: Any, new: Any) -> None:
    """A running pod keeps its environment: the job's settings, and the coordinators' addresses."""

    def pod(value: Any) -> Any:
        worker = find(template({name: value}), kinds={"Deployment"}, name="worker")
        return worker["spec"]["template"]

    assert pod(old) == pod(old)
    assert pod(old) != pod(new)


@pytest.mark.long
def test_the_chart_is_valid_with_other_values(tmp_path: Path) -> None:
    """Schemas of Kubernetes and of Helm are checked; the PodMonitor has none in Kubernetes."""
    helm("lint", "--strict", str(CHART))
    values = {
        "etcd.replicas": 5,
        "storageClass": "fast",
        "coordinator.hosts": ["shoal.example"],
        "coordinator.arguments": ["--copies=3"],
        "images.registry": "registry.example/team",
        "images.tag": "1",
    }
    resources = template(values)
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(resources))
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    images = {
        container["image"]
        for resource in resources
        if resource["kind"] in ("Deployment", "StatefulSet")
        for container in resource["spec"]["template"]["spec"]["containers"]
    }
    assert {image.rpartition("/")[0] for image in images} == {"registry.example/team"}
    assert {image.rpartition(":")[2] for image in images} == {"1"}
    etcd = find(resources, kinds={"ConfigMap"}, name="etcd")["data"]["INITIAL_CLUSTER"]
    assert etcd.count("https://") == 5


def test_monitors_equal_those_of_the_kustomization() -> None:
    """Monitors are rendered only if the values say that the operator is installed."""
    path = DEPLOY / "kubernetes" / "pod-monitor.yaml"
    theirs = {each["metadata"]["name"]: each for each in yaml.safe_load_all(path.read_text())}
    found = [r for r in template({"monitoring.podMonitor": True}) if r["kind"] == "PodMonitor"]
    for each in found:
        each["metadata"].pop("namespace")
    assert {each["metadata"]["name"]: each for each in found} == theirs
    assert not [r for r in template() if r["kind"] == "PodMonitor"]
