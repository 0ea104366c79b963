"""Steps under one strategy, timed: on_strategy.py shoal|plain STRATEGY STEPS PAUSE_MS RESULT.

With `shoal` a member of a session, with `plain` a rank of torch.distributed. Each writes the
seconds between its committed steps into RESULT.<pid>.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist
from strategy_models import GLOBAL_BATCH, NUM_SAMPLES, new_model, new_optimizer, plain, samples
from strategy_models import shares as num_shares
from torch.nn.functional import mse_loss

import shoal
from shoal.data.batches import share

WARM_UP = 20


def on_shoal(strategy: str, num_steps: int, pause_s: float) -> list[float]:
    ended = []
    with shoal.join() as session:
        model = new_model()
        options = {"min_split_bytes": 0} if strategy == "tensor" else {}
        chosen = shoal.TensorParallel(**options) if options else strategy
        session.distribute(model, new_optimizer(model), chosen)
        epochs = -(-(num_steps + WARM_UP) * GLOBAL_BATCH // NUM_SAMPLES)
        for batch in session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=epochs):
            with session.step():
                session.forward_backward(batch, mse_loss)
                time.sleep(pause_s)
            ended.append(time.perf_counter())
    return ended


def on_torch(strategy: str, num_steps: int, pause_s: float) -> list[float]:
    dist.init_process_group("gloo")
    step = plain(strategy)
    inputs, targets = samples()
    count = num_shares(strategy)
    index = dist.get_rank() % count
    ended = []
    for number in range(num_steps + WARM_UP):
        start = number * GLOBAL_BATCH % NUM_SAMPLES
        own = slice(*share(start, start + GLOBAL_BATCH, index, count))
        step(inputs[own], targets[own])
        time.sleep(pause_s)
        ended.append(time.perf_counter())
    dist.destroy_process_group()
    return ended


def main() -> None:
    system, strategy, num_steps, pause_ms, result = sys.argv[1:]
    run = on_shoal if system == "shoal" else on_torch
    ended = run(strategy, int(num_steps), float(pause_ms) / 1000)[WARM_UP:]
    gaps = [after - before for before, after in pairwise(ended)]
    Path(f"{result}.{os.getpid()}").write_text(json.dumps(gaps))


if __name__ == "__main__":
    main()
