"""Processes of bench/weights.py: readers of each kind, a trainer, and the sender of a bare socket.

    python bench/weights_readers.py KIND MB [PORT]

Lines for bench/weights.py begin with "report"; others are logs. A reader prints "report ready", and
for each round "report done", the number of the round (of the version, for readers of Shoal), and
the time at which the reader's tensors contained the model.
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch

TENSOR_BYTES = 8 * 1024 * 1024
SERIES = "bench/policy"
SHM = Path("/dev/shm")
FLOOR, FILE = SHM / "shoal-bench-floor", SHM / "shoal-bench.safetensors"
WAIT_S = 3600.0


def model_of(mb: int, number: float = 0.0) -> dict[str, torch.Tensor]:
    """Return a model of bf16 tensors of 8 MiB each."""
    count, elements = mb * 1024 * 1024 // TENSOR_BYTES, TENSOR_BYTES // 2
    shape = (elements // 1024, 1024)
    return {f"w{i}": torch.full(shape, number, dtype=torch.bfloat16) for i in range(count)}


def report(*words: object) -> None:
    """Print a line that bench/weights.py reads."""
    print("report", *words, flush=True)


def read_shoal(
    mb: int, *, local: bool, by_difference: bool = False, when_told: bool = False
) -> None:
    """Install each newest version. Report the seconds of each verified fetch as "took". With
    `when_told`, install one version for each line on standard input."""
    from shoal.weights.subscription import Subscription  # noqa: PLC0415 - only for this kind
    from shoal_client.weights.reader import SeriesReader  # noqa: PLC0415
    from shoal_difference.codec import apply  # noqa: PLC0415
    from shoal_proto.errors import VersionGone  # noqa: PLC0415

    class Reader(SeriesReader):
        def report(
            self, installed: int, digest: bytes, fetch_s: float = 0.0, fetch_bytes: int = 0
        ) -> None:
            super().report(installed, digest, fetch_s, fetch_bytes)
            report("took", installed, fetch_s)

    target, name = model_of(mb), f"reader-{os.getpid()}"
    addresses, difference = [os.environ["SHOAL_COORDINATOR"]], apply if by_difference else None
    reader = Reader(addresses, SERIES, name, may_be_local=local, apply_difference=difference)
    with Subscription(reader, SERIES) as series:
        report("ready")
        while not when_told or sys.stdin.readline():
            version = series.wait(timeout=WAIT_S)
            try:
                series.fetch(version, into=target)
            except VersionGone:
                continue  # a newer version was published before this reader had a lease
            if not by_difference:  # else the model has weights of different values
                assert target["w0"][0, 0] == target[next(reversed(target))][0, 0]
            report("done", version.number, time.monotonic())


def publish_once(mb: int) -> None:
    """Publish one version, and run until standard input is closed."""
    import shoal  # noqa: PLC0415

    shoal.publish(SERIES, model_of(mb, 3.5), keep=1).wait("committed", timeout=WAIT_S)
    report("ready")
    sys.stdin.read()


def read_shm(mb: int) -> None:
    target = model_of(mb)
    raw = torch.from_file(str(FLOOR), shared=True, size=mb << 20, dtype=torch.uint8)
    report("ready")
    for line in sys.stdin:
        at = 0
        for tensor in target.values():
            tensor.view(torch.uint8).view(-1).copy_(raw[at : at + tensor.nbytes])
            at += tensor.nbytes
        report("done", int(line), time.monotonic())


def read_safetensors(mb: int) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    target = model_of(mb)
    report("ready")
    for line in sys.stdin:
        for name, tensor in load_file(FILE).items():
            target[name].copy_(tensor)
        report("done", int(line), time.monotonic())


def send_bare(mb: int, port: int) -> None:
    """Send the bytes of a model for each byte received."""
    data = bytes(bytearray(os.urandom(1 << 20)) * mb)
    with socket.create_connection(("127.0.0.1", port)) as own:
        while own.recv(1):
            own.sendall(data)


def main() -> None:
    kind, *numbers = sys.argv[1:]
    arguments = [int(each) for each in numbers]
    if kind.startswith("shoal"):
        local, by_difference = kind == "shoal", kind == "shoal-differences"
        read_shoal(
            *arguments,
            local=local,
            by_difference=by_difference,
            when_told=kind == "shoal-tcp",
        )
    else:
        programs = {
            "publisher": publish_once,
            "shm": read_shm,
            "safetensors": read_safetensors,
            "sender": send_bare,
        }
        programs[kind](*arguments)


if __name__ == "__main__":
    main()
