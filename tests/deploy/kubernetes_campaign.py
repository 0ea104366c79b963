"""Runs deploy/kubernetes and the Helm chart on a real Kubernetes, through what clusters do to pods.

    make kubernetes-test                                    # a cluster of its own; needs root
    make kubernetes-test KUBERNETES="--only up,drained"     # some cases; later ones build on `up`
    KUBECONFIG=... make kubernetes-test KUBERNETES="--images registry.example/shoal --tag 1"

With KUBECONFIG it uses that cluster, in namespaces of its own that it removes at the end, and needs
images there that its nodes can pull. Without, it builds a cluster of two nodes from Debian's source
package (`kubernetes_cluster.py`), which it keeps in `--cache`.

The overlay is `dev`, the training a script in a ConfigMap. Prints a line for each case, and a table
at the end; the exit code is 1 if a case failed. `steps lost` counts steps that were trained again;
`paused` is the longest time between two steps of a member that stayed.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from deploy.campaign import LeftOut, run_campaign, running
from deploy.kubernetes_cluster import KubernetesCluster, slowly_awaited
from deploy.kustomization import Resource, find
from deploy.stack import IMAGES, ROOT, run

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "shoal"
HELM = Path(sys.executable).with_name("helm")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shoal" / "kubernetes"
NAMESPACE, HELM_NAMESPACE = "shoal-test", "shoal-test-helm"
READY_S = 400.0
TRAINED_S = 300.0
DRAIN = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s")
STEPS, RATE = 20_000, 2.0**-10
# All gradients are 1, so the weights count the updates, none of which is damped. A step takes a
# tenth of a second until `finish` exists.
TRAINING = f"""
import pathlib, sys, time
import shoal, torch

finish = pathlib.Path("/tmp/finish")
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
with shoal.join() as session:
    strategy = sys.argv[1]
    if strategy == "async-sgd":
        strategy = shoal.AsyncSGD(staleness="none")
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    data = torch.ones(8 * int(sys.argv[2]), 8)
    for batch in session.batches(data, global_batch_size=8, epochs=1):
        with session.step() as step:
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        if step.committed:
            print("step", batch.step, session.world_size, time.time(), flush=True)
        if not finish.exists():
            time.sleep(0.1)
(weight,) = model.parameters()
print("updates", (-weight.max() / {RATE}).item(), flush=True)
"""
KILL = """for p in /proc/[0-9]*; do
[ $p = /proc/1 ] || ! grep -q '[t]rain.py' $p/cmdline 2> /dev/null || kill -9 ${p#/proc/}
done"""


@dataclass(frozen=True)
class Step:
    """A line of the training script: a committed step."""

    number: int
    world_size: int
    time_s: float


@dataclass
class Cluster:
    """A Kubernetes cluster, as kubectl sees it."""

    kubeconfig: str
    images: str = "shoal"
    tag: str = "dev"

    def kubectl(self, *arguments: str, given: str = "", within_s: float = 300.0) -> str:
        """Standard output of kubectl. A failure shows all of its output."""
        return self._run("kubectl", *arguments, given=given, within_s=within_s)

    def helm(self, *arguments: str) -> str:
        return self._run(str(HELM), *arguments, within_s=600.0)

    def _run(self, *command: str, given: str = "", within_s: float) -> str:
        environment = {**os.environ, "KUBECONFIG": self.kubeconfig}
        return run(*command, environment=environment, given=given, timeout_s=within_s)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", "-o", "json", *arguments))

    @property
    def version(self) -> tuple[int, int]:
        server = json.loads(self.kubectl("version", "-o", "json"))["serverVersion"]
        return int(server["major"]), int(re.sub(r"\D", "", server["minor"]))

    def fit(self, resources: Sequence[Resource]) -> list[Resource]:
        """Resources as a Kubernetes before 1.27 takes them: budgets of policy/v1beta1, without a
        policy for pods that are not ready."""
        if self.version >= (1, 27):
            return list(resources)
        for resource in resources:
            if resource["kind"] == "PodDisruptionBudget":
                resource["apiVersion"] = "policy/v1beta1"
                resource["spec"].pop("unhealthyPodEvictionPolicy", None)
        return list(resources)


@dataclass
class Case:
    """The dev overlay in a namespace, with a job of the training script."""

    cluster: Cluster
    folder: Path
    job: str = "first"
    strategy: str = "ddp"
    num_steps: int = STEPS
    facts: dict[str, object] = field(default_factory=dict)

    def clean_up(self) -> None:
        print(self.cluster.kubectl("get", "pods", "--all-namespaces", "-o", "wide"), flush=True)

    # --- commands ---

    def kubectl(self, *arguments: str, given: str = "", within_s: float = 300.0) -> str:
        return self.cluster.kubectl(
            "--namespace", NAMESPACE, *arguments, given=given, within_s=within_s
        )

    def apply(self) -> None:
        """Apply the overlay, with the job and its strategy."""
        self.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(self.resources()))

    def resources(self) -> list[Resource]:
        """The overlay's resources, and the script; workers run the script."""
        base = os.path.relpath(KUBERNETES / "overlays" / "dev", self.folder)
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [base],
            "namespace": NAMESPACE,
            "images": [
                {
                    "name": f"shoal/{n}",
                    "newName": f"{self.cluster.images}/{n}",
                    "newTag": self.cluster.tag,
                }
                for n in IMAGES
            ],
            "configMapGenerator": [
                {"name": "job", "behavior": "merge", "literals": [f"SHOAL_JOB={self.job}"]},
                {"name": "script", "files": ["train.py"]},
            ],
        }
        if self.strategy == "async-sgd":
            overlay["replicas"] = [{"name": "ps", "count": 2}]
        (self.folder / "train.py").write_text(TRAINING)
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        rendered = self.cluster.kubectl("kustomize", str(self.folder))
        resources = self.cluster.fit([each for each in yaml.safe_load_all(rendered) if each])
        pod = find(resources, kinds={"Deployment"}, name="worker")["spec"]["template"]["spec"]
        [container] = pod["containers"]
        script = ["/script/train.py", self.strategy, str(self.num_steps)]
        container["args"] = script
        [name] = [
            r["metadata"]["name"]
            for r in resources
            if r["kind"] == "ConfigMap" and r["metadata"]["name"].startswith("script-")
        ]
        container["volumeMounts"].append({"name": "script", "mountPath": "/script"})
        pod["volumes"].append({"name": "script", "configMap": {"name": name}})
        return resources

    def shoal(self, *arguments: str) -> str:
        """Output of a command in the operator's pod."""
        return self.kubectl("exec", "deployment/operator", "--", "shoal", *arguments)

    # --- what is seen ---

    def workers(self) -> list[dict[str, Any]]:
        """Pods of the workers that nobody has asked to end."""
        found = self.cluster.get(
            "pods", "--namespace", NAMESPACE, "--selector=app.kubernetes.io/name=worker"
        )["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def names(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.workers()]

    def steps(self, worker: str) -> list[Step]:
        """The steps that the pod has printed, by any of its processes."""
        lines = [line.rpartition("] ")[2].split() for line in self.log(worker).splitlines()]
        return [
            Step(int(words[1]), int(words[2]), float(words[3]))
            for words in lines
            if len(words) == 4 and words[0] == "step"
        ]

    def log(self, worker: str) -> str:
        return self.kubectl("logs", worker, "--tail=-1")

    def await_training(self, num_members: int, after: int = -1, num_steps: int = 10) -> int:
        """Wait until a worker has committed `num_steps` steps beyond step `after` with
        `num_members` members. Return the number of the last one."""

        def taken() -> list[int]:
            for name in self.names():
                try:
                    steps = self.steps(name)
                except AssertionError:  # the container starts
                    continue
                numbers = [
                    s.number for s in steps if s.number > after and s.world_size == num_members
                ]
                if len(numbers) >= num_steps:
                    return numbers
            return []

        return slowly_awaited(taken, TRAINED_S, f"{num_members} members that train")[-1]

    def await_ready(self, *workloads: str) -> None:
        for workload in workloads:
            self.kubectl(
                "rollout", "status", workload, f"--timeout={READY_S:.0f}s", within_s=READY_S + 30
            )

    def await_workers_ready(self) -> None:
        """Wait until the number of workers that the Deployment asks for is there and ready."""

        def ready() -> bool:
            wanted = self.cluster.get("deployment", "worker", "--namespace", NAMESPACE)
            return _num_ready(self.workers()) == wanted["spec"]["replicas"] == len(self.workers())

        slowly_awaited(ready, READY_S, "workers that are ready")

    @contextmanager
    def watched(self, survivor: str) -> Iterator[None]:
        """Note steps lost and the longest pause of a worker that stays, during the block."""
        began = self.steps(survivor)[-1]
        yield
        steps = [each for each in self.steps(survivor) if each.number >= began.number]
        numbers = [each.number for each in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
        self.facts["steps lost"] = 0
        pauses = [b.time_s - a.time_s for a, b in pairwise(steps)]
        self.facts["paused"] = f"{max(pauses):.2f} s"

    def finish(self) -> None:
        """Have the training take its last steps at once."""
        for name in self.names():
            self.kubectl("exec", name, "--", "touch", "/tmp/finish")


def _num_ready(pods: Sequence[dict[str, Any]]) -> int:
    return sum(
        condition["type"] == "Ready" and condition["status"] == "True"
        for pod in pods
        for condition in pod["status"].get("conditions", ())
    )


def up(case: Case) -> None:
    """The overlay comes up from nothing: all parts are ready, and two workers train with ddp."""
    began_s = time.monotonic()
    case.apply()
    operator = yaml.safe_load((KUBERNETES / "operator.yaml").read_text())
    [container] = operator["spec"]["template"]["spec"]["containers"]
    container["image"] = f"{case.cluster.images}/coordinator:{case.cluster.tag}"
    case.kubectl("apply", "-f", "-", given=yaml.safe_dump(operator))
    case.await_ready("statefulset/etcd", "statefulset/coordinator", "statefulset/ps")
    case.await_training(2)
    case.await_workers_ready()
    case.facts["seconds to training"] = round(time.monotonic() - began_s)
    case.await_ready("deployment/operator")
    assert case.job in case.shoal("status")
    # Applied once more, in both ways, the same manifests change no specification.
    before = _generations(case)
    case.apply()
    case.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
        given=yaml.safe_dump_all(case.resources()),
    )
    assert _generations(case) == before


def _generations(case: Case) -> dict[str, int]:
    kinds = "deployments,statefulsets,networkpolicies,poddisruptionbudgets"
    found = case.cluster.get(kinds, "--namespace", NAMESPACE)["items"]
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["generation"]
        for each in found
    }


def killed(case: Case) -> None:
    """A worker's process gets SIGKILL: the other goes on, and the launcher starts it again."""
    lost, survivor = case.names()[:2]
    last = case.await_training(2)
    with case.watched(survivor):
        case.kubectl("exec", lost, "--", "sh", "-c", KILL)
        last = case.await_training(1, after=last, num_steps=1)
        case.await_training(2, after=last)


def deleted(case: Case) -> None:
    """A pod is deleted: its worker drains, and the pod that replaces it joins."""
    gone, survivor = case.names()[:2]
    last = case.await_training(2)
    with case.watched(survivor):
        began_s = time.monotonic()
        case.kubectl("delete", "pod", gone)
        case.facts["seconds to delete"] = round(time.monotonic() - began_s, 1)
        last = case.steps(survivor)[-1].number
        case.await_training(2, after=last)
    case.await_workers_ready()


def scaled(case: Case) -> None:
    """`kubectl scale` to three workers and back to two."""
    last = case.await_training(2)
    case.kubectl("scale", "deployment/worker", "--replicas=3")
    last = case.await_training(3, after=last)
    case.await_workers_ready()
    case.kubectl("scale", "deployment/worker", "--replicas=2")
    case.await_training(2, after=last)
    case.await_workers_ready()
    with case.watched(case.names()[0]):
        case.await_training(2, after=case.await_training(2))


def rolled(case: Case) -> None:
    """A rollout replaces all workers one by one, and loses no step."""
    before, last = case.names(), case.await_training(2)
    began_s = time.monotonic()
    case.kubectl("rollout", "restart", "deployment/worker")
    case.await_ready("deployment/worker")
    case.facts["seconds to roll"] = round(time.monotonic() - began_s, 1)
    assert not set(before) & set(case.names())
    first = min(step.number for name in case.names() for step in case.steps(name))
    assert first > last, "the new workers began before the last step of the old ones"
    case.await_training(2, after=last)


def control(case: Case) -> None:
    """The pods of the coordinator and of etcd are deleted together: training goes on."""
    survivor = case.names()[0]
    last = case.await_training(2)
    with case.watched(survivor):
        case.kubectl("delete", "pod", "coordinator-0", "etcd-0")
        case.await_ready("statefulset/etcd", "statefulset/coordinator")
        case.await_training(2, after=last)
    slowly_awaited(lambda: case.job in case.shoal("status"), READY_S, "a coordinator that answers")


def drained(case: Case) -> None:
    """`kubectl drain` empties the node of a worker; all pods move, and training goes on."""
    case.await_workers_ready()
    node = case.workers()[0]["spec"]["nodeName"]
    last = case.await_training(2)
    drain(case, node)
    case.await_training(2, after=last)
    case.await_ready("statefulset/etcd", "statefulset/coordinator", "statefulset/ps")
    case.await_workers_ready()


def drain(case: Case, node: str) -> None:
    """Drain a node as docs/deploy.md says, check that it is empty, and let it take pods again."""
    if len(case.cluster.get("nodes")["items"]) < 2:
        raise LeftOut("a drain needs a second node")
    began_s = time.monotonic()
    try:
        case.cluster.kubectl("drain", node, *DRAIN)
        case.facts["seconds to drain"] = round(time.monotonic() - began_s, 1)
        pods = case.cluster.get("pods", "--namespace", NAMESPACE)["items"]
        assert not [p["metadata"]["name"] for p in pods if p["spec"].get("nodeName") == node]
    finally:
        case.cluster.kubectl("uncordon", node)


def finished(case: Case) -> None:
    """Workers of a finished job wait, ready, without a restart, and a drain still works."""
    restarts = _restarts(case)
    case.finish()
    for name in case.names():
        slowly_awaited(
            lambda name=name: "waiting for SIGTERM" in case.log(name), TRAINED_S, "the end"
        )
    assert "finished" in case.shoal("status")
    case.await_workers_ready()
    drain(case, case.workers()[0]["spec"]["nodeName"])
    case.await_workers_ready()
    for name in case.names():
        slowly_awaited(
            lambda name=name: "waiting for SIGTERM" in case.log(name), TRAINED_S, "a wait"
        )
    case.facts["restarts"] = _restarts(case) - restarts
    assert case.facts["restarts"] == 0


def _restarts(case: Case) -> int:
    return sum(
        container["restartCount"]
        for pod in case.workers()
        for container in pod["status"].get("containerStatuses", ())
    )


def servers(case: Case) -> None:
    """A job with async-sgd on two parameter servers, of which each is deleted once: no update is
    lost, and none is applied twice."""
    case.job, case.strategy, case.num_steps = "second", "async-sgd", 6000
    case.apply()
    # Pods of the last job have printed steps too.
    case.await_ready("statefulset/ps", "deployment/worker")
    case.await_training(2)
    for name in ("ps-0", "ps-1"):
        last = max(step.number for worker in case.names() for step in case.steps(worker))
        case.kubectl("delete", "pod", name)
        case.await_ready("statefulset/ps")
        case.await_training(2, after=last)
    case.finish()
    found = []
    for name in case.names():
        slowly_awaited(lambda name=name: "updates " in case.log(name), TRAINED_S, "the end")
        found += re.findall(r"updates ([\d.]+)", case.log(name))
    # The worker that ended first may have missed the last updates of the other one.
    updates = max(map(float, found))
    case.facts["updates"] = f"{updates:.0f} of {case.num_steps}"
    assert updates == case.num_steps, found


def indexed(case: Case) -> None:
    """The indexed Job trains, and is complete once the training is finished."""
    if case.cluster.version < (1, 27):
        raise LeftOut("worker-job.yaml needs Kubernetes 1.27")
    case.kubectl("scale", "deployment/worker", "--replicas=0")
    job = yaml.safe_load((KUBERNETES / "worker-job.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    container["image"] = f"{case.cluster.images}/worker:{case.cluster.tag}"
    container["resources"]["requests"]["cpu"] = "250m"
    case.kubectl("apply", "-f", "-", given=yaml.safe_dump(job))
    case.kubectl(
        "wait",
        "job/first",
        "--for=condition=Complete",
        f"--timeout={READY_S:.0f}s",
        within_s=READY_S + 30,
    )


def removed(case: Case) -> None:
    """`kubectl delete` of the manifests leaves nothing."""
    began_s = time.monotonic()
    case.kubectl("delete", "deployment/operator")
    case.kubectl("delete", "-f", "-", given=yaml.safe_dump_all(case.resources()), within_s=READY_S)
    slowly_awaited(lambda: not _exists(case.cluster, NAMESPACE), READY_S, "no namespace")
    case.facts["seconds to delete"] = round(time.monotonic() - began_s)


def _exists(cluster: Cluster, namespace: str) -> bool:
    names = [each["metadata"]["name"] for each in cluster.get("namespaces")["items"]]
    return namespace in names


def helm(case: Case) -> None:
    """`helm install`, `helm test`, `helm upgrade` to one worker more, which joins the job, and
    `helm uninstall` of the chart, with sizes like `dev`."""
    chart = case.folder / "chart"
    shutil.copytree(CHART, chart)
    if case.cluster.version < (1, 27):
        (chart / "Chart.yaml").write_text(
            re.sub(r"kubeVersion: .*", "", (chart / "Chart.yaml").read_text())
        )
        for path in (chart / "templates").glob("*.yaml"):
            text = path.read_text().replace("policy/v1\n", "policy/v1beta1\n")
            path.write_text(re.sub(r"\n  unhealthyPodEvictionPolicy: .*", "", text))
    values = {
        "images.registry": case.cluster.images,
        "images.tag": case.cluster.tag,
        "etcd.replicas": 1,
        "coordinator.replicas": 1,
        "parameterServer.replicas": 1,
        "worker.replicas": 2,
        "worker.script": ["-m", "shoal.demo.digits", "--epochs=100000"],
        **{
            f"{part}.resources.requests.cpu": "100m"
            for part in ("etcd", "coordinator", "parameterServer", "worker")
        },
    }
    given = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    where = ("--namespace", HELM_NAMESPACE)
    case.cluster.kubectl("create", "namespace", HELM_NAMESPACE)
    began_s = time.monotonic()
    case.cluster.helm("install", "any", str(chart), *where, *given, "--wait", "--timeout=10m")
    case.facts["seconds to install"] = round(time.monotonic() - began_s)
    print(case.cluster.helm("test", "any", *where, "--logs"), flush=True)
    # A worker is ready once it is a member: a job that refused the new one would end this in time.
    given.append("--set-json=worker.replicas=3")
    case.cluster.helm("upgrade", "any", str(chart), *where, *given, "--wait", "--timeout=5m")
    case.cluster.helm("uninstall", "any", *where, "--wait")

    def is_left_alone() -> bool:
        left = case.cluster.get("all", *where)["items"]
        names = [f"{each['kind']}/{each['metadata']['name']}" for each in left]
        return names in ([], ["Pod/test-status"])

    slowly_awaited(is_left_alone, READY_S, "an empty namespace, but for the pod of helm test")
    case.cluster.kubectl("delete", "namespace", HELM_NAMESPACE)


CASES = (
    *(up, killed, deleted, scaled, rolled, control, drained, finished),
    *(servers, indexed, removed, helm),
)


@contextmanager
def begin(options: argparse.Namespace) -> Iterator[Callable[[str], Case]]:
    with _cluster(options) as cluster, tempfile.TemporaryDirectory() as folder:
        major, minor = cluster.version
        nodes = len(cluster.get("nodes")["items"])
        print(f"Kubernetes {major}.{minor}, {nodes} nodes", flush=True)
        case = Case(cluster, Path(folder))

        def next_case(name: str) -> Case:
            case.facts = {}
            return case

        yield next_case


@contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[Cluster]:
    if kubeconfig := os.environ.get("KUBECONFIG"):
        cluster = Cluster(kubeconfig, options.images, options.tag)
        try:
            yield cluster
        finally:
            for namespace in (NAMESPACE, HELM_NAMESPACE):
                cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found")
    else:
        with running(KubernetesCluster(options.cache)) as own:
            yield Cluster(str(own.kubeconfig))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make kubernetes-test")
    parser.add_argument("--images", default="shoal", help="registry of the images, with KUBECONFIG")
    parser.add_argument("--tag", default="dev", help="tag of the images")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder that keeps what was built"
    )
    return run_campaign(parser, CASES, arguments, begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
