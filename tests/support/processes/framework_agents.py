"""Agents of torchrun and accelerate on a Shoal cluster, which run a framework's script."""

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal_client.local.process import ChildCommand, Process, Supervisor

EXAMPLES = Path(__file__).parents[3] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ACCELERATE_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
RDZV_CONF = "last_call_timeout=60"
_EPOCH = re.compile(r"^epoch (\d+) on (\d+) ranks: loss ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch, as rank 0 printed it."""

    number: int
    ranks: int
    loss: float


@dataclass(kw_only=True)
class Agents:
    """Runs an example, or another script, with the arguments and a directory for checkpoints. All
    agents and workers end with its `with` block."""

    endpoint: str
    job: str
    script: str
    directory: Path
    arguments: Sequence[str] = ()
    supervisor: Supervisor = field(default_factory=Supervisor)
    _workers: set[int] = field(default_factory=set)

    def __enter__(self) -> "Agents":
        self.supervisor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.supervisor.close()
        # Workers are sessions of their own and outlive an agent that is killed.
        for pid in self._workers:
            self._kill(pid)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def torchrun(self, name: str, *, nodes: str) -> Process:
        """Start torchrun's agent with one worker and three restarts."""
        options = [
            *("--rdzv-backend=shoal", f"--rdzv-endpoint={self.endpoint}"),
            *(f"--rdzv-id={self.job}", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *("--max-restarts=3", f"--rdzv-conf={RDZV_CONF}"),
        ]
        return self._spawn(name, [*TORCHRUN, *options], {})

    def accelerate_launch(self, name: str, *, nodes: str) -> Process:
        """Start accelerate's launcher with two workers, its minimum, and three restarts."""
        options = [
            *("--multi_gpu", "--num_machines=1", "--num_processes=2", "--main_process_port=0"),
            *("--rdzv_backend=shoal", f"--rdzv_conf={RDZV_CONF}", "--max_restarts=3"),
            *("--mixed_precision=no", "--dynamo_backend=no"),
        ]
        environment = {
            "PET_RDZV_ID": self.job,
            "PET_RDZV_ENDPOINT": self.endpoint,
            "PET_NNODES": nodes,
        }
        return self._spawn(name, [*ACCELERATE_LAUNCH, *options], environment)

    def _spawn(self, name: str, launcher: list[str], environment: Mapping[str, str]) -> Process:
        return self.supervisor.spawn(
            ChildCommand(
                name=name,
                arguments=[
                    *(*launcher, str(EXAMPLES / self.script)),
                    *(*self.arguments, str(self.checkpoints)),
                ],
                log_path=self.directory / f"{name}.log",
                environment={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        )

    def workers(self, agent: Process) -> list[int]:
        """Return the process ids of the workers that an agent runs now."""
        listed = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        found = [pid for pid in map(int, listed) if self._is_worker(pid)]
        self._workers.update(found)
        return found

    def kill_worker(self, agent: Process) -> None:
        """Kill an agent's only worker."""
        (pid,) = self.workers(agent)
        os.kill(pid, signal.SIGKILL)

    def kill_node(self, agent: Process) -> None:
        """Kill an agent and its workers."""
        workers = self.workers(agent)
        agent.send_signal(signal.SIGKILL)
        for pid in workers:
            self._kill(pid)

    def epochs(self) -> list[Epoch]:
        """Return the epochs printed so far, over all restarts, in order."""
        return [
            Epoch(number=int(number), ranks=int(ranks), loss=float(loss))
            for path in sorted(self.directory.glob("*.log"))
            for number, ranks, loss in _EPOCH.findall(path.read_text())
        ]

    def await_epoch(self, number: int, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while number not in {epoch.number for epoch in self.epochs()}:
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.02)  # polls the logs, which other processes write

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def _is_worker(self, pid: int) -> bool:
        try:
            return self.script.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _kill(self, pid: int) -> None:
        if self._is_worker(pid):
            os.kill(pid, signal.SIGKILL)


__all__ = ["EXAMPLES", "Agents", "Epoch"]
