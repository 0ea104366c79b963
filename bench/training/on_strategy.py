"""Timed blocks of steps under one strategy:

    on_strategy.py shoal|plain STRATEGY PAUSE_MS DESCRIPTOR BLOCKS SKIPPED TIMED

`shoal`: a member of a session; `plain`: a rank of torch.distributed. The last four arguments are
those of `blocks.Blocks`. The strategy "fsdp/2" is fsdp with a copy of the state at a peer every 2
steps; "fsdp/auto" is fsdp with its default interval.
"""

import sys
import time

import torch
import torch.distributed as dist
from blocks import Blocks
from strategy_models import GLOBAL_BATCH, NUM_SAMPLES, new_model, new_optimizer, plain, samples
from strategy_models import shares as num_shares
from torch.nn.functional import mse_loss

import shoal
from shoal.data.order import range_of_rank
from shoal.strategies.base import Strategy


def on_shoal(strategy: str, pause_s: float, blocks: Blocks) -> None:
    with shoal.join() as session:
        model = new_model()
        session.distribute(model, new_optimizer(model), strategy_of(strategy))
        epochs = -(-blocks.num_steps * GLOBAL_BATCH // NUM_SAMPLES)
        for batch in session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=epochs):
            blocks.before_step()
            with session.step():
                session.forward_backward(batch, mse_loss)
                time.sleep(pause_s)
            blocks.after_step()
            if batch.step + 1 == blocks.num_steps:
                session.stop("all blocks are measured")
                break


def strategy_of(name: str) -> str | Strategy:
    if name == "tensor":
        return shoal.TensorParallel(min_split_bytes=0)
    if name.startswith("fsdp/"):
        interval = name.removeprefix("fsdp/")
        return shoal.FSDP(copy_every_steps=None if interval == "auto" else int(interval))
    return name


def on_torch(strategy: str, pause_s: float, blocks: Blocks) -> None:
    dist.init_process_group("gloo")
    step = plain(strategy)
    inputs, targets = samples()
    count = num_shares(strategy)
    index = dist.get_rank() % count
    for number in range(blocks.num_steps):
        epoch, start = divmod(number * GLOBAL_BATCH, NUM_SAMPLES)
        if not start:
            order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        own = order[slice(*range_of_rank(start, start + GLOBAL_BATCH, index, count))]
        blocks.before_step()
        step(inputs[own], targets[own])
        time.sleep(pause_s)
        blocks.after_step()
    dist.destroy_process_group()


def main() -> None:
    system, strategy, pause_ms, *numbers = sys.argv[1:]
    run = on_shoal if system == "shoal" else on_torch
    run(strategy, float(pause_ms) / 1000, Blocks(*map(int, numbers)))


if __name__ == "__main__":
    main()
