"""A script that reports each of its steps in a file, and trains until the test lets it finish."""

import time
from pathlib import Path

SCRIPT = """
import os, pathlib, time
import shoal, torch

here = pathlib.Path(__file__).parent
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
data = (torch.randn(600, 8), torch.randn(600, 2))
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(data, global_batch_size=6, epochs=20):
        with session.step() as step:
            session.backward(((model(batch.inputs) - batch.targets) ** 2).mean())
        with open(here / "steps", "a") as steps:
            print(session.member_id, os.getpid(), session.world_size, step.committed, file=steps)
        if not (here / "finish").exists():
            time.sleep(0.02)  # so that the job is not over before the test is done with it
"""


def await_steps(directory: Path, world_size: int) -> dict[str, int]:
    """Wait until so many members train together, and return the pid of each."""
    deadline_s = time.monotonic() + 120.0
    while True:
        path = directory / "steps"
        lines = path.read_text().splitlines()[-3 * world_size :] if path.exists() else []
        parts = [line.split() for line in lines if line.count(" ") == 3]
        pids = {part[0]: int(part[1]) for part in parts if part[2] == str(world_size)}
        if len(pids) == world_size:
            return pids
        assert time.monotonic() < deadline_s, lines
        time.sleep(0.02)
