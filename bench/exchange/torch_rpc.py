"""torch.distributed.rpc over TensorPipe: one call with all gradients; its result has all values."""

import socket
from multiprocessing.connection import Connection

import torch
from exchange.model import Exchange, Parameters, await_end, new_gradients
from torch import Tensor
from torch.distributed import rpc

_parameters: Parameters | None = None


def serve(owner: Connection, num_workers: int) -> None:
    global _parameters  # noqa: PLW0603 - remote calls name functions of the module
    _parameters = Parameters()
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    # Sent first: `_join` waits for the workers, which need the address to join.
    owner.send(str(port))
    _join("server", 0, num_workers, port)
    await_end(owner)


def connect(address: str, number: int, num_workers: int) -> Exchange:
    _join(f"worker{number}", 1 + number, num_workers, int(address))
    gradients = new_gradients()

    def exchange() -> None:
        rpc.rpc_sync("server", _apply, args=(gradients,))

    return exchange


def _join(name: str, rank: int, num_workers: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=1 + num_workers, rpc_backend_options=options)


def _apply(gradients: list[Tensor]) -> list[Tensor]:
    assert _parameters is not None
    with _parameters.lock, torch.no_grad():
        _parameters.apply(gradients)
        # The result is serialized after this returns, perhaps during the next push.
        return [value.clone() for value in _parameters.values]
