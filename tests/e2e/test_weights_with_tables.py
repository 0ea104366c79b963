"""A job that trains a table publishes it with its parameters, to a reader that serves both."""

from pathlib import Path

import pytest
from support.processes.commands import ANY_PORTS, Shoal, finish, read_until

TRAIN = """
import torch
from torch import nn

import shoal


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = shoal.EmbeddingTable(4, optimizer=shoal.RowSGD(lr=0.1))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.norm(self.items(ids))).squeeze(1)


torch.manual_seed(0)
ids, labels = torch.arange(320) % 40, torch.randn(320)
with shoal.join() as session:
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
    series = session.series("model", tables=True)
    tickets = []
    for batch in session.batches((ids, labels), global_batch_size=32, epochs=4):
        with session.step() as step:
            loss = nn.functional.mse_loss(model(batch.inputs), batch.targets)
            session.backward(loss)
        tickets.append(series.publish())
    for ticket in tickets:
        version = ticket.wait("committed", 60)
    if version is not None:
        print(f"ended at version {version.number}")
"""
READ = """
import torch
from torch import nn

import shoal
from shoal_proto.errors import DeadlineExceeded

dense = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 1)})
store = {}
with shoal.subscribe("ctr/model", tables=True) as model:
    version = model.wait(timeout=60)
    while True:
        weights = model.fetch(into=dense)
        rows = weights.changes["items"]
        store.update(zip(rows.ids.tolist(), map(tuple, rows.values.tolist())))
        for gone in rows.removed.tolist():
            del store[gone]
        now = weights.tables["items"].all()
        assert store == dict(zip(now.ids.tolist(), map(tuple, now.values.tolist())))
        print(f"installed {weights.version.number} with {len(store)} rows", flush=True)
        try:
            model.wait(timeout=5)
        except DeadlineExceeded:
            break
    assert torch.isfinite(dense["head"].weight).all() and len(store) == 40
"""


@pytest.mark.long
def test_a_job_publishes_its_tables_with_its_parameters(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """Changes from version to version make the reader's rows those of the newest version."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "read.py").write_text(READ)
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    cluster = {"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
    run = shoal_command.start("run", "-n", "2", "--job", "ctr", "train.py", environment=cluster)
    reader = shoal_command.start_python("read.py", environment=cluster)
    code, output = finish(run)
    assert code == 0 and "ended at version" in output, output
    code, output = finish(reader)
    assert code == 0 and "with 40 rows" in output, output
    assert up.poll() is None
