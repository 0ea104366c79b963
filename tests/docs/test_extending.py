"""The examples of docs/extending.md, used as a reader would use them."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import status_world
from support.docs.pages import DOCS, ROOT, blocks
from support.processes.commands import Shoal, finish, shoal_command

import shoal
from shoal.strategies.base import Strategy
from shoal_client.cli import main

__all__ = ["shoal_command"]

PAGE = DOCS / "extending.md"
FILES = {text.splitlines()[0].removeprefix("# "): text for text in blocks(PAGE, "python", "toml")}
"""The files of the page, by the name in their first line."""
STEPS = 500
KILLS = """\
            if batch.step == 203 and session.world_size == 3 and session.rank == 1:
                __import__("os").kill(__import__("os").getpid(), 9)
"""
ADAMAX = """
import torch
from shoal.strategies.asynchronous.optimizer_spec import to_spec
from shoal_server.parameters.optimizers import new_optimizer
from shoal_server.parameters.optimizers.checks import check_spec

def gradients():
    for number in range(4):
        yield torch.randn(100, generator=torch.Generator().manual_seed(number))

values = torch.randn(100, generator=torch.Generator().manual_seed(9))
parameter = torch.nn.Parameter(values.clone())
settings = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
optimizer = torch.optim.Adamax([parameter], **settings)
spec = to_spec(optimizer)
check_spec(spec, 1)
served, restored = (new_optimizer(spec, 0, [each]) for each in (values, values.clone()))
for gradient in gradients():
    parameter.grad = gradient.clone()
    optimizer.step()
    served.step([0], [gradient], 0.01)
assert torch.equal(values, parameter.detach()), (values - parameter).abs().max()
restored.load_state(served.state())
assert float(restored.state()["step"]) == 4
print("as torch's own")
"""


@pytest.fixture
def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A function that imports a file of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def last_loss(strategy: Strategy, steps: int = 4) -> float:
    """Train for so many steps in a session without other members, and return the last loss."""
    torch.manual_seed(1)
    inputs = torch.randn(16, 8)
    data = (inputs, (inputs[:, 0] > 0).long())
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with shoal.join() as session:
        trained, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data, global_batch_size=16, epochs=steps):
            with session.step():
                loss = torch.nn.functional.cross_entropy(trained(batch.inputs), batch.targets)
                session.backward(loss)
        assert session.step_number == steps
    return loss.item()


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [("majority_sign", "MajoritySign", {}), ("average_every", "AverageEvery", {"every_steps": 3})],
)
def test_the_strategy_trains(
    module_of: Callable[[str], Any], module: str, name: str, options: dict[str, Any]
) -> None:
    """The example's loss falls, in a session without other members."""
    strategy = getattr(module_of(module), name)
    assert last_loss(strategy(**options)) < last_loss(strategy(**options), steps=1)


@pytest.mark.long
def test_the_strategy_survives_a_kill(shoal_command: Shoal, tmp_path: Path) -> None:
    """The page's own script takes each step, and all members end with one model."""
    (tmp_path / "majority_sign.py").write_text(FILES["majority_sign.py"])
    survives_a_kill(shoal_command, tmp_path, FILES["train_majority.py"])


@pytest.mark.long
def test_averaging_survives_a_kill_within_a_round(shoal_command: Shoal, tmp_path: Path) -> None:
    """The survivors take all steps, and end with one model."""
    (tmp_path / "average_every.py").write_text(FILES["average_every.py"])
    script = FILES["train_majority.py"].replace("MajoritySign()", "AverageEvery(8)")
    script = script.replace("lr=0.002", "lr=0.1")
    imported, used = (
        "from majority_sign import MajoritySign",
        "from average_every import AverageEvery",
    )
    assert imported in script
    survives_a_kill(shoal_command, tmp_path, script.replace(imported, used))


def survives_a_kill(shoal_command: Shoal, tmp_path: Path, script: str) -> None:
    passes = "            session.backward(loss)\n"
    assert passes in script
    (tmp_path / "train_majority.py").write_text(script.replace(passes, passes + KILLS))
    run = shoal_command.start("run", "-n", "3", "--ps", "0", "train_majority.py")
    code, output = finish(run)
    assert code == 0, output
    assert "was killed by SIGKILL" in output
    assert set(re.findall(r"step (\d+) loss", output)) == {str(STEPS)}
    weights = re.findall(r"weights (\S+)", output)
    assert len(weights) >= 2
    assert len(set(weights)) == 1, output
    assert all(float(each) < 0.5 for each in re.findall(r"loss ([0-9.]+)", output)), output


def test_the_backend_carries_a_step(module_of: Callable[[str], Any]) -> None:
    """The strategy uses this backend in place of the session's, and proposes its name."""
    asked: list[int] = []

    def address_of(rank: int) -> str:
        asked.append(rank)
        return "127.0.0.1"

    strategy = module_of("second_network").DDPOnSecondNetwork(address_of)
    last_loss(strategy)
    assert asked == [0]
    assert strategy.fields()["backend"] == "gloo-second-network"


def test_a_field_is_proposed(module_of: Callable[[str], Any]) -> None:
    strategy = module_of("tokenizer_field").DDPWithTokenizer("abc")
    last_loss(strategy)
    assert strategy.fields()["tokenizer"] == "abc"
    assert "schema" in strategy.fields()


@pytest.mark.long
def test_the_optimizer_equals_torchs(tmp_path: Path) -> None:
    """The page's diff, applied to a copy of the source, changes both worker and server."""
    for part in ("proto", "client", "worker", "server"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (change,) = blocks(PAGE, "diff")
    subprocess.run(["git", "apply"], input=change, text=True, cwd=tmp_path, check=True)
    path = ":".join(str(tmp_path / part) for part in ("proto", "client", "worker", "server"))
    run = subprocess.run(
        [sys.executable, "-c", ADAMAX],
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == "as torch's own\n", run.stderr


def test_the_command_is_found(
    module_of: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command is found by its entry point, as pip installs it; fields of its config are
    options."""
    module_of("shoal_names")
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    installed = tmp_path / f"shoal_names-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = project["entry-points"]["shoal.commands"]
    (installed / "entry_points.txt").write_text(
        "[shoal.commands]\n" + "".join(f"{name} = {found}\n" for name, found in points.items())
    )
    world = status_world.World()
    world.put(status_world.job())
    with status_world.endpoint(world) as server:
        assert main(["names", "--http", server.url]) == 0
        assert capsys.readouterr().out == "digits\n"
        assert main(["names", "--http", server.url, "--state", "lost"]) == 0
        assert capsys.readouterr().out == ""
    assert main(["--help"]) == 0
    assert "print the names of jobs" in capsys.readouterr().out
