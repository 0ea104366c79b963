"""Peers of Shoal's tables: rows behind torch.distributed.rpc, and behind an actor of Ray.

The holder is a separate process on this machine. Each of its tables is one dense tensor with a row
for every id. It applies SGD to the rows of a push, without an index, new rows, backups or a
journal. As with Shoal's worker in bench/tables.py, a step makes two calls: one gets the values of
the ids, one sends their gradients.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

LR = 0.1
START_S = 120.0
Step = Callable[[Tensor], None]
"""Looks up the rows of these ids and pushes a gradient for each."""
Shape = tuple[int, int]
"""Number of rows of a table, and floats in a row."""

_processes = multiprocessing.get_context("spawn")


class Rows:
    """A table on its holder."""

    def __init__(self, num_rows: int, dim: int) -> None:
        torch.set_num_threads(1)
        self._values = torch.zeros(num_rows, dim)

    def look_up(self, ids: Tensor) -> Tensor:
        return self._values[ids]

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        self._values.index_add_(0, ids, gradients, alpha=-LR)


_tables: list[Rows] = []
"""The holder's tables: remote calls name functions of the module."""


def _look_up(table: int, ids: Tensor) -> Tensor:
    return _tables[table].look_up(ids)


def _push(table: int, ids: Tensor, gradients: Tensor) -> None:
    _tables[table].push(ids, gradients)


def _serve_rpc(owner: Connection, port: int, shapes: Sequence[Shape]) -> None:
    _tables.extend(Rows(*shape) for shape in shapes)
    _join("holder", 0, port)
    owner.poll(None)
    os._exit(0)


def _join(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def torch_rpc(stack: ExitStack, shapes: Sequence[Shape]) -> list[Step]:
    """Start a holder for torch.distributed.rpc over TensorPipe; return a step for each table.

    Once per process: torch numbers the calls of init_rpc in each process, and a second one would
    wait for ever for a holder that makes its first.
    """
    here, there = _processes.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    process = _processes.Process(target=_serve_rpc, args=(there, port, shapes))
    process.start()
    stack.callback(process.kill)
    stack.callback(here.close)
    _join("worker", 1, port)
    stack.callback(rpc.shutdown, graceful=False)

    def step(table: int, ids: Tensor) -> None:
        values = rpc.rpc_sync("holder", _look_up, args=(table, ids))
        rpc.rpc_sync("holder", _push, args=(table, ids, torch.ones_like(values)))

    return [partial(step, table) for table in range(len(shapes))]


class RowActor:
    """The class of Ray's actor: arrays go through its object store, which is shared memory."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._rows = Rows(num_rows, dim)

    def look_up(self, ids: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        return self._rows.look_up(torch.from_numpy(ids)).numpy()

    def push(self, ids: "np.ndarray[Any, Any]", gradients: "np.ndarray[Any, Any]") -> None:
        self._rows.push(torch.from_numpy(ids), torch.from_numpy(gradients))


def ray_actor(stack: ExitStack, shapes: Sequence[Shape]) -> list[Step]:
    """Start actors of Ray, on a cluster of this machine alone; return a step for each table."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray  # noqa: PLC0415 - not a dependency: measured where it is installed

    ray.init(
        _node_ip_address="127.0.0.1",
        num_cpus=len(shapes),
        object_store_memory=1024**3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # Ray's processes find this module on the path of this process.
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    stack.callback(ray.shutdown)
    actors = [ray.remote(num_cpus=1)(RowActor).remote(*shape) for shape in shapes]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=START_S)

    def step(actor: Any, ids: Tensor) -> None:
        values = ray.get(actor.look_up.remote(ids.numpy()))
        ray.get(actor.push.remote(ids.numpy(), np.ones_like(values)))

    return [partial(step, actor) for actor in actors]


PEERS: dict[str, Callable[[ExitStack, Sequence[Shape]], list[Step]]] = {
    "torch-rpc": torch_rpc,
    "ray-actor": ray_actor,
}
