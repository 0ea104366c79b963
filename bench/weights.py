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
- `weights_tcp_over_socket`: bytes per second of a fetch over TCP on loopback until all of them are
  verified, over those of a bare socket. Both into memory that earlier versions were received into;
  `_first`: both into memory that was never touched.
- `weights_late_over_usual`: a fetch by a reader that comes after the trainer was killed, over that
  by one that comes while it lives.
- `weights_step_delay`: ten steps with a publication, over ten steps without one.
- `weights_link_difference_over_full` (`--parts link`, which takes root): over a link of 100 MB/s,
  in a network namespace: from `publish()` until installed, of a version with 0.9 % of its weights
  changed, over that of one with all of them changed.
- `weights_relays_64_server_copies` (`--parts relays`): copies of a version that the servers send,
  all together, to 64 readers that relay (without torch, each with a network of 40 MB/s to send on).
  `weights_relays_64_over_4`: from `publish()` until the last of them has it, over the same with 4
  readers; the depth of the tree grows from 2 to 6.
- `safetensors` (a file on tmpfs, renamed, and loaded), `torch_rpc`, and, if there is an environment
  for them (see bench/weights_peers.py), `ray` and `torchstore`: the same journey.
  `torchstore_torn_reads`: of a reader while one writer overwrites the key.

`weights_cpu_seconds`: of all processes of an entrant, in a round.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

PEERS_PYTHON = Path(__file__).parent / ".venvs" / "peers" / "bin" / "python"
LINK_BYTES_PER_S = 100e6
TENSOR_BYTES = 8 * 1024 * 1024
SERIES = "bench/policy"
SHM = Path("/dev/shm")
RELAYS = (4, 16, 64)
RELAYS_A_PROCESS = 8


def model_of(mb: int, number: float = 0.0) -> dict[str, torch.Tensor]:
    count, elements = mb * 1024 * 1024 // TENSOR_BYTES, TENSOR_BYTES // 2
    shape = (elements // 1024, 1024)
    return {f"w{i}": torch.full(shape, number, dtype=torch.bfloat16) for i in range(count)}


# --- readers: each says "ready", and of each round when it was done and its CPU seconds ---


def say(*words: object) -> None:
    print(*words, flush=True)


def done(number: int) -> None:
    say("done", number, time.monotonic(), time.process_time())


def read_shoal(mb: int, *, local: bool, by_difference: bool = False) -> None:
    from shoal.weights.subscription import Subscription  # noqa: PLC0415 - peers do without
    from shoal_client.weights.reader import SeriesReader  # noqa: PLC0415
    from shoal_difference.codec import apply  # noqa: PLC0415

    class Reader(SeriesReader):
        """Says how long each version took until it was verified."""

        def report(
            self, installed: int, digest: bytes, fetch_s: float = 0.0, fetch_bytes: int = 0
        ) -> None:
            super().report(installed, digest, fetch_s, fetch_bytes)
            say("took", installed, fetch_s)

    target, name = model_of(mb), f"reader-{os.getpid()}"
    addresses, difference = [os.environ["SHOAL_COORDINATOR"]], apply if by_difference else None
    reader = Reader(addresses, SERIES, name, may_be_local=local, apply_difference=difference)
    with Subscription(reader, SERIES) as series:
        say("ready")
        while True:
            version = series.wait(timeout=600)
            series.fetch(version, into=target)
            assert target["w0"][0, 0] == target[next(reversed(target))][0, 0]
            done(version.number)


def publish_once(mb: int) -> None:
    """A trainer that publishes one version and lives on."""
    import shoal  # noqa: PLC0415

    shoal.publish(SERIES, model_of(mb, 3.5), keep=1).wait("committed", timeout=600)
    say("ready")
    sys.stdin.read()


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
        self,
        stack: ExitStack,
        kind: str,
        count: int,
        *arguments: object,
        under: Sequence[str] = (),
        **own: str,
    ) -> None:
        """`under`: what runs the command that follows it."""
        command = [*under, sys.executable, __file__, "--reader", kind]
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


def shoal_turn(model: dict[str, torch.Tensor], readers: Readers, *, changes: bool = True) -> Turn:
    import shoal  # noqa: PLC0415

    def turn(number: int) -> tuple[float, float]:
        if changes:
            change(model, number)
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


def change(model: dict[str, torch.Tensor], number: int) -> None:
    """Every weight: what is the same as before is not sent again."""
    for each in model.values():
        each.fill_(number % 200 + 1)


class Peer:
    """A system of bench/weights_peers.py, in a process that answers each round with two numbers."""

    def __init__(self, stack: ExitStack, kind: str, *arguments: object) -> None:
        program = Path(__file__).with_name("weights_peers.py")
        self.process = subprocess.Popen(
            [str(PEERS_PYTHON), str(program), kind, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "400"},
        )
        stack.callback(self.end)
        assert self._report() == ["ready"]

    def _report(self) -> list[str]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, "the peer has ended"
            if line.startswith("told "):
                return line.split()[1:]

    def turn(self, number: int) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        one, other = self._report()
        return float(one), float(other)

    def end(self) -> None:
        """CPU seconds of the process and its children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def cpu_s() -> float:
    """CPU seconds of this process and of all below it, so far."""
    found, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return found


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


class BareSocket:
    """Transfer on loopback: one process sends the bytes, this one receives them into its memory."""

    def __init__(self, stack: ExitStack, mb: int) -> None:
        self._num_bytes = mb << 20
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = subprocess.Popen(
            [sys.executable, __file__, "--reader", "sender", str(mb), str(listener_port(listener))]
        )
        stack.callback(sender.wait)
        stack.callback(sender.kill)
        self._connected = stack.enter_context(listener.accept()[0])
        self._buffer = memoryview(bytearray(self._num_bytes))
        self._receive(self._buffer)

    def _receive(self, buffer: memoryview) -> float:
        began_s, got = time.monotonic(), 0
        self._connected.send(b"g")
        while got < len(buffer):
            got += self._connected.recv_into(buffer[got:])
        return len(buffer) / (time.monotonic() - began_s)

    def bytes_per_s(self) -> float:
        """Into memory that was received into before."""
        return self._receive(self._buffer)

    def first_bytes_per_s(self) -> float:
        """Into memory that was never touched."""
        return self._receive(memoryview(bytearray(self._num_bytes)))


def listener_port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def send_bare(mb: int, port: int) -> None:
    data = bytes(bytearray(os.urandom(1 << 20)) * mb)
    with socket.create_connection(("127.0.0.1", port)) as own:
        while own.recv(1):
            own.sendall(data)


def by_turns(
    entrants: dict[str, Turn], rounds: int, spent_s: dict[str, list[float]]
) -> dict[str, list[tuple[float, float]]]:
    """Rounds of all systems by turns, so that other load meets all alike. CPU seconds go to
    `spent_s`."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entrants}
    for number in range(1, rounds + 3):
        for name, turn in entrants.items():
            before_s = cpu_s()
            times = turn(number)
            if number > 2:
                found[name].append(times)
                spent_s.setdefault(name, []).append(cpu_s() - before_s)
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
            if PEERS_PYTHON.exists():
                for name in ("ray", "torchstore"):
                    entrants[name] = Peer(stack, name, mb, count).turn
        spent_s: dict[str, list[float]] = {}
        found = by_turns(entrants, options.rounds, spent_s)
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
            rows.append(
                Row(
                    metric=f"weights_cpu_seconds_{suffix}",
                    value=median(spent_s["shoal"]),
                    unit="s",
                    runs=runs,
                    peer=name,
                    peer_value=median(spent_s[name]),
                )
            )
            over = ratio(until["shoal"], until[name])
            metric = f"weights_fetch_over_{'shm_floor' if name == 'shm' else name}_{suffix}"
            rows.append(Row(metric=metric, value=over, unit="", runs=runs))
    if len(options.readers) > 1 and count != options.readers[0]:
        over = median(kept["shoal"]) / options.kept_with_first
        metric = f"weights_publish_{count}_over_{options.readers[0]}_readers_{mb}mb"
        rows.append(Row(metric=metric, value=over, unit="", runs=runs))
    else:
        options.kept_with_first = median(kept["shoal"])
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

    mb, model = options.mb, model_of(options.mb, 2.5)
    own: dict[str, list[float]] = {"": [], "_first": []}
    theirs: dict[str, list[float]] = {"": [], "_first": []}
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(let_go)
        bare = BareSocket(stack, mb)
        usual = Readers(stack, "shoal-tcp", 1, mb).ready()
        turn = shoal_turn(model, usual)
        for number in range(1, options.rounds + 3):
            turn(number)
            own[""].append((mb << 20) / usual.took[-1])
            theirs[""].append(bare.bytes_per_s())
            with ExitStack() as one_round:
                first = Readers(one_round, "shoal-tcp", 1, mb).ready()
                first.last_done_s(1)
                own["_first"].append((mb << 20) / first.took[0])
                theirs["_first"].append(bare.first_bytes_per_s())
    rows = []
    for which, speeds in own.items():
        kept = options.rounds
        pair = speeds[-kept:], theirs[which][-kept:]
        values = [median(each) / 1e9 for each in pair]
        rows.append(
            Row(
                metric=f"weights_tcp{which}_{mb}mb",
                value=values[0],
                unit="GB/s",
                runs=kept,
                peer="bare socket",
                peer_value=values[1],
            )
        )
        metric = f"weights_tcp_over_socket{which}_{mb}mb"
        rows.append(Row(metric=metric, value=ratio(*pair), unit="", runs=kept))
    return rows


def late_joiner(options: argparse.Namespace) -> list[Any]:
    """Fetches by readers that come while the trainer lives, and after it was killed."""
    from rows import Row  # noqa: PLC0415

    import shoal  # noqa: PLC0415

    target, times = model_of(options.mb), {True: [], False: []}
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        trainer = Readers(stack, "publisher", 1, options.mb).ready()
        for lives in (True, False):
            if not lives:
                trainer.end()
            for _ in range(options.rounds + 1):
                began_s = time.monotonic()
                with shoal.subscribe(SERIES) as series:
                    series.fetch(series.wait(timeout=60), into=target)
                    times[lives].append(time.monotonic() - began_s)
    usual, late = (median(times[lives][1:]) for lives in (True, False))
    return [
        Row(
            metric="weights_late_over_usual",
            value=late / usual,
            unit="",
            runs=options.rounds,
        )
    ]


def step_delay(options: argparse.Namespace) -> list[Any]:
    """Ten steps of a matrix product on one thread, with a publication and without, by turns."""
    from rows import Row  # noqa: PLC0415

    import shoal  # noqa: PLC0415

    torch.set_num_threads(1)
    model, a = model_of(64, 1.0), torch.randn(1500, 1500)
    ratios = []
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(let_go)
        Readers(stack, "shoal", 1, 64).ready()

        def ten_steps(number: int, *, publishes: bool) -> float:
            change(model, number)
            began_s = time.monotonic()
            if publishes:
                shoal.publish(SERIES, model, step=number, keep=1)
            for _ in range(10):
                for _ in range(3):
                    a @ a
            return time.monotonic() - began_s

        for number in range(1, 4 * options.rounds + 3):
            turns = [True, False] if number % 2 else [False, True]
            took = {each: ten_steps(number, publishes=each) for each in turns}
            if number > 2:
                ratios.append(took[True] / took[False])
    return [Row(metric="weights_step_delay", value=median(ratios), unit="", runs=len(ratios))]


def over_link(options: argparse.Namespace) -> list[Any]:
    """A difference and the whole over a link of LINK_BYTES_PER_S to the reader."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from rows import Row  # noqa: PLC0415
    from support.clusters.parameter_cluster import ParameterCluster  # noqa: PLC0415
    from support.network.namespaces import RoutedHosts  # noqa: PLC0415

    model = {
        name: torch.randn(each.shape).mul_(0.028).bfloat16()
        for name, each in model_of(options.mb).items()
    }
    took: dict[str, list[float]] = {"full": [], "difference": []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(RoutedHosts())
        running = stack.enter_context(ParameterCluster(place, 2, hosts=hosts))
        os.environ["SHOAL_COORDINATOR"] = running.coordinator.grpc
        stack.callback(let_go)
        host = hosts.add("reader")
        # The link to the reader's namespace, at the router's end.
        limit = ("rate", f"{int(8 * LINK_BYTES_PER_S)}bit", "burst", "1mb", "latency", "50ms")
        hosts._in_router(
            "tc", "qdisc", "add", "dev", f"to{len(hosts._hosts) - 1}", "root", "tbf", *limit
        )
        under = ("nsenter", f"--net={host.path}")
        reader = Readers(stack, "shoal-differences", 1, options.mb, under=under).ready()
        turn = shoal_turn(model, reader, changes=False)
        for number in range(1, options.rounds + 2):
            for kind, times in took.items():
                for each in model.values():
                    bits = each.view(torch.int16)
                    if kind == "full":
                        bits.add_(1)
                    else:
                        bits += (torch.rand(bits.shape) < 0.009).to(torch.int16)  # one number up
                times.append(turn(number)[1])
    full, difference = (median(each[1:]) for each in took.values())
    runs = options.rounds
    return [
        Row(metric=f"weights_link_full_{options.mb}mb", value=full, unit="s", runs=runs),
        Row(
            metric=f"weights_link_difference_over_full_{options.mb}mb",
            value=difference / full,
            unit="",
            runs=runs,
        ),
    ]


def relays(options: argparse.Namespace) -> list[Any]:
    """A version to 4, 16 and 64 readers that pass it on to each other."""
    from rows import Row  # noqa: PLC0415

    mb, rows, times = min(options.mb, 64), [], {}
    for count in RELAYS:
        with ExitStack() as stack:
            os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
            stack.callback(let_go)
            took, copies = relay_rounds(stack, model_of(mb), count, options.rounds)
        times[count] = median(took)
        runs = len(took)
        metric = f"weights_relays_{count}"
        rows += [
            Row(metric=f"{metric}_server_copies", value=median(copies), unit="", runs=runs),
            Row(metric=f"{metric}_{mb}mb", value=times[count], unit="s", runs=runs),
        ]
    first, *_, last = RELAYS
    over = times[last] / times[first]
    return [
        *rows,
        Row(metric=f"weights_relays_{last}_over_{first}", value=over, unit="", runs=options.rounds),
    ]


def relay_rounds(
    stack: ExitStack, model: dict[str, torch.Tensor], count: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds from `publish()` until the last of `count` relays has the version, and the copies of
    it that came from servers."""
    import shoal  # noqa: PLC0415

    program = Path(__file__).with_name("weights_relays.py")
    sizes = [min(RELAYS_A_PROCESS, count - at) for at in range(0, count, RELAYS_A_PROCESS)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(program),
                os.environ["SHOAL_COORDINATOR"],
                SERIES,
                f"r{i}",
                str(size),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, size in enumerate(sizes)
    ]
    for each in processes:
        stack.callback(each.wait)
        stack.callback(each.kill)
    outputs = [each.stdout for each in processes if each.stdout is not None]
    for output in outputs:
        assert output.readline().strip() == "ready"
    took, copies = [], []
    num_bytes = sum(each.nbytes for each in model.values())
    for number in range(1, rounds + 2):
        change(model, number)
        began_s = time.monotonic()
        version = shoal.publish(SERIES, model, step=number).wait("committed", timeout=600)
        assert version is not None
        lines = [
            output.readline().split()
            for output, size in zip(outputs, sizes, strict=True)
            for _ in range(size)
        ]
        assert all(int(n) == version.number for _, n, _, _ in lines)
        if number > 1:
            took.append(max(float(done_s) for _, _, done_s, _ in lines) - began_s)
            copies.append(sum(int(sent) for *_, sent in lines) / num_bytes)
    return took, copies


def torn_reads(seconds: float = 20.0) -> list[Any]:
    """Reads of TorchStore's readers while one writer overwrites the key."""
    from rows import Row  # noqa: PLC0415

    with ExitStack() as stack:
        reads, torn = Peer(stack, "torchstore-torn", 64, 2).turn(int(seconds))
    return [Row(metric="torchstore_torn_reads", value=torn, unit="reads", runs=int(reads))]


PARTS = {
    "readers": lambda o: [row for count in o.readers for row in with_readers(o, count)],
    "tcp": over_tcp,
    "late": late_joiner,
    "step": step_delay,
    "link": over_link,
    "relays": relays,
    "torn": lambda o: torn_reads() if PEERS_PYTHON.exists() else [],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS][:4])
    parser.add_argument("--reader", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        kind, *rest = options.reader
        arguments = [int(each) for each in rest]
        if kind.startswith("shoal"):
            read_shoal(
                arguments[0], local=kind == "shoal", by_difference=kind == "shoal-differences"
            )
        elif kind == "publisher":
            publish_once(arguments[0])
        elif kind == "rpc":
            mb, port, world_size, rank = arguments
            read_rpc(mb, port, rank, world_size)
        else:
            others = {"shm": read_shm, "safetensors": read_safetensors, "sender": send_bare}
            others[kind](*arguments)
        return
    from rows import publish  # noqa: PLC0415

    publish("weights", [row for part in options.parts for row in PARTS[part](options)])


if __name__ == "__main__":
    main()
