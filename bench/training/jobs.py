"""Starts the same training on Shoal and on its peers, four workers each.

A killed worker is restarted at once: by `shoal run`, by torchrun's agent, or by this module for
torchft, which leaves restarts to its user.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
from training.steps import Steps

from shoal_client.local.cluster import LocalCluster
from shoal_client.local.process import ChildCommand, Process, Supervisor

NUM_WORKERS = 4
START_S = 120.0
HERE = Path(__file__).parent
TUNED_RDZV = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=10"
"""Settings of torchrun's rendezvous. With its defaults (30 s, 5 s, 3 and 60 s) losses and joins
take longer. With 2 attempts, torchrun treated a busy machine as lost, and the job split in two.
`read_timeout` limits an agent's wait for a value that a lost machine never wrote to the store."""


def environment(**more: str) -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


class ShoalJob:
    """A job of `shoal run` in the cluster, whose workers run inside its `with` block."""

    def __init__(
        self,
        cluster: LocalCluster,
        directory: Path,
        *,
        max_members: int,
        script: tuple[str, ...] = ("on_shoal.py",),
        restarts: bool = True,
        num_workers: int = NUM_WORKERS,
        min_members: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`script`: name of the script, and its arguments after the directory. `restarts`: True if
        one launcher starts all workers, and restarts a killed one at once; if False, each worker
        has its own launcher, and the caller launches a new one. `variables`: environment variables
        of the workers."""
        self._restarts, self._variables = restarts, variables
        self._num_workers, self._min_members = num_workers, min_members
        self._cluster = cluster
        self._script, *self._script_arguments = script
        self._directory = directory
        self._max_members = max_members
        self._supervisor = Supervisor(grace_s=2.0)
        self.name = directory.name
        self.steps = Steps(directory)
        self.launched: list[Process] = []
        """All launchers, in the order of their starts."""

    def __enter__(self) -> "ShoalJob":
        self._directory.mkdir()
        self._supervisor.__enter__()
        if self._restarts:
            self.launch(self._num_workers)
        for _ in range(0 if self._restarts else self._num_workers):
            self.launch(1, max_restarts=0)
        return self

    def __exit__(self, *error: object) -> None:
        self._supervisor.close()

    def launch(self, num_workers: int, *, max_restarts: int = 1000) -> Process:
        """Start another `shoal run` on this host."""
        number = len(list(self._directory.glob("launcher-*.log")))
        process = self._supervisor.spawn(
            shoal_launcher(
                self._cluster.coordinator,
                self._directory,
                name=f"launcher-{number}",
                job=self.name,
                options={
                    "-n": num_workers,
                    "--desired": self._num_workers,
                    "--max": self._max_members,
                    "--min": self._min_members,
                    "--max-restarts": max_restarts,
                },
                script=(self._script, str(self._directory), *self._script_arguments),
                variables=self._variables,
            )
        )
        self.launched.append(process)
        return process

    def num_standbys(self) -> int:
        """Return the number of standby members according to the coordinator."""
        url = f"{self._cluster.http_url}/api/v1/jobs/{self.name}/members"
        members = httpx.get(url, trust_env=False).raise_for_status().json()
        return sum(member["member"]["state"] == "standby" for member in members)

    def logs(self) -> str:
        return logs_in(self._directory)


def shoal_launcher(
    coordinator: str,
    directory: Path,
    *,
    name: str,
    job: str,
    options: Mapping[str, object],
    script: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ChildCommand:
    """Return the command of a `shoal run`. `script`: name of a script in this folder, and its
    arguments."""
    return ChildCommand(
        name=name,
        arguments=(
            *(sys.executable, "-m", "shoal_client", "run"),
            *("--job", job, "--coordinator", coordinator),
            *(str(part) for option in options.items() for part in option),
            *(str(HERE / script[0]), *script[1:]),
        ),
        environment=environment(**variables),
        log_path=directory / f"{name}.log",
    )


def python_script(
    python: str, directory: Path, name: str, script: str, *arguments: str
) -> ChildCommand:
    """Return the command that runs a script of this folder with that interpreter."""
    return ChildCommand(
        name=name,
        arguments=(python, str(HERE / script), *arguments),
        environment=environment(),
        log_path=directory / f"{name}.log",
    )


@contextmanager
def torchft_job(python: str, directory: Path) -> Iterator[Steps]:
    """Run four replica groups of one worker each, and a lighthouse."""
    directory.mkdir()

    def start(name: str, *arguments: str) -> Process:
        return supervisor.spawn(python_script(python, directory, name, "on_torchft.py", *arguments))

    def worker(number: int) -> Process:
        return start(f"worker-{number}", "worker", str(directory), str(number))

    def restart(process: Process) -> None:
        kind, _, number = process.name.partition("-")
        if kind == "worker" and not closing:
            worker(int(number))

    closing: list[bool] = []
    with Supervisor(on_exit=restart, grace_s=0.5) as supervisor:
        try:
            start("lighthouse", "lighthouse", str(directory))
            await_file(directory / "lighthouse")
            for number in range(NUM_WORKERS):
                worker(number)
            yield Steps(directory)
        finally:
            closing.append(True)


@contextmanager
def torchrun_job(directory: Path, port: int, script: str = "on_torchrun.py") -> Iterator[Steps]:
    """Run four nodes of one worker each; the first hosts the store of their rendezvous."""
    directory.mkdir()
    with Supervisor(grace_s=2.0) as supervisor:
        for number in range(NUM_WORKERS):
            supervisor.spawn(torchrun_node(directory, port, number, script))
        yield Steps(directory)


def torchrun_node(directory: Path, port: int, number: int, script: str) -> ChildCommand:
    is_host = "true" if number == 0 else "false"
    return torchrun_agent(
        directory,
        name=f"node-{number}",
        port=port,
        max_nodes=NUM_WORKERS,
        conf=f"last_call_timeout=1,is_host={is_host}",
        script=(script, str(directory)),
    )


def torchrun_agent(
    directory: Path,
    *,
    name: str,
    port: int,
    max_nodes: int,
    conf: str,
    script: Sequence[str],
    attempt: int = 0,
) -> ChildCommand:
    """Return the command of a node with one worker. `conf`: options of the rendezvous; `port`: port
    of its store; `attempt`: number of times that the whole job was started anew."""
    return ChildCommand(
        name=name,
        arguments=(
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--rdzv-id={directory.name}-{attempt}", f"--nnodes=1:{max_nodes}"),
            # An agent that is killed leaves its folder of logs behind, by default in /tmp.
            *("--nproc-per-node=1", f"--log-dir={directory}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *(f"--rdzv-conf={conf}", "--max-restarts=1000"),
            *(str(HERE / script[0]), *script[1:]),
        ),
        environment=environment(
            # A new store for every restart: otherwise restarted workers read stale addresses.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            # Each node has one worker: agents know their ranks without a wait for rank 0.
            TORCH_ELASTIC_WORKER_IDENTICAL="1",
        ),
        log_path=directory / f"{name}.log",
    )


def await_file(path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{path.name} did not start:\n{logs_in(path.parent)}")
        time.sleep(0.05)


def logs_in(directory: Path) -> str:
    """Return the end of every log in the directory."""
    texts: Sequence[Path] = sorted(directory.glob("*.log"))
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in texts)
