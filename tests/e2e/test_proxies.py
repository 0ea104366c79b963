"""Commands and jobs in an environment that names a proxy, as in most companies' networks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.network.proxies import DeadProxy
from support.processes.commands import ANY_PORTS, Shoal, finish, read_until
from support.training.counted_updates import counting_script

RATE = 2.0**-10


@pytest.fixture
def proxy() -> Iterator[DeadProxy]:
    with DeadProxy() as proxy:
        yield proxy


@pytest.mark.long
def test_no_connection_of_a_cluster_uses_a_proxy(
    shoal_command: Shoal, tmp_path: Path, proxy: DeadProxy
) -> None:
    """The proxy is asked by no part of a running cluster, no job of either kind, no command and no
    torchrun."""
    (tmp_path / "train.py").write_text(counting_script(2, 10, RATE))
    environment = {**proxy.environment, "OMP_NUM_THREADS": "1"}
    folder = str(tmp_path / "up")
    up = shoal_command.start("up", "--dir", folder, *ANY_PORTS, environment=environment)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    page = next(line.split()[-1] for line in welcome if line.startswith("status page"))
    environment |= {"SHOAL_COORDINATOR": coordinator, "SHOAL_HTTP": page}
    for strategy in ("async-sgd", "ddp"):
        arguments = ("run", "-n", "2", "--job", strategy, "train.py", strategy)
        code, output = finish(shoal_command.start(*arguments, environment=environment))
        assert code == 0, output
    for command in (("status",), ("jobs",), ("events", "ddp"), ("why", "ddp", "ddp-0")):
        code, output = finish(shoal_command.start(*command, environment=environment))
        assert "no coordinator answers" not in output, output
        assert code == 0 or command[0] == "why", output
    assert torchrun(coordinator, tmp_path, environment) == 0
    assert up.poll() is None
    assert not proxy.was_asked()


@pytest.mark.long
def test_the_own_cluster_of_a_run_uses_no_proxy(
    shoal_command: Shoal, tmp_path: Path, proxy: DeadProxy
) -> None:
    (tmp_path / "train.py").write_text(counting_script(2, 10, RATE))
    environment = {**proxy.environment, "OMP_NUM_THREADS": "1"}
    run = shoal_command.start("run", "-n", "2", "train.py", "bsp", environment=environment)
    code, output = finish(run)
    assert code == 0, output
    assert not proxy.was_asked()


def torchrun(coordinator: str, directory: Path, environment: dict[str, str]) -> int:
    """Run one node of torchrun with Shoal's plug-in, and return its exit code."""
    script = directory / "plain.py"
    script.write_text("import torch.distributed as dist; dist.init_process_group('gloo')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=shoal"]
    command += [f"--rdzv-endpoint={coordinator}", "--rdzv-id=plain", "--nnodes=1"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(script)],
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    return done.returncode
