"""Published weights, beside what the machine can do and beside others, by turns in the same run.

    make bench NAME=weights
    .venv/bin/python bench/weights.py --mb 1024 --rounds 10 --readers 1 4 8

A model of bf16 tensors of 8 MiB each is published by one process and installed by others, each
into tensors of its own.

- `weights_publish_over_memcpy`: how long `publish()` keeps the trainer, over a copy of the same
  bytes into memory that is there already. `_8_over_1`: with 8 readers over that with one.
- `weights_fetch_over_shm_floor`: from the call of `publish()` until the last of 4 readers has
  installed, over the floor: one process copies the model into shared memory, and the same number
  copies it out again, as soon as it is told.
- `weights_tcp_over_socket`: bytes per second of a fetch over TCP on loopback, digests included,
  over those of a bare socket.
- `safetensors` (a file on tmpfs, renamed, and loaded) and `torch_rpc`: the same journey.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

TENSOR_BYTES = 8 * 1024 * 1024
SERIES = "bench/policy"
SHM = Path("/dev/shm")


def model_of(mb: int, number: float = 0.0) -> dict[str, torch.Tensor]:
    count, elements = mb * 1024 * 1024 // TENSOR_BYTES, TENSOR_BYTES // 2
    shape = (elements // 1024, 1024)
    return {f"w{i}": torch.full(shape, number, dtype=torch.bfloat16) for i in range(count)}


# --- readers: each says "ready", and of each round when it was done and its CPU seconds ---


def say(*words: object) -> None:
    print(*words, flush=True)


def done(number: int) -> None:
    say("done", number, time.monotonic(), time.process_time())


def read_shoal(mb: int, local: bool) -> None:
    from shoal.weights.subscription import Subscription  # noqa: PLC0415 - peers do without
    from shoal_client.weights.reader import SeriesReader  # noqa: PLC0415

    target, name = model_of(mb), f"reader-{os.getpid()}"
    addresses = [os.environ["SHOAL_COORDINATOR"]]
    with Subscription(SeriesReader(addresses, SERIES, name, may_be_local=local), SERIES) as series:
        say("ready")
        while True:
            version = series.wait(timeout=600)
            began_s = time.monotonic()
            series.fetch(version, into=target)
            assert target["w0"][0, 0] == target[next(reversed(target))][-1, -1]
            say("took", version.number, time.monotonic() - began_s)
            done(version.number)


def read_shm(mb: int) -> None:
    target = model_of(mb)
    raw = torch.from_file(
        str(SHM / "shoal-bench-floor"), shared=True, size=mb << 20, dtype=torch.uint8
    )
    say("ready")
    for line in sys.stdin:
        at = 0
        for tensor in target.values():
            tensor.view(torch.uint8).view(-1).copy_(raw[at : at + tensor.nbytes])
            at += tensor.nbytes
        done(int(line))


def read_safetensors(mb: int) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    target = model_of(mb)
    say("ready")
    for line in sys.stdin:
        for name, tensor in load_file(SHM / "shoal-bench.safetensors").items():
            target[name].copy_(tensor)
        done(int(line))


def read_rpc(mb: int, port: int, rank: int, world_size: int) -> None:
    from torch.distributed import rpc  # noqa: PLC0415

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"r{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    target = model_of(mb)
    say("ready")
    for line in sys.stdin:
        for name, tensor in rpc.rpc_sync("r0", held_by_rpc).items():
            target[name].copy_(tensor)
        done(int(line))


_rpc: dict[str, torch.Tensor] = {}


def held_by_rpc() -> dict[str, torch.Tensor]:
    return _rpc


# --- the publishing side ---


class Readers:
    """Reading processes; `go` tells them of a round where nothing else does."""

    def __init__(
        self, stack: ExitStack, kind: str, count: int, *arguments: object, **own: str
    ) -> None:
        command = [sys.executable, __file__, "--reader", kind]
        self.processes = [
            subprocess.Popen(
                [*command, *map(str, arguments), *([str(rank + 1)] if kind == "rpc" else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            )
            for rank in range(count)
        ]
        stack.callback(self.end)
        self.took: list[float] = []

    def ready(self) -> "Readers":
        for each in self.processes:
            assert each.stdout is not None and each.stdout.readline().strip() == "ready"
        return self

    def go(self, number: int) -> None:
        for each in self.processes:
            assert each.stdin is not None
            each.stdin.write(f"{number}\n")
            each.stdin.flush()

    def last_done_s(self, number: int) -> float:
        """The time at which the last of them had installed the round's model."""
        times = []
        for each in self.processes:
            while True:
                assert each.stdout is not None
                word, n, *rest = each.stdout.readline().split()
                if word == "took":
                    self.took.append(float(rest[0]))
                elif int(n) >= number:
                    times.append(float(rest[0]))
                    break
        return max(times)

    def end(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


Turn = Callable[[int], tuple[float, float]]
"""A round by its number: seconds of the publisher, and until the last reader was done."""


def shoal_turn(model: dict[str, torch.Tensor], readers: Readers) -> Turn:
    import shoal  # noqa: PLC0415

    def turn(number: int) -> tuple[float, float]:
        began_s = time.monotonic()
        ticket = shoal.publish(SERIES, model, step=number, keep=1)
        kept_s = time.monotonic() - began_s
        version = ticket.wait("committed", timeout=600)
        assert version is not None
        last_s = readers.last_done_s(version.number) - began_s
        # So that the memory for the next one is there, as while a trainer computes.
        time.sleep(max(0.3, model["w0"].nbytes * len(model) / 4e9))
        return kept_s, last_s

    return turn


def shm_turn(model: dict[str, torch.Tensor], readers: Readers, raw: torch.Tensor) -> Turn:
    def turn(number: int) -> tuple[float, float]:
        began_s = time.monotonic()
        copy_into(raw, model)
        kept_s = time.monotonic() - began_s
        readers.go(number)
        return kept_s, readers.last_done_s(number) - began_s

    return turn


def copy_into(raw: torch.Tensor, model: dict[str, torch.Tensor]) -> None:
    at = 0
    for tensor in model.values():
        raw[at : at + tensor.nbytes].copy_(tensor.view(torch.uint8).view(-1))
        at += tensor.nbytes


def safetensors_turn(model: dict[str, torch.Tensor], readers: Readers) -> Turn:
    from safetensors.torch import save_file  # noqa: PLC0415

    def turn(number: int) -> tuple[float, float]:
        began_s = time.monotonic()
        save_file(model, SHM / "shoal-bench.draft")
        (SHM / "shoal-bench.draft").rename(SHM / "shoal-bench.safetensors")
        kept_s = time.monotonic() - began_s
        readers.go(number)
        return kept_s, readers.last_done_s(number) - began_s

    return turn


def rpc_turn(model: dict[str, torch.Tensor], readers: Readers) -> Turn:
    _rpc.update(model)

    def turn(number: int) -> tuple[float, float]:
        began_s = time.monotonic()
        readers.go(number)
        return 0.0, readers.last_done_s(number) - began_s

    return turn


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster() -> Iterator[str]:
    from shoal_client.local.cluster import LocalCluster, LocalClusterConfig  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as place:
        config = LocalClusterConfig(directory=Path(place), num_parameter_servers=2)
        with LocalCluster(config) as running:
            yield running.coordinator


def let_go() -> None:
    """The series goes with its cluster."""
    import shoal  # noqa: PLC0415

    shoal.end_publishing(SERIES)


def socket_bytes_per_s(mb: int, rounds: int) -> list[float]:
    """A bare socket on loopback: one side sends the bytes, the other takes them into its memory."""
    data, found = bytearray(mb << 20), []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            connected, _ = listener.accept()
            with connected:
                for _ in range(rounds):
                    connected.recv(1)
                    connected.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        with socket.create_connection(listener.getsockname()) as own:
            room = memoryview(bytearray(mb << 20))
            for _ in range(rounds):
                began_s, got = time.monotonic(), 0
                own.send(b"g")
                while got < len(room):
                    got += own.recv_into(room[got:])
                found.append(len(room) / (time.monotonic() - began_s))
    return found


def by_turns(entrants: dict[str, Turn], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Rounds of all systems by turns, so that other load meets all alike."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entrants}
    for number in range(1, rounds + 3):
        for name, turn in entrants.items():
            times = turn(number)
            if number > 2:
                found[name].append(times)
    return found


def ratio(own: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(own, theirs, strict=True))


def with_readers(options: argparse.Namespace, count: int) -> list[Any]:
    """All entrants with so many readers."""
    from rows import Row  # noqa: PLC0415

    mb, rows, model = options.mb, [], model_of(options.mb, 1.5)
    with ExitStack() as stack:
        floor = SHM / "shoal-bench-floor"
        stack.callback(floor.unlink, missing_ok=True)
        stack.callback((SHM / "shoal-bench.safetensors").unlink, missing_ok=True)
        raw = torch.from_file(str(floor), shared=True, size=mb << 20, dtype=torch.uint8)
        copy_into(raw, model)
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(let_go)
        entrants: dict[str, Turn] = {}
        own = Readers(stack, "shoal", count, mb).ready()
        entrants["shoal"] = shoal_turn(model, own)
        entrants["shm"] = shm_turn(model, Readers(stack, "shm", count, mb).ready(), raw)
        if not options.no_peers:
            peer = Readers(stack, "safetensors", count, mb).ready()
            entrants["safetensors"] = safetensors_turn(model, peer)
            entrants["torch_rpc"] = rpc_entrant(stack, model, mb, count)
        found = by_turns(entrants, options.rounds)
    kept = {name: [each[0] for each in turns] for name, turns in found.items()}
    until = {name: [each[1] for each in turns] for name, turns in found.items()}
    suffix, runs = f"{mb}mb_{count}_readers", options.rounds
    floor_s = median(kept["shm"])
    rows.append(
        Row(
            metric=f"weights_publish_{suffix}",
            value=median(kept["shoal"]),
            unit="s",
            runs=runs,
            peer="memcpy",
            peer_value=floor_s,
        )
    )
    over = ratio(kept["shoal"], kept["shm"])
    rows.append(Row(metric=f"weights_publish_over_memcpy_{suffix}", value=over, unit="", runs=runs))
    for name in entrants:
        if name != "shoal":
            rows.append(
                Row(
                    metric=f"weights_until_installed_{suffix}",
                    value=median(until["shoal"]),
                    unit="s",
                    runs=runs,
                    peer=name,
                    peer_value=median(until[name]),
                )
            )
    over = ratio(until["shoal"], until["shm"])
    metric = f"weights_fetch_over_shm_floor_{suffix}"
    rows.append(Row(metric=metric, value=over, unit="", runs=runs))
    return rows


def rpc_entrant(stack: ExitStack, model: dict[str, torch.Tensor], mb: int, count: int) -> Turn:
    from torch.distributed import rpc  # noqa: PLC0415

    port = free_port()
    readers = Readers(stack, "rpc", count, mb, port, count + 1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("r0", rank=0, world_size=count + 1, rpc_backend_options=options)
    stack.callback(rpc.shutdown, graceful=False)
    return rpc_turn(model, readers.ready())


def over_tcp(options: argparse.Namespace) -> list[Any]:
    from rows import Row  # noqa: PLC0415

    model = model_of(options.mb, 2.5)
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(let_go)
        readers = Readers(stack, "shoal-tcp", 1, options.mb).ready()
        turn = shoal_turn(model, readers)
        own, theirs = [], []
        for number in range(1, options.rounds + 3):
            turn(number)
            [bare] = socket_bytes_per_s(options.mb, 1)
            own.append((options.mb << 20) / readers.took[-1])
            theirs.append(bare)
    row = Row(
        metric=f"weights_tcp_{options.mb}mb",
        value=median(own[2:]) / 1e9,
        unit="GB/s",
        runs=options.rounds,
        peer="bare socket",
        peer_value=median(theirs[2:]) / 1e9,
    )
    over = ratio(own[2:], theirs[2:])
    return [row, Row(metric="weights_tcp_over_socket", value=over, unit="", runs=options.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--reader", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        kind, *rest = options.reader
        arguments = [int(each) for each in rest]
        if kind.startswith("shoal"):
            read_shoal(arguments[0], local=kind == "shoal")
        elif kind == "rpc":
            mb, port, world_size, rank = arguments
            read_rpc(mb, port, rank, world_size)
        else:
            {"shm": read_shm, "safetensors": read_safetensors}[kind](*arguments)
        return
    from rows import publish  # noqa: PLC0415

    rows = [row for count in options.readers for row in with_readers(options, count)]
    rows += over_tcp(options)
    publish("weights", rows)


if __name__ == "__main__":
    main()
