"""A Kubernetes cluster of two nodes on one machine, built from Debian's source package.

Needs root and the programs in PROGRAMS. API server, controller manager, scheduler and kubelet are
those of Debian 12 (1.20.2), compiled once with Debian's Go into `cache`, which takes ten minutes on
two cores. A node is a kubelet with a Docker engine and a bridge of its own; pods of both nodes
reach each other through the host. There is no kube-proxy, as Shoal's Services are headless: the
only virtual address is the API server's own. A DNS server answers with the Endpoints.

`close` ends all processes, by their ids, and removes bridges and files, but not `cache`. No file of
the host is changed; sysctls and a forwarding rule are set, and set back.
"""

import functools
import hashlib
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from deploy.campaign import NotPossible, awaited, require_programs
from deploy.stack import IMAGES, ROOT, run
from support.network.ports import free_port

from shoal_client.local.etcd import find_etcd

GO = Path("/usr/lib/go-1.19/bin")
PROGRAMS = (
    str(GO / "go"),
    "dockerd",
    "docker",
    "mmdebstrap",
    "dpkg-source",
    "rsync",
    "socat",
    "openssl",
    "ip",
    "iptables",
    "kubectl",
)
PACKAGES = (
    "golang-1.19-go docker.io mmdebstrap dpkg-dev rsync socat openssl iproute2 iptables"
    " kubernetes-client"
)
VERSION = "1.20.2"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
MIRROR = os.environ.get("SHOAL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PODS = "10.231.0.0/16"
SERVICES = "10.231.0.0/24"
API = "10.231.0.1"
"""The first address of SERVICES, which is that of the Service `kubernetes`."""
NUM_VOLUMES = 6
BUILD_S = 3600.0
"""Limit of a command: to build Kubernetes takes ten minutes on two idle cores."""
BASE = "shoal-kubernetes-base"
PAUSE = "shoal-kubernetes-pause"
SYSCTLS = ("net.ipv4.ip_forward", "vm.overcommit_memory", "kernel.panic", "kernel.panic_on_oops")
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "readOnlyPort": 0,
    "healthzPort": 0,
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "imageGCHighThresholdPercent": 100,
    "imageGCLowThresholdPercent": 99,
    "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
    "clusterDNS": [API],
    "clusterDomain": "cluster.local",
    "resolvConf": "/dev/null",
    "authorization": {"mode": "Webhook"},
    "nodeStatusUpdateFrequency": "5s",
}
slowly_awaited = functools.partial(awaited, every_s=1.0)
"""`awaited` for looks that start kubectl, which takes a good part of a second of a core."""


def _run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Standard output of a command, with further variables in its environment."""
    environment = {**os.environ, **variables}
    return run(*map(str, command), cwd=cwd, environment=environment, timeout_s=BUILD_S)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A kubelet and its Docker engine."""

    name: str
    number: int
    root: Path

    @property
    def address(self) -> str:
        return f"10.231.{self.number}.1"

    @property
    def bridge(self) -> str:
        return f"shoal-kube{self.number}"

    @property
    def docker(self) -> str:
        return f"unix://{self.root}/docker.sock"


class Components:
    """The programs of Kubernetes and the base of the images, made once and kept in a folder."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def path(self, name: str) -> Path:
        """The program of a component, for example the kubelet."""
        return self._cache / "bin" / name

    @property
    def base(self) -> Path:
        """Archive of the root file system of a Debian with Python and etcd."""
        return self._cache / "base.tar"

    def make(self) -> None:
        """Build what is missing."""
        self._cache.mkdir(parents=True, exist_ok=True)
        if not all(self.path(name).exists() for name in COMPONENTS):
            self._build()
        if not self.base.exists():
            packages = "python3,python3-venv,ca-certificates,etcd-server"
            made = self.base.with_suffix(".new")
            _run(
                "mmdebstrap",
                "--variant=minbase",
                f"--include={packages}",
                "--format=tar",
                "bookworm",
                made,
                MIRROR,
            )
            made.rename(self.base)

    def _build(self) -> None:
        print(f"building Kubernetes {VERSION} in {self._cache}: about ten minutes", flush=True)
        source = self._cache / "source"
        if not source.exists():
            _run("dpkg-source", "--no-check", "-x", self._download(), source.with_suffix(".new"))
            source.with_suffix(".new").rename(source)
        # Without CAP_SYS_RESOURCE, as in containers, no process can protect itself from a lack of
        # memory, and the sandboxes of pods do not start.
        code = source / "pkg/kubelet/dockershim/docker_sandbox.go"
        text = code.read_text()
        code.write_text(
            text.replace("defaultSandboxOOMAdj int = -998", "defaultSandboxOOMAdj int = 0")
        )
        version = self._cache / "version.sh"
        major, minor, _ = VERSION.split(".")
        version.write_text(
            f"KUBE_GIT_COMMIT=debian\nKUBE_GIT_TREE_STATE=clean\nKUBE_GIT_VERSION=v{VERSION}\n"
            f"KUBE_GIT_MAJOR={major}\nKUBE_GIT_MINOR={minor}\n"
        )
        go = {"GOCACHE": "gocache", "GOTMPDIR": "gotmp"}
        for name in go.values():
            (self._cache / name).mkdir(exist_ok=True)
        _run(
            *("make", "WHAT=" + " ".join(f"cmd/{name}" for name in COMPONENTS)),
            cwd=source,
            PATH=f"{GO}:{os.environ['PATH']}",
            KUBE_GIT_VERSION_FILE=str(version),
            GOFLAGS="-mod=vendor",
            GOPROXY="off",
            GOSUMDB="off",
            CGO_ENABLED="0",
            **{key: str(self._cache / name) for key, name in go.items()},
        )
        made = (
            source
            / "_output"
            / "local"
            / "bin"
            / "linux"
            / _run("dpkg", "--print-architecture").strip()
        )
        self.path("").mkdir(exist_ok=True)
        for name in COMPONENTS:
            shutil.copy2(made / name, self.path(name))
        # The source with its object files has 6 GB.
        for name in ("source", *go.values()):
            shutil.rmtree(self._cache / name)

    def _download(self) -> Path:
        """Fetch the source package, by lists of packages of its own."""
        apt = self._cache / "apt"
        (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (apt / "sources.list").write_text(f"deb-src [signed-by={KEYS}] {MIRROR} bookworm main\n")
        options = [
            *("-o", f"Dir::Etc::sourcelist={apt}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
            *("-o", f"Dir::State::lists={apt}/lists"),
        ]
        _run("apt-get", *options, "update")
        _run("apt-get", *options, "source", "--download-only", "kubernetes", cwd=self._cache)
        [found] = self._cache.glob("kubernetes_*.dsc")
        return found


class KubernetesCluster:
    """The cluster, with Shoal's images on its nodes, for `running`."""

    def __init__(self, cache: Path, num_nodes: int = 2) -> None:
        require_programs(PROGRAMS, "bridges, dockerd and kubelet", PACKAGES)
        if " " in str(cache):
            raise NotPossible(f"{cache}: the folder's name must not contain a space")
        self._cache = cache
        self._components = Components(cache)
        self.root = Path(
            tempfile.mkdtemp(prefix=f"shoal-kubernetes-{os.getpid()}-", dir="/var/tmp")
        )
        self.nodes = [
            Node(name=f"node{number}", number=number, root=self.root / f"node{number}")
            for number in range(1, num_nodes + 1)
        ]
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._sysctls = {name: _run("sysctl", "-n", name).strip() for name in SYSCTLS}
        self._pki = self.root / "pki"
        self._dns: Dns | None = None

    @property
    def kubeconfig(self) -> Path:
        """Settings by which kubectl reaches the cluster as its administrator."""
        return self._pki / "admin.conf"

    def start(self) -> None:
        self._components.make()
        self._make_network()
        self._make_certificates()
        for node in self.nodes:
            self._start_docker(node)
        self._make_images()
        self._start_control_plane()
        self._dns = Dns(self._pki)
        for node in self.nodes:
            self._start_kubelet(node)
        self._make_volumes()

    def close(self) -> None:
        """End all processes of the cluster, and remove its bridges and files."""
        # Kubelets first: they would start containers again.
        for name in sorted(self._started, key=lambda each: not each.startswith("kubelet")):
            if name.startswith("docker"):
                node = next(each for each in self.nodes if name.endswith(each.name))
                with suppress(AssertionError):
                    left = _run("docker", "-H", node.docker, "ps", "-aq").split()
                    if left:
                        _run("docker", "-H", node.docker, "rm", "-f", *left)
            process = self._started[name]
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._dns is not None:
            self._dns.close()
        for node in self.nodes:
            subprocess.run(["ip", "link", "del", node.bridge], check=False, capture_output=True)
        subprocess.run(self._forwarding("-D"), check=False, capture_output=True)
        for name, value in self._sysctls.items():
            _run("sysctl", "-q", f"{name}={value}")
        shutil.rmtree(self.root, ignore_errors=True)

    # --- start ---

    def _make_network(self) -> None:
        _run("sysctl", "-q", "net.ipv4.ip_forward=1")
        _run(*self._forwarding("-I"))
        for node in self.nodes:
            _run("ip", "link", "add", node.bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{node.address}/24", "dev", node.bridge)
            _run("ip", "link", "set", node.bridge, "up")
        _run("ip", "addr", "add", f"{API}/32", "dev", self.nodes[0].bridge)

    @staticmethod
    def _forwarding(action: str) -> list[str]:
        return ["iptables", action, "FORWARD", "-s", PODS, "-d", PODS, "-j", "ACCEPT"]

    def _make_certificates(self) -> None:
        self._pki.mkdir()
        names = {
            "apiserver": (
                "/CN=kube-apiserver",
                f"DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:{API}",
            ),
            "admin": ("/O=system:masters/CN=admin", ""),
            "kube-controller-manager": ("/CN=system:kube-controller-manager", ""),
            "kube-scheduler": ("/CN=system:kube-scheduler", ""),
            "to-kubelets": ("/O=system:masters/CN=apiserver-kubelet-client", ""),
        }
        for node in self.nodes:
            subject = f"/O=system:nodes/CN=system:node:{node.name}"
            names[node.name] = (subject, f"DNS:{node.name},IP:{node.address}")
        ca = ("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=shoal-kubernetes", "-days", "30")
        usage = "keyUsage=critical,keyCertSign,cRLSign"
        _run(
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            *ca,
            "-addext",
            usage,
            cwd=self._pki,
        )
        for name, (subject, hosts) in names.items():
            request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
            _run("openssl", "req", "-newkey", "rsa:2048", "-nodes", *request, cwd=self._pki)
            extensions = "keyUsage=critical,digitalSignature,keyEncipherment\n"
            extensions += "extendedKeyUsage=serverAuth,clientAuth\n"
            if hosts:
                extensions += f"subjectAltName={hosts}\n"
            (self._pki / f"{name}.ext").write_text(extensions)
            signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30")
            files = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext")
            _run("openssl", "x509", "-req", *files, *signer, cwd=self._pki)
            self._write_kubeconfig(name)
        _run("openssl", "genrsa", "-out", "accounts.key", "2048", cwd=self._pki)
        _run(
            "openssl",
            "rsa",
            "-in",
            "accounts.key",
            "-pubout",
            "-out",
            "accounts.pub",
            cwd=self._pki,
        )

    def _write_kubeconfig(self, name: str) -> None:
        cluster = {"server": f"https://{API}:443", "certificate-authority": f"{self._pki}/ca.crt"}
        user = {
            "client-certificate": f"{self._pki}/{name}.crt",
            "client-key": f"{self._pki}/{name}.key",
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": name}}],
            "current-context": "own",
        }
        (self._pki / f"{name}.conf").write_text(yaml.safe_dump(config))

    def _start_docker(self, node: Node) -> None:
        """Start the engine with mounts of its own, which the node's kubelet shares: kubelets remove
        what they do not know from /var/log/pods, and so the logs of another node's pods."""
        (node.root / "log").mkdir(parents=True)
        own = f'mount --bind {node.root}/log /var/log && exec "$@"'
        self._start(
            f"docker-{node.name}",
            ("unshare", "--mount", "--propagation=private", "sh", "-c", own, "sh"),
            f"""dockerd --host={node.docker} --bridge={node.bridge} --iptables=false --ip-masq=false
            --data-root={node.root}/docker --exec-root={node.root}/run
            --pidfile={node.root}/docker.pid --exec-opt=native.cgroupdriver=cgroupfs
            --storage-driver=overlay2""",
        )
        slowly_awaited(
            lambda: self._answers("docker", "-H", node.docker, "info"),
            60,
            f"{node.name}'s Docker engine",
        )

    def _make_images(self) -> None:
        """Load Shoal's images into all nodes; build them first if they are not those of this
        tree."""
        saved = self._cache / f"images-{_tree()}.tar"
        if not saved.exists():
            for old in self._cache.glob("images-*.tar"):
                old.unlink()
            made = self._build_images(("docker", "-H", self.nodes[0].docker))
            _run(
                "docker", "-H", self.nodes[0].docker, "save", "-o", saved.with_suffix(".new"), *made
            )
            saved.with_suffix(".new").rename(saved)
        for node in self.nodes:
            _run("docker", "-H", node.docker, "load", "-i", saved)

    def _build_images(self, docker: Sequence[str]) -> list[str]:
        """Build the images of all roles, and that of the sandboxes of pods; return their names."""
        _run(*docker, "import", self._components.base, BASE)
        wheels = any((ROOT / "deploy/offline/wheels").glob("*.whl"))
        arguments = (f"--build-arg=BASE={BASE}", f"--build-arg=PIP_NO_INDEX={int(wheels)}")
        build = (*docker, "build", "--network=host", *arguments, "-f", "deploy/Dockerfile")
        made = [PAUSE]
        for name in IMAGES:
            target = "--target=etcd" if name == "etcd" else f"--build-arg=LOCK={name}"
            made.append(f"shoal/{name}:dev")
            _run(*build, target, "-t", made[-1], ".", cwd=ROOT, DOCKER_BUILDKIT="0")
        # Ends at SIGTERM, which a shell or `sleep` as process 1 would ignore.
        pause = "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
        entry = f"ENTRYPOINT {json.dumps(['sh', '-c', pause])}"
        _run(*docker, "import", f"--change={entry}", self._components.base, PAUSE)
        return made

    def _start_control_plane(self) -> None:
        pki, etcd = self._pki, f"http://127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd",
            (),
            f"""{find_etcd()} --data-dir={self.root}/etcd --listen-client-urls={etcd}
            --advertise-client-urls={etcd} --listen-peer-urls={peer}
            --initial-advertise-peer-urls={peer} --initial-cluster=default={peer}""",
        )
        self._start(
            "api",
            (),
            f"""{self._components.path("kube-apiserver")} --bind-address={API} --secure-port=443
            --advertise-address={API} --etcd-servers={etcd} --service-cluster-ip-range={SERVICES}
            --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction
            --anonymous-auth=false --client-ca-file={pki}/ca.crt
            --tls-cert-file={pki}/apiserver.crt --tls-private-key-file={pki}/apiserver.key
            --kubelet-client-certificate={pki}/to-kubelets.crt
            --kubelet-client-key={pki}/to-kubelets.key
            --kubelet-certificate-authority={pki}/ca.crt
            --kubelet-preferred-address-types=InternalIP --endpoint-reconciler-type=lease
            --service-account-issuer=https://kubernetes.default.svc
            --service-account-key-file={pki}/accounts.pub
            --service-account-signing-key-file={pki}/accounts.key""",
        )
        ready = (*self._kubectl, "get", "--raw=/readyz")
        slowly_awaited(lambda: self._answers(*ready), 120, "the API server")
        both = "--bind-address=127.0.0.1 --port=0 --leader-elect=false --secure-port={} {}"
        for name, own in (
            (
                "kube-controller-manager",
                f"""--root-ca-file={pki}/ca.crt --use-service-account-credentials
                --service-account-private-key-file={pki}/accounts.key""",
            ),
            ("kube-scheduler", ""),
        ):
            config = f"{pki}/{name}.conf"
            self._start(
                name,
                (),
                f"""{self._components.path(name)} --kubeconfig={config}
                --authentication-kubeconfig={config} --authorization-kubeconfig={config}
                {both.format(free_port(), own)}""",
            )

    def _start_kubelet(self, node: Node) -> None:
        pki = self._pki
        settings = {
            **KUBELET,
            "address": node.address,
            "tlsCertFile": f"{pki}/{node.name}.crt",
            "tlsPrivateKeyFile": f"{pki}/{node.name}.key",
        }
        settings["authentication"] = {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        }
        path = node.root / "kubelet.yaml"
        path.write_text(yaml.safe_dump(settings))
        docker = self._started[f"docker-{node.name}"]
        self._start(
            f"kubelet-{node.name}",
            ("nsenter", f"--target={docker.pid}", "--mount"),
            f"""{self._components.path("kubelet")} --config={path}
            --kubeconfig={pki}/{node.name}.conf --hostname-override={node.name}
            --node-ip={node.address} --root-dir={node.root}/kubelet
            --cert-dir={node.root}/certificates --container-runtime=docker
            --docker-endpoint={node.docker} --network-plugin= --cni-bin-dir=/nonexistent
            --pod-infra-container-image={PAUSE}""",
        )
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        look = (*self._kubectl, "get", "node", node.name, "-o", ready)
        slowly_awaited(lambda: self._answers(*look) == "True", 120, f"{node.name} that is ready")

    def _make_volumes(self) -> None:
        """Make volumes of folders that both nodes see, so that a drained pod keeps its data."""
        volumes = []
        for number in range(NUM_VOLUMES):
            folder = self.root / "volumes" / str(number)
            folder.mkdir(parents=True)
            os.chown(folder, 10001, 10001)
            volumes.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": f"volume-{number}"},
                    "spec": {
                        "capacity": {"storage": "30Gi"},
                        "accessModes": ["ReadWriteOnce"],
                        "persistentVolumeReclaimPolicy": "Retain",
                        "hostPath": {"path": str(folder)},
                    },
                }
            )
        path = self.root / "volumes.yaml"
        path.write_text(yaml.safe_dump_all(volumes))
        _run(*self._kubectl, "apply", "-f", path)

    @property
    def _kubectl(self) -> tuple[str, str]:
        return "kubectl", f"--kubeconfig={self.kubeconfig}"

    def _answers(self, *command: str) -> str:
        """The command's output; empty if it fails. Raises AssertionError if a process of the
        cluster has ended."""
        ended = [name for name, process in self._started.items() if process.poll() is not None]
        assert not ended, f"{ended}: {self._log(ended[0])}"
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def _start(self, name: str, within: Sequence[str], command: str) -> None:
        """Start a process; `within`: the command that sets up its surroundings. Its arguments
        contain no spaces."""
        with (self.root / f"{name}.log").open("ab") as log:
            self._started[name] = subprocess.Popen(
                [*within, *command.split()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")[-3000:]


class Dns:
    """A DNS server at the API server's address: names of headless Services and their pods."""

    def __init__(self, pki: Path) -> None:
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._names: Mapping[str, Sequence[str]] = {}
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((API, 53))
        self._socket.settimeout(0.5)
        self._threads = [
            threading.Thread(target=each, name=f"shoal-dns-{each.__name__}", daemon=True)
            for each in (self._follow, self._serve)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _follow(self) -> None:
        """Read all Endpoints every half second."""
        with httpx.Client(base_url=f"https://{API}", verify=self._context, timeout=5.0) as client:
            while not self._closed.wait(0.5):
                with suppress(httpx.HTTPError, ValueError):  # The API server is busy.
                    self._names = _names_of(client.get("/api/v1/endpoints").json()["items"])

    def _serve(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError, struct.error, IndexError):  # no question, or a bad one
                question, sender = self._socket.recvfrom(512)
                self._socket.sendto(self._answer(question), sender)

    def _answer(self, question: bytes) -> bytes:
        """The answer to a question (RFC 1035), with the addresses of type A."""
        labels, at = [], 12
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode())
            at += 1 + size
        (kind,) = struct.unpack_from(">H", question, at + 1)
        name = ".".join(labels).lower()
        found = self._names.get(name)
        addresses = found if found and kind == 1 else ()
        flags = 0x8580 if found is not None else 0x8583
        answer = question[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0)
        answer += question[12 : at + 5]
        for address in addresses:
            answer += b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(address)
        return answer


def _names_of(endpoints: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {"kubernetes.default.svc.cluster.local": [API]}
    for each in endpoints:
        service = f"{each['metadata']['name']}.{each['metadata']['namespace']}.svc.cluster.local"
        names.setdefault(service, [])
        for subset in each.get("subsets") or ():
            for address in subset.get("addresses") or ():
                names[service].append(address["ip"])
                if host := address.get("hostname"):
                    names.setdefault(f"{host}.{service}", []).append(address["ip"])
    return names


def _tree() -> str:
    """A digest of all files that enter the images."""
    files = ["proto", "client", "worker", "server", "deploy", "pyproject.toml", "hatch_build.py"]
    listed = _run("git", "ls-files", "--stage", "--", *files, cwd=ROOT)
    changed = _run("git", "diff", "--", *files, cwd=ROOT)
    return hashlib.sha256((listed + changed).encode()).hexdigest()[:16]
