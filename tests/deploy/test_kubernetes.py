"""The Kubernetes manifests render, are valid, and agree with each other and with the program."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deploy.kustomization import Resource, containers, find, render, workloads
from deploy.pods import config, expand, variables
from deploy.scripts import credentials
from support.docs.pages import DOCS, blocks

from shoal.launcher.run_config import member_ids
from shoal_client.cli import installed_commands, read_config
from shoal_server.core.limits import Limits
from shoal_server.status.app import build_app
from shoal_server.status.board import StatusBoard
from shoal_server.status.views import (
    GenerationView,
    JobDetail,
    MemberView,
    PublishedSeriesView,
    Readiness,
    ShardsView,
)

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
VARIANTS = ["", "base", "overlays/dev", "overlays/gpu", "overlays/spot"]
OWN = "/var/lib/shoal/own"
ROLES = {"coordinator", "ps"}


@pytest.fixture(params=VARIANTS, ids=lambda folder: folder or "top")
def variant(request: pytest.FixtureRequest) -> Path:
    return KUBERNETES / str(request.param)


@pytest.fixture
def resources(variant: Path) -> list[Resource]:
    return render(variant)


def pod_name(workload: Resource, ordinal: int) -> str:
    return f"{workload['metadata']['name']}-{ordinal}"


def first_pod(container: Resource) -> dict[str, str]:
    return {"metadata.name": f"{container['name']}-0", "status.podIP": "10.1.2.3"}


def arguments(resources: list[Resource], container: Resource) -> list[str]:
    known = variables(resources, container, first_pod(container))
    return expand(container["args"], known)


def without_hashes(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    """Resources by kind and name, without the content hash in the names of generated config
    maps."""
    names = {r["metadata"]["name"] for r in resources if r["kind"] == "ConfigMap"}
    text = json.dumps(resources)
    for name in names:
        text = text.replace(f'"{name}"', json.dumps(re.sub(r"-[a-z0-9]{10}$", "", name)))
    return {(r["kind"], r["metadata"]["name"]): r for r in json.loads(text)}


def kubectl() -> str:
    """A kubectl whose kustomize supports `replicas` and resources that are folders."""
    command = shutil.which("kubectl")
    if command is None:
        pytest.skip("no kubectl here; the checks render the manifests without it")
    text = subprocess.run(
        [command, "version", "--client", "--output=json"], capture_output=True, check=True
    ).stdout
    version = json.loads(text)["clientVersion"]
    if int(version["minor"].rstrip("+")) < 21:
        pytest.skip(f"kubectl {version['gitVersion']} holds kustomize 2; 1.21 or newer is needed")
    return command


@pytest.mark.sampled()
def test_kubectl_renders_the_same(variant: Path) -> None:
    """`kubectl kustomize` gives the resources that the other checks examine."""
    output = subprocess.run(
        [kubectl(), "kustomize", str(variant)], capture_output=True, check=True, text=True
    )
    assert not output.stderr, "a warning counts as a failure"
    theirs = without_hashes(list(yaml.safe_load_all(output.stdout)))
    assert theirs == without_hashes(render(variant))


@pytest.mark.parametrize("components", [(), ("gpu",), ("spot",), ("gpu", "spot"), ("spot", "gpu")])
def test_the_pages_overlay_trains_a_script_of_ones_own(
    tmp_path: Path, components: tuple[str, ...]
) -> None:
    """The overlay of docs/deploy.md sets image, script, job and volume, with any components."""
    [page] = [b for b in blocks(DOCS / "deploy.md", "yaml") if b.startswith("apiVersion: kust")]
    folder = os.path.relpath(KUBERNETES, tmp_path)
    named = [f"{folder}/components/{name}" for name in components]
    text = re.sub(r"(?m)^# components:.*", f"components: {json.dumps(named)}", page)
    assert text != page
    text = text.replace("path/to/deploy/kubernetes", folder)
    if "gpu" in components:
        assert "with components/gpu: name: shoal/worker-cuda" in page
        text = text.replace("{name: shoal/worker,", "{name: shoal/worker-cuda,")
    (tmp_path / "kustomization.yaml").write_text(text)
    ours = render(tmp_path)
    pod = find(ours, kinds={"Deployment"}, name="worker")["spec"]["template"]["spec"]
    [worker] = pod["containers"]
    assert worker["image"] == "registry.example/my-training:1"
    assert worker["args"] == ["train.py", "--lr=0.1"]
    assert "--finished-file=/tmp/finished" in worker["command"]
    assert ("--grace-s=12" in worker["command"]) == ("spot" in components)
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) == ("gpu" in components)
    expected = {"gpu": 1, "spot": 3}
    assert len(pod["tolerations"]) == 1 + sum(expected[name] for name in components)
    mounted = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} >= {"training"}
    assert config(ours, "job")["SHOAL_JOB"] == "my-run"
    output = subprocess.run(
        [kubectl(), "kustomize", str(tmp_path)], capture_output=True, check=True, text=True
    )
    assert without_hashes(list(yaml.safe_load_all(output.stdout))) == without_hashes(ours)


@pytest.mark.long
@pytest.mark.sampled()
def test_resources_are_valid_by_kubernetes_schemas(variant: Path, tmp_path: Path) -> None:
    """Resources are valid by Kubernetes' own schemas: no unknown field, no warning."""
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(render(variant)))
    program = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run(
        [program, "--strict", path], capture_output=True, text=True, check=False
    )
    report = result.stdout + result.stderr
    assert result.returncode == 0, report
    lines = report.splitlines()
    assert len(lines) == len(render(variant))
    assert all(line.startswith("INFO") and " passed " in line for line in lines), report


@pytest.mark.long
def test_schema_check_can_fail(tmp_path: Path) -> None:
    """The validator refuses a field that does not exist."""
    path = tmp_path / "bad.yaml"
    bad = render(KUBERNETES / "base")
    find(bad, kinds={"Deployment"}, name="worker")["spec"]["replica"] = 3
    path.write_text(yaml.safe_dump_all(bad))
    program = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run([program, "--strict", path], capture_output=True, check=False)
    assert result.returncode != 0


@pytest.mark.sampled()
def test_all_parts_are_present(resources: list[Resource]) -> None:
    """etcd, coordinators and parameter servers keep their names; workers need none."""
    kinds = {w["metadata"]["name"]: w["kind"] for w in workloads(resources)}
    assert kinds == {
        "etcd": "StatefulSet",
        "ps": "StatefulSet",
        "coordinator": "StatefulSet",
        "worker": "Deployment",
        "credentials": "Deployment",
    }


def test_names_are_unique(resources: list[Resource]) -> None:
    """A later resource of the same kind and name would replace the earlier one."""
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(names) == len(set(names))


def matches(labels: dict[str, str], selector: dict[str, Any]) -> bool:
    expressions = selector.get("matchExpressions", ())
    assert all(e["operator"] == "In" for e in expressions)
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels.get(e["key"]) in e["values"] for e in expressions
    )


def selected(resources: list[Resource], selector: dict[str, Any]) -> set[str]:
    """Names of the workloads whose pods a selector matches."""
    return {
        workload["metadata"]["name"]
        for workload in workloads(resources)
        if matches(workload["spec"]["template"]["metadata"]["labels"], selector)
    }


def test_selectors_take_their_own_pods(resources: list[Resource]) -> None:
    """A workload, Service or budget selects the pods of the workload with its own name, and no
    others."""
    own = {"Deployment", "StatefulSet", "PodDisruptionBudget"}
    for resource in resources:
        name = resource["metadata"]["name"]
        if resource["kind"] in own:
            assert selected(resources, resource["spec"]["selector"]) == {name}
        elif resource["kind"] == "Service":
            assert selected(resources, {"matchLabels": resource["spec"]["selector"]}) == {name}


@pytest.mark.sampled()
def test_budgets_leave_a_quorum(resources: list[Resource]) -> None:
    """A drain takes one etcd member, server or coordinator at a time, and never the last worker."""
    budgets = {
        r["metadata"]["name"]: r["spec"] for r in resources if r["kind"] == "PodDisruptionBudget"
    }
    assert set(budgets) == {"etcd", "ps", "coordinator", "worker"}
    for name in ("etcd", "ps", "coordinator"):
        assert budgets[name]["maxUnavailable"] == 1
    minimum = int(config(resources, "job")["SHOAL_MIN_MEMBERS"])
    assert budgets["worker"]["minAvailable"] == minimum


def test_stateful_sets_have_their_headless_service(resources: list[Resource]) -> None:
    """The Service that names a StatefulSet's pods exists and is headless."""
    for workload in workloads(resources):
        if workload["kind"] == "StatefulSet":
            service = find(resources, kinds={"Service"}, name=workload["spec"]["serviceName"])
            assert service["spec"]["clusterIP"] == "None"


def test_ports_agree(resources: list[Resource]) -> None:
    """A Service sends to a port that its pods declare, with the same number."""
    for service in (r for r in resources if r["kind"] == "Service"):
        workload = find(
            resources, kinds={"Deployment", "StatefulSet"}, name=service["metadata"]["name"]
        )
        declared = {
            port["name"]: port["containerPort"]
            for container in workload["spec"]["template"]["spec"]["containers"]
            for port in container["ports"]
        }
        for port in service["spec"]["ports"]:
            assert declared[port["targetPort"]] == port["port"]


def port_of(container: Resource, name: str) -> int:
    return next(int(p["containerPort"]) for p in container["ports"] if p["name"] == name)


def test_probes_use_declared_ports(resources: list[Resource]) -> None:
    """A probe that names a port names one of its own container."""
    for container in containers(resources):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            target = probe.get("httpGet") or probe.get("tcpSocket")
            if target:
                assert port_of(container, target["port"])


class Nothing:
    """A coordinator that knows no job."""

    def readiness(self) -> Readiness:
        return Readiness(ready=True, reason="a test")

    def jobs(self) -> Sequence[JobDetail]:
        return ()

    def job(self, name: str) -> JobDetail | None:
        return None

    async def generations(self, name: str) -> Sequence[GenerationView]:
        return ()

    def member(self, name: str, member_id: str) -> MemberView | None:
        return None

    def process(self, name: str, member_id: str) -> str | None:
        return None

    async def shards(self, job: str) -> ShardsView | None:
        return None

    def weights(self, job: str = "") -> Sequence[PublishedSeriesView]:
        return ()


async def answer(url: str) -> httpx.Response:
    """Answer of a coordinator's real HTTP side."""
    transport = httpx.ASGITransport(build_app(Nothing(), StatusBoard()))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        return await client.get(url)


@pytest.mark.long
async def test_probed_paths_are_served(resources: list[Resource]) -> None:
    """The coordinator's HTTP side serves each path that a probe or a scraper requests."""
    coordinator = find(resources, kinds={"StatefulSet"}, name="coordinator")
    [container] = coordinator["spec"]["template"]["spec"]["containers"]
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe")]
    probes.append(container["livenessProbe"]["httpGet"])
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}
    asked = {probe["path"] for probe in probes} | {"/metrics"}
    assert "/readyz?standby=1" in asked, "a follower is ready too: rollouts end"
    assert {path: (await answer(path)).status_code for path in asked} == dict.fromkeys(asked, 200)


@pytest.mark.long
@pytest.mark.sampled()
async def test_the_workers_probe_asks_for_a_member(resources: list[Resource]) -> None:
    """The coordinator decides a worker's readiness, on a path of its API."""
    worker = find(resources, kinds={"Deployment"}, name="worker")
    [container] = worker["spec"]["template"]["spec"]["containers"]
    known = variables(resources, container, first_pod(container))
    is_finished, asks = container["readinessProbe"]["exec"]["command"][-1].split(" || ")
    assert f"--finished-file={is_finished.removeprefix('test -e ')}" in container["command"]
    words = shlex.split(asks)
    words = [re.sub(r"\$([A-Z_]+)", lambda match: known[match[1]], word) for word in words]
    program, kind, urls, option, path, last = words
    assert (program, kind, option) == ("shoal-probe", "http", "--path")
    assert last.startswith("--last=/tmp/"), "the rest of the file system is read-only"
    assert urls == known["SHOAL_HTTP"]
    assert path == "/api/v1/jobs/digits/members/worker-0/readyz"
    assert known["SHOAL_TOKEN_FILE"] == f"{OWN}/token"
    refusal = await answer(f"http://coordinator:7780{path}")
    assert refusal.status_code == 404
    assert refusal.json()["kind"] == "UnknownJob", "the path is there, the job is not"


@pytest.fixture(scope="module")
def given_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the files of each part."""
    folder = tmp_path_factory.mktemp("parts")
    assert credentials.main(["files", f"--to={folder}"]) == 0
    return folder


@pytest.mark.sampled()
def test_commands_parse(resources: list[Resource], given_out: Path) -> None:
    """The program itself parses each flag, and listens where the manifests say."""
    parsed = {}
    for container in containers(resources):
        if "command" not in container and container["name"] != "etcd":
            own = f"--tls={given_out / PARTS[container['name']]}"
            options = read_config([*arguments(resources, container), own], installed_commands())
            parsed[container["name"]] = options
            assert options.listen == f"0.0.0.0:{port_of(container, 'grpc')}"
            if container["name"] == "ps":
                assert options.bulk_port == port_of(container, "bulk")
    assert set(parsed) == ROLES
    coordinator = find(resources, kinds={"StatefulSet"}, name="coordinator")
    [container] = coordinator["spec"]["template"]["spec"]["containers"]
    assert parsed["coordinator"].http == f"0.0.0.0:{port_of(container, 'http')}"


@pytest.mark.sampled()
def test_the_worker_is_started_by_shoal_run(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has the job's own settings, the pod's name, and time to drain."""
    worker = find(resources, kinds={"Deployment"}, name="worker")["spec"]["template"]["spec"]
    [container] = worker["containers"]
    known = variables(resources, container, first_pod(container))
    program, *command = expand(container["command"], known)
    assert program == "shoal"
    monkeypatch.setenv("SHOAL_COORDINATOR", known["SHOAL_COORDINATOR"])
    run = read_config([*command, *container.get("args", [])], installed_commands())
    settings = config(resources, "job")
    assert run.job == settings["SHOAL_JOB"]
    bounds = (run.min_members, run.desired_members, run.max_members)
    names = ("SHOAL_MIN_MEMBERS", "SHOAL_DESIRED_MEMBERS", "SHOAL_MAX_MEMBERS")
    assert bounds == tuple(int(settings[name]) for name in names)
    assert member_ids(replace(run, environment=known), "host") == ["worker-0"]
    spare_s = worker["terminationGracePeriodSeconds"] - run.restart.grace_s
    if "nodeAffinity" in worker["affinity"]:
        assert 0 < spare_s < worker["terminationGracePeriodSeconds"] <= 15, "what a spot node gives"
        return
    assert spare_s >= 10
    assert run.restart.grace_s > Limits().drain_s, "a drain may take so long before the last step"


def test_the_image_is_stopped_by_the_signal_that_drains() -> None:
    """SIGTERM is the signal with which kubelet, Docker and `shoal run` ask a worker to drain."""
    lines = (KUBERNETES.parent / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("STOPSIGNAL")] == ["STOPSIGNAL SIGTERM"]


def test_ready_file_is_the_one_that_is_written(resources: list[Resource]) -> None:
    """The parameter server's readiness probe checks the file of its --ready-file. Its startup probe
    does not: the server may read its journal for longer than any limit before that."""
    server = find(resources, kinds={"StatefulSet"}, name="ps")
    [container] = server["spec"]["template"]["spec"]["containers"]
    assert container["startupProbe"]["tcpSocket"] == {"port": "grpc"}
    path = container["readinessProbe"]["exec"]["command"][-1]
    assert f"--ready-file={path}" in container["args"]
    assert path.startswith("/tmp/"), "the rest of the file system is read-only"


def etcd_arguments(resources: list[Resource]) -> dict[str, str]:
    etcd = find(resources, kinds={"StatefulSet"}, name="etcd")
    [container] = etcd["spec"]["template"]["spec"]["containers"]
    given = [argument.removeprefix("--") for argument in arguments(resources, container)]
    return dict((item if "=" in item else f"{item}=true").split("=", 1) for item in given)


@pytest.mark.sampled()
def test_etcd_founders_are_the_replicas(resources: list[Resource]) -> None:
    """The initial cluster names every replica, at the peer address that it advertises."""
    etcd = find(resources, kinds={"StatefulSet"}, name="etcd")
    given = etcd_arguments(resources)
    founders = dict(item.split("=", 1) for item in given["initial-cluster"].split(","))
    replicas = [pod_name(etcd, i) for i in range(etcd["spec"]["replicas"])]
    service = etcd["spec"]["serviceName"]
    assert founders == {name: f"https://{name}.{service}:2380" for name in replicas}
    assert founders[given["name"]] == given["initial-advertise-peer-urls"]
    assert len(replicas) % 2 == 1, "an even number loses a quorum as soon as one less does"


@pytest.mark.sampled()
def test_endpoints_are_the_replicas(resources: list[Resource]) -> None:
    """Coordinators and parameter servers know each etcd member; workers know the coordinators."""
    etcd = find(resources, kinds={"StatefulSet"}, name="etcd")
    names = [pod_name(etcd, i) for i in range(etcd["spec"]["replicas"])]
    endpoints = config(resources, "endpoints")
    assert endpoints["ETCD_ENDPOINTS"].split(",") == [f"{name}.etcd:2379" for name in names]
    coordinator = find(resources, kinds={"StatefulSet"}, name="coordinator")
    pods = [pod_name(coordinator, i) for i in range(coordinator["spec"]["replicas"])]
    service = find(resources, kinds={"Service"}, name=coordinator["spec"]["serviceName"])
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    grpc = [f"{pod}.coordinator:{ports['grpc']}" for pod in pods]
    http = [f"https://{pod}.coordinator:{ports['http']}" for pod in pods]
    assert endpoints["SHOAL_COORDINATOR"].split(",") == grpc
    assert endpoints["SHOAL_HTTP"].split(",") == http


def admitted(resources: list[Resource]) -> dict[tuple[str, str], set[str]]:
    """Allowed callers by workload and port. `*` is any port; a namespace is given by its name."""
    found: dict[tuple[str, str], set[str]] = {}
    for policy in (r["spec"] for r in resources if r["kind"] == "NetworkPolicy"):
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy.get("ingress", ()):
            sources: set[str] = set()
            for source in rule["from"]:
                if "podSelector" in source:
                    assert "namespaceSelector" not in source
                    sources |= selected(resources, source["podSelector"])
                else:
                    labels = source["namespaceSelector"]["matchLabels"]
                    sources.add(f"namespace {labels['kubernetes.io/metadata.name']}")
            for workload in selected(resources, policy["podSelector"]):
                for port in [entry["port"] for entry in rule.get("ports", ())] or ["*"]:
                    found.setdefault((workload, port), set()).update(sources)
    return found


@pytest.mark.sampled()
def test_each_port_admits_only_its_callers(resources: list[Resource]) -> None:
    """A policy that selects all pods admits no caller, so that only the ports of the other policies
    are open."""
    policies = {r["metadata"]["name"]: r["spec"] for r in resources if r["kind"] == "NetworkPolicy"}
    everybody = {workload["metadata"]["name"] for workload in workloads(resources)}
    assert selected(resources, policies["shoal"]["podSelector"]) == everybody
    assert "ingress" not in policies["shoal"]
    assert admitted(resources) == {
        ("etcd", "client"): {"etcd", "coordinator", "ps"},
        ("etcd", "peer"): {"etcd"},
        ("etcd", "metrics"): {"namespace monitoring"},
        ("coordinator", "grpc"): {"coordinator", "worker"},
        ("coordinator", "http"): {"worker", "namespace monitoring"},
        ("ps", "grpc"): {"coordinator", "ps", "worker"},
        ("ps", "bulk"): {"ps", "worker"},
        ("worker", "*"): {"worker"},
    }
    for workload, port in admitted(resources):
        kinds = {"Deployment", "StatefulSet"}
        [container] = find(resources, kinds=kinds, name=workload)["spec"]["template"]["spec"][
            "containers"
        ]
        assert port == "*" or port_of(container, port)


@pytest.mark.sampled()
def test_each_role_has_an_image_that_the_compose_file_builds(resources: list[Resource]) -> None:
    compose = yaml.safe_load((KUBERNETES.parents[1] / "docker-compose.yml").read_text())
    built = {
        re.sub(r"\$\{\w+:-(\w+)\}", r"\1", service["image"])
        for service in compose["services"].values()
    }
    images = {c["name"]: c["image"] for c in containers(resources)}
    cuda = images["worker"] == "shoal/worker-cuda:dev"
    assert set(images.values()) - {"shoal/worker-cuda:dev"} == built - (
        {"shoal/worker:dev"} if cuda else set()
    )
    assert images["credentials"] == images["coordinator"]


# --- certificates ---

PARTS = {"etcd": "etcd", "coordinator": "coordinator", "ps": "server", "worker": "worker"}


def secrets_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [volume["secret"] for volume in pod.get("volumes", ()) if "secret" in volume]


@pytest.mark.sampled()
def test_every_part_uses_tls_with_its_own_files(resources: list[Resource]) -> None:
    """Parts never use --insecure or an address without TLS. Each mounts its own Secret, and waits
    until each file of it exists."""
    text = json.dumps([workload["spec"] for workload in workloads(resources)])
    assert "insecure" not in text
    assert set(re.findall(r"http://[^\"]*", text)) == {"http://0.0.0.0:2381"}, "etcd's health only"
    for workload in workloads(resources):
        name, pod = workload["metadata"]["name"], workload["spec"]["template"]["spec"]
        if name == "credentials":
            assert secrets_of(pod) == []
            continue
        [secret] = secrets_of(pod)
        assert secret["secretName"] == f"shoal-{PARTS[name]}"
        assert "optional" not in secret
        assert {item["key"]: item["path"] for item in secret["items"]} == {
            file: file for file in credentials.parts()[PARTS[name]]
        }
        # Readable for the pod's group, and for no other.
        assert secret["defaultMode"] == 0o440
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        [container] = pod["containers"]
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "own"]
        assert (mount["mountPath"], mount["readOnly"]) == (OWN, True)
        if name != "etcd":
            assert {"name": "SHOAL_TLS", "value": OWN} in container["env"]


@pytest.mark.sampled()
def test_files_that_are_named_are_those_of_the_secret(resources: list[Resource]) -> None:
    for name, part in PARTS.items():
        workload = find(resources, kinds={"Deployment", "StatefulSet"}, name=name)
        named = set(re.findall(rf"{OWN}/([\w.-]+)", json.dumps(workload)))
        assert named <= set(credentials.parts()[part])
    given = etcd_arguments(resources)
    for option in ("client-cert-auth", "peer-client-cert-auth"):
        assert given[option] == "true"
    for option in ("listen-client-urls", "advertise-client-urls", "listen-peer-urls"):
        assert given[option].startswith("https://")


@pytest.mark.sampled()
def test_the_maker_of_secrets_may_patch_only_these(resources: list[Resource]) -> None:
    """The maker reads only its own Secret. All exist, empty, so that it need not create any."""
    role = find(resources, kinds={"Role"}, name="credentials")["rules"]
    may = {
        (verb, name) for rule in role for verb in rule["verbs"] for name in rule["resourceNames"]
    }
    assert {kind for rule in role for kind in rule["resources"]} == {"secrets"}
    parts = {f"shoal-{part}" for part in credentials.parts()}
    own = f"shoal-{credentials.AUTHORITY}"
    assert may == {("get", own), ("patch", own), *(("patch", part) for part in parts)}
    made = {r["metadata"]["name"]: r for r in resources if r["kind"] == "Secret"}
    assert set(made) == {own, *parts}
    assert not [secret for secret in made.values() if {"data", "stringData"} & set(secret)]
    binding = find(resources, kinds={"RoleBinding"}, name="credentials")
    maker = find(resources, kinds={"Deployment"}, name="credentials")
    account = maker["spec"]["template"]["spec"]["serviceAccountName"]
    [subject] = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
    assert subject["namespace"] == maker["metadata"]["namespace"]
    assert maker["spec"]["replicas"] == 1 and maker["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.sampled()
def test_the_maker_of_secrets_names_every_etcd(resources: list[Resource]) -> None:
    maker = find(resources, kinds={"Deployment"}, name="credentials")
    [container] = maker["spec"]["template"]["spec"]["containers"]
    program, *command = container["command"]
    assert program == "shoal-credentials"
    options = credentials.build_parser().parse_args(command)
    assert options.give is credentials.to_secrets
    assert options.prefix == "shoal"
    assert 2 * options.every <= options.valid
    etcd = find(resources, kinds={"StatefulSet"}, name="etcd")
    members = {f"{pod_name(etcd, i)}.etcd" for i in range(etcd["spec"]["replicas"])}
    assert members <= set(options.etcd_host)


def test_journals_and_etcd_outlive_their_pods(resources: list[Resource]) -> None:
    for name, path in (("ps", "--journal="), ("etcd", "--data-dir=")):
        workload = find(resources, kinds={"StatefulSet"}, name=name)["spec"]
        [claim] = workload["volumeClaimTemplates"]
        [container] = workload["template"]["spec"]["containers"]
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        [kept] = [a.removeprefix(path) for a in container["args"] if a.startswith(path)]
        assert kept.startswith(mounts[claim["metadata"]["name"]] + "/")


@pytest.mark.sampled()
def test_pods_have_no_privileges(resources: list[Resource]) -> None:
    """Pods run as non-root, gain no privilege or capability, and have a read-only root."""
    for workload in workloads(resources):
        pod = workload["spec"]["template"]["spec"]
        asks_the_api = workload["metadata"]["name"] == "credentials"
        assert pod["automountServiceAccountToken"] is asks_the_api
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]


@pytest.mark.sampled()
def test_pods_declare_resources_and_time_to_stop(resources: list[Resource]) -> None:
    """Pods have requests for the scheduler, a memory limit for the node, and time to stop for the
    drain."""
    for workload in workloads(resources):
        pod = workload["spec"]["template"]["spec"]
        on_spot = "nodeAffinity" in pod.get("affinity", {})
        assert on_spot or pod["terminationGracePeriodSeconds"] >= 30
        if workload["metadata"]["name"] == "credentials":
            continue  # one pod without clients
        assert pod["affinity"]["podAntiAffinity"]
        for container in pod["containers"]:
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            assert "readinessProbe" in container


@pytest.mark.sampled()
def test_mounts_have_volumes(resources: list[Resource]) -> None:
    """Mounts name a volume of the pod or a claim of the set."""
    for workload in workloads(resources):
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        volumes |= {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.sampled()
def test_job_settings_are_consistent(resources: list[Resource]) -> None:
    """The job's bounds admit the deployed number of workers."""
    job = config(resources, "job")
    workers = find(resources, kinds={"Deployment"}, name="worker")["spec"]["replicas"]
    least, most = int(job["SHOAL_MIN_MEMBERS"]), int(job["SHOAL_MAX_MEMBERS"])
    assert least <= int(job["SHOAL_DESIRED_MEMBERS"]) == workers <= most


def test_an_unknown_kustomization_field_is_refused(tmp_path: Path) -> None:
    """The renderer does not silently skip a field."""
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: a-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        render(tmp_path)
