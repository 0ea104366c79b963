"""A member whose descriptors are counted: on_descriptors.py DIRECTORY STRATEGY [VISITS].

Trains until the file `stop` exists; with VISITS, it joins and leaves this many times instead. Each
visit causes two generations.
"""

import sys
from pathlib import Path

from strategy_models import GLOBAL_BATCH, new_model, new_optimizer, samples
from torch.nn.functional import mse_loss
from workload import StepLog

import shoal
from shoal.strategies import find_strategy

OPTIONS = {
    "tensor": {"min_split_bytes": 0},
    "hybrid": {"min_split_bytes": 0},
    "fsdp-tensor": {"min_split_bytes": 0},
    "hsdp": {"shard": 2},
}
STEPS_OF_A_VISIT = 5


def member(directory: Path, strategy: str, num_steps: int | None) -> None:
    """Train in the job until `stop` exists, or for `num_steps` steps."""
    log, stop, taken = StepLog(directory), directory / "stop", 0
    model = new_model()
    chosen = type(find_strategy(strategy))(**OPTIONS.get(strategy, {}))
    with shoal.join() as session:
        session.distribute(model, new_optimizer(model), chosen)
        batches = session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=1_000_000)
        for batch in batches:
            with session.step() as step:
                session.forward_backward(batch, mse_loss)
            if step.committed:
                taken += 1
                log.committed(
                    formation=session.generation, world_size=session.world_size, step=batch.step
                )
            if num_steps is None and stop.exists():
                session.stop("counted")
            if taken == num_steps:
                break


def main() -> None:
    directory, strategy, *visits = sys.argv[1:]
    if not visits:
        member(Path(directory), strategy, None)
    for _ in range(int(visits[0]) if visits else 0):
        member(Path(directory), strategy, STEPS_OF_A_VISIT)


if __name__ == "__main__":
    main()
