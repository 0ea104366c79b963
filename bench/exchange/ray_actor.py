"""An actor of Ray: gradients and values go through its object store, which is shared memory."""

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from exchange.model import Exchange, Parameters, await_end, new_gradients

# Ray reads this variable on import. Its cluster runs on this machine alone, for a minute.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

NAMESPACE, NAME = "bench", "parameters"
STORE_BYTES = 2 * 1024**3


class Holder:
    """Class of the actor: it owns the parameters and applies pushes."""

    def __init__(self) -> None:
        self._parameters = Parameters()

    def push(self, *gradients: "np.ndarray[Any, Any]") -> "list[np.ndarray[Any, Any]]":
        # Ray hands out arrays that cannot be written to; SGD only reads them.
        self._parameters.apply([torch.from_numpy(gradient) for gradient in gradients])
        return [value.numpy() for value in self._parameters.values]


def serve(owner: Connection, num_workers: int) -> None:
    context = ray.init(
        _node_ip_address="127.0.0.1",
        num_cpus=1 + num_workers,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        # Ray's processes find this module on the path of this process.
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    actor = ray.remote(num_cpus=1)(Holder).options(name=NAME).remote()
    ray.get(actor.__ray_ready__.remote())
    owner.send(context.address_info["address"])
    await_end(owner)
    ray.shutdown()


def connect(address: str, number: int, num_workers: int) -> Exchange:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    actor = ray.get_actor(NAME)
    gradients = [gradient.numpy() for gradient in new_gradients()]

    def exchange() -> None:
        ray.get(actor.push.remote(*gradients))

    return exchange
