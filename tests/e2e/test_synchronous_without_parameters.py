"""A synchronous job's processes, and the modules that they load."""

import json
from pathlib import Path

import pytest
from structure.parameter_half import of_half
from support.processes.commands import Shoal, finish

AT_EXIT = """
import atexit, json, os, pathlib, sys

def note():
    found = {{"command": sys.argv, "modules": sorted(sys.modules)}}
    pathlib.Path({directory!r}, f"{{os.getpid()}}.json").write_text(json.dumps(found))

atexit.register(note)
"""
SCRIPT = """
import torch
import shoal

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = (torch.randn(64, 4), torch.randn(64, 1))
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(data, global_batch_size=16, epochs=1):
        with session.step():
            session.backward(torch.nn.functional.mse_loss(model(batch.inputs), batch.targets))
"""


@pytest.mark.long
def test_a_synchronous_job_loads_no_module_for_parameters(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The test examines the launcher, the coordinator that it starts, and the workers."""
    noted, hook = tmp_path / "noted", tmp_path / "hook"
    noted.mkdir()
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(AT_EXIT.format(directory=str(noted)))
    (tmp_path / "train.py").write_text(SCRIPT)
    run = shoal_command.start(
        *("run", "-n", "2", "--ps", "0", "train.py"), environment={"PYTHONPATH": str(hook)}
    )
    code, output = finish(run)
    assert code == 0, output
    found = [json.loads(path.read_text()) for path in noted.iterdir()]
    marks = {
        "launcher": "shoal.launcher.launcher",
        "coordinator": "shoal_server.coordinator.assembly",
        "worker": "shoal.strategies.layout.ddp",
    }
    counts = {kind: sum(mark in each["modules"] for each in found) for kind, mark in marks.items()}
    assert counts["launcher"] and counts["coordinator"] and counts["worker"] >= 2, counts
    for each in found:
        assert of_half(each["modules"]) == [], each["command"]
