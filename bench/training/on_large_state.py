"""A member with a large state and small gradients: on_large_state.py DIRECTORY MEGABYTES.

Most parameters are frozen, as in a large model of which small parts are tuned: a step exchanges
some KiB, but a joining member receives the whole state.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from workload import StepLog

import shoal

WIDTH, ROWS_OF_TABLE = 256, 51_200
TABLE_MB = WIDTH * ROWS_OF_TABLE * 4 / 1e6


class Tuned(nn.Module):
    """Frozen tables of 52 MB each, and a small trained head."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.tables = nn.ParameterList(
            nn.Parameter(torch.full((ROWS_OF_TABLE, WIDTH), 0.01 * number), requires_grad=False)
            for number in range(round(megabytes / TABLE_MB))
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        looked_up = sum(table[rows] for table in self.tables)
        outputs: Tensor = self.head(looked_up)
        return outputs


def main() -> None:
    directory, megabytes = Path(sys.argv[1]), float(sys.argv[2])
    log, stop = StepLog(directory), directory / "stop"
    torch.manual_seed(0)
    model = Tuned(megabytes)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-6)
    rows = torch.arange(4096) % ROWS_OF_TABLE
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        batches = session.batches((rows, torch.ones(4096, 1)), global_batch_size=16, epochs=10**6)
        for batch in batches:
            with session.step() as step:
                session.backward(mse_loss(model(batch.inputs), batch.targets))
            if step.committed:
                log.committed(
                    formation=session.generation, world_size=session.world_size, step=batch.step
                )
            if stop.exists():
                session.stop("measured")


if __name__ == "__main__":
    main()
