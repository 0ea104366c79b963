"""Other systems as entrants of bench/weights.py, in an environment of their own.

    python -m venv bench/.venvs/peers
    bench/.venvs/peers/bin/pip install torch numpy ray torchmonarch pygtrie portpicker
    # and TorchStore from its repository: its package on PyPI is older
    bench/.venvs/peers/bin/python bench/weights_peers.py torchstore 256 4
    bench/.venvs/peers/bin/python bench/weights_peers.py torchstore-torn 64 2

`torch_rpc` needs only torch.

Reads a line for each round and prints two numbers: the seconds of the publishing call, and the
seconds until the last reader had the model in tensors of its own. In `torchstore-torn`, one writer
overwrites a key while readers read it, for as many seconds as the line says. The two numbers are
then the reads, and the reads that contained tensors of two versions.
"""

import asyncio
import socket
import sys
import threading
import time
from typing import Any

import torch
from weights_readers import model_of, report

KEY = "policy"
RPC_S = 600.0


async def torchstore(mb: int, count: int, *, tears: bool) -> None:
    import torchstore as ts  # noqa: PLC0415 - only in this environment
    from monarch.actor import Actor, endpoint  # noqa: PLC0415
    from torchstore.utils import spawn_actors  # noqa: PLC0415

    class Reader(Actor):
        def __init__(self, mb: int) -> None:
            self.target = model_of(mb)

        @endpoint
        async def fetch(self) -> float:
            await ts.get_state_dict(KEY, user_state_dict=self.target)
            return time.monotonic()

        @endpoint
        async def read_for(self, seconds: float) -> tuple[int, int]:
            num_reads, num_torn, ends_s = 0, 0, time.monotonic() + seconds
            while time.monotonic() < ends_s:
                await ts.get_state_dict(KEY, user_state_dict=self.target)
                seen = {each.view(-1)[i].item() for each in self.target.values() for i in (0, -1)}
                num_reads, num_torn = num_reads + 1, num_torn + (len(seen) > 1)
            return num_reads, num_torn

    await ts.initialize()
    readers = await spawn_actors(count, Reader, "readers", mb=mb)
    model = model_of(mb, 1.0)
    await ts.put_state_dict(model, KEY)
    report("ready")
    for number, line in enumerate(sys.stdin):
        if tears:
            reading = asyncio.ensure_future(_call(readers.read_for, float(line)))
            version = 1
            while not reading.done():
                version = version % 200 + 1
                for each in model.values():
                    each.fill_(version)
                await ts.put_state_dict(model, KEY)
                await asyncio.sleep(0)
            found = await reading
            report(sum(reads for reads, _ in found), sum(torn for _, torn in found))
            continue
        for each in model.values():
            each.fill_(number % 200)
        began_s = time.monotonic()
        await ts.put_state_dict(model, KEY)
        kept_s = time.monotonic() - began_s
        report(kept_s, max(await _call(readers.fetch)) - began_s)
    await ts.shutdown()


async def _call(method: Any, *arguments: object) -> list[Any]:
    """Return the results of all actors."""
    found = await method.call(*arguments)
    return [answer for _, answer in found.items()]


def ray_store(mb: int, count: int) -> None:
    """Measure Ray's object store, with arrays: Ray would pickle tensors one by one."""
    import ray  # noqa: PLC0415

    ray.init(
        num_cpus=count + 1,
        object_store_memory=(3 * mb + 256) << 20,
        include_dashboard=False,
        log_to_driver=False,
    )

    @ray.remote
    class Reader:
        def __init__(self, mb: int) -> None:
            self.target = {name: t.view(torch.uint16) for name, t in model_of(mb).items()}

        def fetch(self, holder: list[Any]) -> float:
            for name, array in ray.get(holder[0]).items():
                self.target[name].numpy()[:] = array
            return time.monotonic()

    readers = [Reader.remote(mb) for _ in range(count)]
    model = {name: t.view(torch.uint16).numpy() for name, t in model_of(mb, 1.0).items()}
    ray.get([each.fetch.remote([ray.put(model)]) for each in readers])
    report("ready")
    for number, _ in enumerate(sys.stdin):
        for array in model.values():
            array[:] = number % 200
        began_s = time.monotonic()
        held = ray.put(model)
        kept_s = time.monotonic() - began_s
        report(kept_s, max(ray.get([each.fetch.remote([held]) for each in readers])) - began_s)
        del held
    ray.shutdown()


_held_by_rpc: dict[str, torch.Tensor] = {}


def _model_by_rpc() -> dict[str, torch.Tensor]:
    return _held_by_rpc


def _read_by_rpc(mb: int) -> float:
    """Fetch the model from rank 0; return the time at which it was in tensors of this process."""
    from torch.distributed import rpc  # noqa: PLC0415

    target = _held_by_rpc or model_of(mb)
    for name, tensor in rpc.rpc_sync("r0", _model_by_rpc, timeout=RPC_S).items():
        target[name].copy_(tensor)
    _held_by_rpc.update(target)
    return time.monotonic()


def _join_rpc(rank: int, port: int, world_size: int) -> None:
    from torch.distributed import rpc  # noqa: PLC0415

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=RPC_S
    )
    rpc.init_rpc(f"r{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank:
        threading.Event().wait()  # until this process is killed


def torch_rpc(mb: int, count: int) -> None:
    """Measure torch's RPC: readers, each in a process of its own, fetch the model from rank 0."""
    from torch.distributed import rpc  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    torch.multiprocessing.spawn(
        _join_reader, args=(port, count + 1), nprocs=count, join=False, daemon=True
    )
    _held_by_rpc.update(model_of(mb, 1.0))
    _join_rpc(0, port, count + 1)
    report("ready")
    for number, _ in enumerate(sys.stdin):
        for each in _held_by_rpc.values():
            each.fill_(number % 200)
        began_s = time.monotonic()
        calls = [rpc.rpc_async(f"r{i + 1}", _read_by_rpc, (mb,)) for i in range(count)]
        report(0.0, max(call.wait() for call in calls) - began_s)


def _join_reader(index: int, port: int, world_size: int) -> None:
    _join_rpc(index + 1, port, world_size)


def main() -> None:
    kind, mb, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "ray":
        ray_store(mb, count)
    elif kind == "torch_rpc":
        torch_rpc(mb, count)
    else:
        asyncio.run(torchstore(mb, count, tears=kind == "torchstore-torn"))


if __name__ == "__main__":
    main()
