"""A script of fixed ranks that ends while a thread of Gloo still uses a tensor.

    RANK=0 ... python fixed_ranks_ending.py STRATEGY FLAG END

`FLAG`: a file for which rank 1 waits; rank 0 makes it. `END`: "line", "destroy", "error" or "exit".
Prints which thread frees the tensor, and how many threads of Gloo are left.
"""

import atexit
import sys
import threading
import time
import weakref
from pathlib import Path


def count_threads() -> None:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print("left", names.count("pt_gloo_runloop"), flush=True)


atexit.register(count_threads)  # called last: it is registered first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import shoal  # noqa: E402


def train(strategy: str) -> nn.Module:
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = shoal.distribute(model, optimizer, strategy)
    inputs, targets = torch.ones(4, 6), torch.ones(4, 3)
    for _ in range(3):
        shoal.forward_backward(model, inputs, targets, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def free_slowly() -> None:
    """Imitate a thread that is rarely scheduled: release and take Python's lock 100 times."""
    main = threading.current_thread() is threading.main_thread()
    print("freed by", "main" if main else "gloo", flush=True)
    for _ in range(100):
        time.sleep(0.01)


def leave_behind(flag: Path) -> None:
    """Leave, on rank 0, a tensor to which a thread of Gloo holds the last reference."""
    message, gate = torch.ones(4), threading.Event()
    if dist.get_rank() == 1:
        while not flag.exists():
            time.sleep(0.01)
        dist.all_reduce(message)
        return
    weakref.finalize(message, free_slowly).atexit = False
    work = dist.all_reduce(message, async_op=True)
    assert work is not None
    work.get_future().add_done_callback(lambda _: gate.wait(60))
    flag.touch()
    del work, message
    gate.set()


if __name__ == "__main__":
    model = train(sys.argv[1])
    leave_behind(Path(sys.argv[2]))
    match sys.argv[3]:
        case "destroy":
            dist.destroy_process_group()
        case "error":
            raise LookupError("the script's own")
        case "exit":
            sys.exit(3)
