"""One worker, or the one process, of bench/accuracy.py:
on_accuracy.py TASK MODE NUM_WORKERS SEED RESULT; MODE `alone` is the one process.

Trains to the end, and writes down when that was and how many held-out samples it gets right.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from accuracy_tasks import ROW_LR, TASKS, Task, accuracy
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

import shoal
from shoal.data import Loader, Order

STRATEGIES = {
    "async": shoal.AsyncSGD,
    "ssp": lambda: shoal.AsyncSGD(consistency="ssp", staleness_bound=8),
    "dc_asgd": lambda: shoal.AsyncSGD(staleness="compensate"),
}


def dense_optimizer(task: Task, model: nn.Module) -> SGD:
    held = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in held]
    return SGD(dense, lr=task.lr, momentum=task.momentum)


def alone(task: Task, seed: int) -> float:
    model = task.new_model(False)
    optimizers: list[Optimizer] = [dense_optimizer(task, model)]
    optimizers += [
        Adagrad(module.parameters(), lr=ROW_LR)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    data, _ = task.data()
    order = Order(
        num_samples=len(data[0]),
        global_batch_size=task.batch_size,
        num_epochs=task.epochs,
        seed=seed,
    )
    loader = Loader(data, order)
    for step in range(order.num_steps):
        batch = loader.synchronous(step, 0, 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        for optimizer in optimizers:
            optimizer.step()
    return accuracy(task, model)


def together(task: Task, mode: str, num_workers: int, seed: int) -> float:
    data, _ = task.data()
    with shoal.join(min_members=num_workers, desired_members=num_workers) as session:
        model = task.new_model(True)
        session.distribute(model, dense_optimizer(task, model), STRATEGIES[mode]())
        for batch in session.batches(
            data, global_batch_size=task.batch_size, epochs=task.epochs, seed=seed
        ):
            with session.step():
                session.backward(task.loss(model(batch.inputs), batch.targets))
        return accuracy(task, model)


def main() -> None:
    name, mode, num_workers, seed, result = sys.argv[1:]
    task = TASKS[name]
    torch.manual_seed(int(seed))
    if mode == "alone":
        percent = alone(task, int(seed))
    else:
        percent = together(task, mode, int(num_workers), int(seed))
    line = {"at_s": time.monotonic(), "accuracy": percent}
    Path(f"{result}.{os.getpid()}").write_text(json.dumps(line))


if __name__ == "__main__":
    main()
