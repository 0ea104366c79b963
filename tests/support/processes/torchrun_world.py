"""torchrun's agents as processes, and the steps that their workers have written."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_client.local.process import ChildCommand, Process, Supervisor

SCRIPT = Path(__file__).with_name("torchrun_script.py")

Step = dict[str, Any]


@dataclass(kw_only=True)
class Nodes:
    """Runs `torchrun` on a script. All agents and workers end with its `with` block."""

    endpoint: str
    job: str
    directory: Path
    script: Path = SCRIPT
    supervisor: Supervisor = field(default_factory=Supervisor)

    def __enter__(self) -> "Nodes":
        self.supervisor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.supervisor.close()
        # torchrun puts workers into sessions of their own, so they outlive an agent that is killed.
        for pid in {step["pid"] for step in self.steps()}:
            self._kill_worker(pid)

    def start(
        self,
        name: str,
        *,
        nodes: str,
        workers: int = 2,
        restarts: int = 0,
        conf: str = "last_call_timeout=60",
    ) -> Process:
        arguments = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=shoal"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.job}", f"--nnodes={nodes}"),
            *(f"--nproc-per-node={workers}", f"--max-restarts={restarts}"),
            *(f"--rdzv-conf={conf}", str(self.script), str(self.directory)),
        ]
        log_path = self.directory / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NODE": name}
        command = ChildCommand(
            name=name, arguments=arguments, log_path=log_path, environment=environment
        )
        return self.supervisor.spawn(command)

    def kill(self, agent: Process) -> None:
        """Kill a node: the agent and all its workers."""
        agent.send_signal(signal.SIGKILL)
        for pid in {step["pid"] for step in self.steps() if step["agent"] == agent.pid}:
            self._kill_worker(pid)

    def steps(self) -> list[Step]:
        """Return the steps of all ranks so far."""
        lines = [
            line
            for path in self.directory.glob("steps-*")
            for line in path.read_text().splitlines(keepends=True)
        ]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def await_step(self, wanted: Callable[[Step], bool], within_s: float) -> Step:
        """Wait for a step that is `wanted`, and return the first. Fails with the logs."""
        deadline_s = time.monotonic() + within_s
        while True:
            found = [step for step in self.steps() if wanted(step)]
            if found:
                return min(found, key=lambda step: float(step["at_s"]))
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.05)  # polls the files, which other processes write

    def stop(self) -> None:
        """Make the workers end after their next step."""
        (self.directory / "stop").touch()

    def touch(self, name: str) -> None:
        """Create a file that the script waits for."""
        (self.directory / name).touch()

    def await_line(self, name: str, words: str, within_s: float) -> None:
        """Wait for a line in the log of a node."""
        deadline_s = time.monotonic() + within_s
        while words not in (self.directory / f"{name}.log").read_text():
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.05)  # as above

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def _kill_worker(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if str(self.script).encode() in command:
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return


__all__ = ["Nodes", "Step"]
