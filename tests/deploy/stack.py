"""A compose project of its own, started for real and removed with everything that it made."""

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
from support.network.ports import free_port

ROOT = Path(__file__).parents[2]
OFFLINE_WHEELS = ROOT / "deploy" / "offline" / "wheels"
POLL_S = 0.25
SERVERS = ("etcd", "coordinator", "ps-0", "ps-1")
NO_SETTINGS: Mapping[str, str] = {}
IMAGES = ("etcd", "coordinator", "server", "worker")
OWN = "/var/lib/shoal/own"
CERTS_VALID_S = 150.0
"""Certificates are renewed, and the first ones run out, during the tests."""
CERTS_EVERY_S = 50.0

Found = TypeVar("Found")


def run(
    *command: str,
    environment: dict[str, str] | None = None,
    timeout_s: float = 300,
    cwd: Path = ROOT,
    given: str = "",
) -> str:
    """Standard output of a command; `given`: its standard input. A failure shows all of its
    output."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


@dataclass(kw_only=True)
class Stack:
    """The compose file under a project name and a port of its own."""

    project: str = field(default_factory=lambda: f"shoal-test-{os.getpid()}")
    http_port: int = field(default_factory=free_port)
    images: str = "shoal-test"
    """The beginning of the images' names."""

    def compose(
        self, *arguments: str, settings: Mapping[str, str] = NO_SETTINGS, timeout_s: float = 300
    ) -> str:
        """Standard output of `docker compose`, run with further settings in its environment."""
        environment = {**os.environ, **settings}
        environment |= {
            "SHOAL_HTTP_PORT": str(self.http_port),
            "SHOAL_IMAGES": self.images,
            "SHOAL_CERTS_VALID_H": str(CERTS_VALID_S / 3600),
            "SHOAL_CERTS_EVERY_H": str(CERTS_EVERY_S / 3600),
        }
        if any(OFFLINE_WHEELS.glob("*.whl")):
            # A folder with wheels is there for an image made from them.
            environment["PIP_NO_INDEX"] = "1"
        command = ("docker", "compose", "--project-name", self.project, *arguments)
        return run(*command, environment=environment, timeout_s=timeout_s)

    def get(self, path: str) -> Any:
        """JSON that the coordinator answers over HTTP. Raises httpx.HTTPError."""
        answer = httpx.get(
            f"{self.url}{path}",
            timeout=5,
            verify=self._tls,
            headers={"Authorization": f"Bearer {self.token}"},
        )
        answer.raise_for_status()
        return answer.json()

    @property
    def url(self) -> str:
        """The page's URL, for a browser on this machine."""
        return f"https://localhost:{self.http_port}"

    def operate(self, *command: str, entrypoint: str = "shoal") -> str:
        """Output of an operator's command."""
        run_once = ("run", "--rm", "--no-deps", "-T", f"--entrypoint={entrypoint}", "shoal")
        return self.compose(*run_once, *command)

    @cached_property
    def token(self) -> str:
        """An operator's token for the page."""
        return self.operate(f"{OWN}/token", entrypoint="cat").strip()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.operate(f"{OWN}/ca.crt", entrypoint="cat"))

    def wait_for(self, what: str, see: Callable[[], Found | None], timeout_s: float) -> Found:
        """The first value that `see` returns other than None. On time-out the failure shows the
        stack's state."""
        give_up_s = time.monotonic() + timeout_s
        last: object = None
        while time.monotonic() < give_up_s:
            try:
                found = see()
            except httpx.HTTPError as error:  # no coordinator serves yet, or it has no job
                last = error
            else:
                if found is not None:
                    return found
            time.sleep(POLL_S)
        raise AssertionError(f"within {timeout_s:g} s: not {what} ({last!r})\n{self.state()}")

    def containers(self, service: str) -> dict[str, dict[str, Any]]:
        """Docker's data about a service's containers, stopped ones too, by host name."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        inspected = json.loads(run("docker", "inspect", *ids)) if ids else []
        return {item["Config"]["Hostname"]: item for item in inspected}

    def state(self) -> str:
        """Containers and the end of their logs."""
        return self.compose("ps", "--all") + self.compose("logs", "--no-color", "--tail=60")


@contextmanager
def brought_up(stack: Stack) -> Iterator[Stack]:
    """Build the image and wait until every server is healthy; remove everything at the end."""
    stack.compose("build", timeout_s=1200)
    try:
        stack.compose("up", "--detach", "--wait", "--no-build", *SERVERS, timeout_s=300)
        yield stack
    finally:
        stack.compose(
            "--profile=tools", "down", "--volumes", "--remove-orphans", "--rmi=all", timeout_s=120
        )
    label = f"label=com.docker.compose.project={stack.project}"
    for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
        assert not run("docker", *kind, "--quiet", "--filter", label).strip()
