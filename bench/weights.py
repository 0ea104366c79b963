"""Published weights, in turns with other systems and with plain copies, in the same run.

    make bench NAME=weights
    .venv/bin/python bench/weights.py --mb 1024 --readers 1 4 8 --parts readers
    .venv/bin/python bench/weights.py --mb 8 --rounds 1 --readers 1    # each part once, small

A model of bf16 tensors of 8 MiB each is published by one process and installed by others, each
into tensors of its own. `--parts` selects parts; each measures fewer rounds if `--minutes` are over
(not `differences` and `torn`), and is stopped one minute after twice that time. At the end the
bench lists what it left out.

- `readers`. `weights_publish_over_memcpy`: time of the call of `publish()`, over the time of a copy
  of the same bytes into memory that exists already. `weights_publish_8_over_1_readers`: time of
  `publish()` with 8 readers, over the time with one. `weights_fetch_over_shm_floor`: time from the
  call of `publish()` until the last reader has installed the model, over the time of plain copies:
  one process copies the model into shared memory and sends a line, and as many readers copy it out.
  `weights_fetch_over_PEER`: the same over the time with `safetensors` (a file on tmpfs, renamed and
  loaded), `torch_rpc`, and, if there is an environment for them (see bench/weights_peers.py), `ray`
  and `torchstore`; `--peers ray` selects one. `weights_cpu_seconds`: CPU time of all processes of
  the bench during a round of the system; the other systems are idle then, but their background work
  counts.
- `tcp`. `weights_tcp_over_socket`: bytes per second of a fetch over TCP on loopback until all bytes
  are verified, over bytes per second of a bare socket. The fetch begins after the publisher's own
  work for the version, so that the two do not compete for processors. Both receive into memory that
  was used for earlier versions; `_first`: both receive into memory that was never touched.
- `late`. `weights_late_over_usual`: time of a fetch by a reader that starts after the trainer was
  killed, over the time of a fetch by a reader that starts while the trainer runs.
- `step`. `weights_step_delay`: time of ten steps with a publication, over ten steps without one.
- `differences`. `weights_difference_over_full` and `_over_xor`: bytes of a difference at 0.9 % of
  weights changed, over the full version, and over the XOR of the two versions, compressed by
  zstandard at level 1; `_encode`, `_decode`: GB of the full version per second of CPU time. See
  bench/weight_differences.py.
- `link`, which needs root. `weights_link_difference_over_full`: time from `publish()` of a version
  with 0.9 % of its weights changed, until a reader behind a link of 100 MB/s (in a network
  namespace) has installed it; over the same time of a version with all weights changed.
- `relays`. `weights_relays_64_server_copies`: copies of a version that all servers together send to
  64 readers that relay (without torch, each at 40 MB/s). `weights_relays_64_over_4`: time from
  `publish()` until the last of 64 readers has the version, over that with 4; the depth of the tree
  is 6 and 2.
- `failover`. `weights_failover_KIND_after_detection`: see bench/weights_failover.py.
- `torn`. `torchstore_torn_reads`: reads by TorchStore's readers that contain tensors of two
  versions, while one writer overwrites the key.

bench/weights_faults.py measures whether faults cause torn, unfenced or lost versions.
"""

import argparse
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType

import psutil
import torch
import weight_differences
from rows import Row, publish
from weights_failover import failovers
from weights_readers import FILE, FLOOR, SERIES, model_of

HERE = Path(__file__).parent
PEERS_PYTHON = HERE / ".venvs" / "peers" / "bin" / "python"
NO_PEERS = f"no {PEERS_PYTHON}, see bench/weights_peers.py"
PEERS_APART = ("ray", "torchstore")
"""Peers that need an environment of their own, see bench/weights_peers.py."""
PEERS = ("safetensors", "torch_rpc", *PEERS_APART)
LINK_BYTES_PER_S = 100e6
RELAYS = (4, 16, 64)
RELAYS_A_PROCESS = 8
WARM_UP = 2
"""Rounds that are not counted."""
WAIT_S = 3600.0
"""Longest wait for a version; the limit of a part ends it earlier."""
CLEAN_UP_S = 60.0


class GivenUp(Exception):
    """A part was stopped: CLEAN_UP_S after twice its time, it had not ended."""


class LeftOut(Exception):
    """A part cannot run here."""


class PeerEnded(Exception):
    """A process ended before it sent an expected line."""


class Limit:
    """Time limit of a part."""

    def __init__(self, seconds: float, left_out: list[str]) -> None:
        self._left_out = left_out
        self._ends_s = time.monotonic() + seconds

    def rounds(self, count: int, warm_up: int = 1) -> Iterator[int]:
        """Yield numbers of rounds from 1; the first `warm_up` are not counted. Ends early once the
        time is over, but not before one counted round."""
        for number in range(1, warm_up + count + 1):
            done = number - warm_up - 1
            if done > 0 and time.monotonic() > self._ends_s:
                self.leave_out(f"{count - done} of {count} rounds: no time is left")
                return
            yield number

    def leave_out(self, what: str) -> None:
        """Record something that this run does not measure."""
        self._left_out.append(what)

    def part(self, share: float) -> "Limit":
        """Return a limit of this share of the time left."""
        return Limit(max(self._ends_s - time.monotonic(), 0.0) * share, self._left_out)


@contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Raise GivenUp in the main thread after `seconds`, and again if the clean-up hangs as well."""

    def end(number: int, frame: FrameType | None) -> None:
        raise GivenUp(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, CLEAN_UP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of the command line."""

    mb: int
    rounds: int
    readers: Sequence[int]
    peers: Sequence[str]
    """Other systems that the part `readers` measures."""


# --- the publishing side ---


class Readers:
    """Reading processes of bench/weights_readers.py. `go` starts a round for readers that do not
    detect a new version themselves."""

    def __init__(
        self,
        stack: ExitStack,
        kind: str,
        count: int,
        mb: int,
        *,
        under: Sequence[str] = (),
    ) -> None:
        """Start `count` readers. `under`: a command that runs the command of a reader."""
        program = HERE / "weights_readers.py"
        self.processes = [
            subprocess.Popen(
                [*under, sys.executable, str(program), kind, str(mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for _ in range(count)
        ]
        stack.callback(self.end)
        self.took: list[float] = []

    def ready(self) -> "Readers":
        for each in self.processes:
            assert read_report(each) == ["ready"]
        return self

    def go(self, number: int) -> None:
        for each in self.processes:
            assert each.stdin is not None
            each.stdin.write(f"{number}\n")
            each.stdin.flush()

    def last_done_s(self, number: int) -> float:
        """Return the time at which the last reader had installed the model of the round."""
        times = []
        for each in self.processes:
            while True:
                word, n, value = read_report(each)
                if word == "took":
                    self.took.append(float(value))
                elif int(n) >= number:
                    times.append(float(value))
                    break
        return max(times)

    def end(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


def read_report(process: "subprocess.Popen[str]") -> list[str]:
    """Return the words of the next report of a process; log lines are skipped."""
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        if not line:
            raise PeerEnded(f"{process.args} has ended with {process.wait()}")
        if line.startswith("report "):
            return line.split()[1:]


Turn = Callable[[int], tuple[float, float]]
"""Runs the round with this number; returns the seconds of the publishing call, and until the last
reader was done."""


def shoal_turn(
    model: dict[str, torch.Tensor], readers: Readers, *, changes: bool = True, keep: int = 1
) -> Turn:
    import shoal  # noqa: PLC0415

    def turn(number: int) -> tuple[float, float]:
        if changes:
            change(model, number)
        began_s = time.monotonic()
        ticket = shoal.publish(SERIES, model, step=number, keep=keep)
        kept_s = time.monotonic() - began_s
        version = ticket.wait("committed", timeout=WAIT_S)
        assert version is not None
        last_s = readers.last_done_s(version.number) - began_s
        wait_idle(model)
        return kept_s, last_s

    return turn


def wait_idle(model: dict[str, torch.Tensor]) -> None:
    """Wait while this process allocates memory for the next version; in a training job this happens
    while the trainer computes."""
    time.sleep(max(0.5, model["w0"].nbytes * len(model) / 1e9))


def change(model: dict[str, torch.Tensor], number: int) -> None:
    """Change all weights: unchanged ones would not be sent again."""
    for each in model.values():
        each.fill_(number % 200 + 1)


class Peer:
    """A system of bench/weights_peers.py, in a process that answers each round with two numbers."""

    def __init__(
        self, stack: ExitStack, kind: str, mb: int, count: int, *, python: Path = PEERS_PYTHON
    ) -> None:
        self.process = subprocess.Popen(
            [str(python), str(HERE / "weights_peers.py"), kind, str(mb), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Actors of TorchStore are processes that import the readers' modules.
            env={
                **os.environ,
                "PYTHONPATH": str(HERE),
                "OMP_NUM_THREADS": "1",
                "RAY_raylet_start_wait_time_s": "400",
            },
        )
        stack.callback(self.end)
        assert read_report(self.process) == ["ready"]

    def turn(self, number: int) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        one, other = read_report(self.process)
        return float(one), float(other)

    def end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()


def cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants so far."""
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
        save_file(model, FILE.with_suffix(".draft"))
        FILE.with_suffix(".draft").rename(FILE)
        kept_s = time.monotonic() - began_s
        readers.go(number)
        return kept_s, readers.last_done_s(number) - began_s

    return turn


@contextmanager
def cluster() -> Iterator[str]:
    from shoal_client.local.cluster import LocalCluster, LocalClusterConfig  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as place:
        config = LocalClusterConfig(directory=Path(place), num_parameter_servers=2)
        with LocalCluster(config) as running:
            yield running.coordinator


def end_publishing() -> None:
    """End the publication in this process, before the cluster that it uses is stopped."""
    import shoal  # noqa: PLC0415

    shoal.end_publishing(SERIES)


class BareSocket:
    """Transfer on loopback: another process sends bytes, this one receives them into its memory."""

    def __init__(self, stack: ExitStack, mb: int) -> None:
        self._num_bytes = mb << 20
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        program, port = str(HERE / "weights_readers.py"), listener.getsockname()[1]
        sender = subprocess.Popen([sys.executable, program, "sender", str(mb), str(port)])
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
        """Return the rate of a transfer into memory that was used before."""
        return self._receive(self._buffer)

    def first_bytes_per_s(self) -> float:
        """Return the rate of a transfer into memory that was never touched."""
        return self._receive(memoryview(mmap.mmap(-1, self._num_bytes)))


def by_turns(
    entrants: dict[str, Turn], rounds: Iterator[int], spent_s: dict[str, list[float]]
) -> dict[str, list[tuple[float, float]]]:
    """Run rounds of all systems in turns, so that other load affects all alike; add CPU seconds to
    `spent_s`."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entrants}
    for number in rounds:
        for name, turn in entrants.items():
            before_s = cpu_s()
            times = turn(number)
            if number > WARM_UP:
                found[name].append(times)
                spent_s.setdefault(name, []).append(cpu_s() - before_s)
    return found


def ratio(own: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(own, theirs, strict=True))


# --- parts ---


def by_readers(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Yield rows of all systems with each number of readers."""
    kept_s: dict[int, float] = {}
    for number, count in enumerate(wanted.readers):
        turns, spent_s = with_readers(wanted, limit.part(1 / (len(wanted.readers) - number)), count)
        suffix, runs = f"{wanted.mb}mb_{count}_readers", len(turns["shoal"])
        yield from rows_of_turns(turns, spent_s, suffix)
        kept_s[count] = median(each[0] for each in turns["shoal"])
        first = wanted.readers[0]
        if count != first:
            metric = f"weights_publish_{count}_over_{first}_readers_{wanted.mb}mb"
            yield Row(metric=metric, value=kept_s[count] / kept_s[first], unit="", runs=runs)
    for name in PEERS:
        if name not in wanted.peers:
            limit.leave_out(f"{name}: not in --peers")
        elif name in PEERS_APART and not PEERS_PYTHON.exists():
            limit.leave_out(f"{name}: {NO_PEERS}")


def with_readers(
    wanted: Wanted, limit: Limit, count: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[float]]]:
    """Return rounds and CPU seconds of all systems with this many readers."""
    mb, model = wanted.mb, model_of(wanted.mb, 1.5)
    with ExitStack() as stack:
        stack.callback(FLOOR.unlink, missing_ok=True)
        stack.callback(FILE.unlink, missing_ok=True)
        raw = torch.from_file(str(FLOOR), shared=True, size=mb << 20, dtype=torch.uint8)
        copy_into(raw, model)
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(end_publishing)
        entrants: dict[str, Turn] = {}
        entrants["shoal"] = shoal_turn(model, Readers(stack, "shoal", count, mb).ready())
        entrants["shm"] = shm_turn(model, Readers(stack, "shm", count, mb).ready(), raw)
        if "safetensors" in wanted.peers:
            peer = Readers(stack, "safetensors", count, mb).ready()
            entrants["safetensors"] = safetensors_turn(model, peer)
        if "torch_rpc" in wanted.peers:
            # Use a process of its own: torch's RPC cannot be started twice in one process.
            own = Path(sys.executable)
            entrants["torch_rpc"] = Peer(stack, "torch_rpc", mb, count, python=own).turn
        for name in PEERS_APART:
            if name in wanted.peers and PEERS_PYTHON.exists():
                try:
                    peer = Peer(stack, name, mb, count)
                    peer.turn(0)
                    entrants[name] = peer.turn
                except PeerEnded as why:
                    limit.leave_out(f"{name} with {count} readers: {why}")
        spent_s: dict[str, list[float]] = {}
        return by_turns(entrants, limit.rounds(wanted.rounds, WARM_UP), spent_s), spent_s


def rows_of_turns(
    turns: dict[str, list[tuple[float, float]]], spent_s: dict[str, list[float]], suffix: str
) -> Iterator[Row]:
    kept = {name: [each[0] for each in found] for name, found in turns.items()}
    until = {name: [each[1] for each in found] for name, found in turns.items()}
    runs = len(kept["shoal"])
    yield Row(
        metric=f"weights_publish_{suffix}",
        value=median(kept["shoal"]),
        unit="s",
        runs=runs,
        peer="memcpy",
        peer_value=median(kept["shm"]),
    )
    over = ratio(kept["shoal"], kept["shm"])
    yield Row(metric=f"weights_publish_over_memcpy_{suffix}", value=over, unit="", runs=runs)
    for name in turns:
        if name == "shoal":
            continue
        for metric, values in (("until_installed", until), ("cpu_seconds", spent_s)):
            yield Row(
                metric=f"weights_{metric}_{suffix}",
                value=median(values["shoal"]),
                unit="s",
                runs=runs,
                peer=name,
                peer_value=median(values[name]),
            )
        over = ratio(until["shoal"], until[name])
        metric = f"weights_fetch_over_{'shm_floor' if name == 'shm' else name}_{suffix}"
        yield Row(metric=metric, value=over, unit="", runs=runs)


def over_tcp(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    import shoal  # noqa: PLC0415 - imported once the address of a cluster is known

    mb, model = wanted.mb, model_of(wanted.mb, 2.5)
    own: dict[str, list[float]] = {"": [], "_first": []}
    theirs: dict[str, list[float]] = {"": [], "_first": []}
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(end_publishing)
        bare = BareSocket(stack, mb)
        usual = Readers(stack, "shoal-tcp", 1, mb).ready()
        for number in limit.rounds(wanted.rounds, WARM_UP):
            change(model, number)
            shoal.publish(SERIES, model, step=number, keep=1).wait("committed", timeout=WAIT_S)
            wait_idle(model)
            usual.go(number)
            usual.last_done_s(1)
            own[""].append((mb << 20) / usual.took[-1])
            theirs[""].append(bare.bytes_per_s())
            with ExitStack() as one_round:
                first = Readers(one_round, "shoal-tcp", 1, mb).ready()
                first.go(number)
                first.last_done_s(1)
                own["_first"].append((mb << 20) / first.took[0])
                theirs["_first"].append(bare.first_bytes_per_s())
    for which, speeds in own.items():
        pair = speeds[WARM_UP:], theirs[which][WARM_UP:]
        values, runs = [median(each) / 1e9 for each in pair], len(pair[0])
        yield Row(
            metric=f"weights_tcp{which}_{mb}mb",
            value=values[0],
            unit="GB/s",
            runs=runs,
            peer="bare socket",
            peer_value=values[1],
        )
        metric = f"weights_tcp_over_socket{which}_{mb}mb"
        yield Row(metric=metric, value=ratio(*pair), unit="", runs=runs)


def late_joiner(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Measure fetches by readers that start while the trainer runs, and after it was killed."""
    import shoal  # noqa: PLC0415 - imported once the address of a cluster is known

    target, times = model_of(wanted.mb), {True: [], False: []}
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        trainer = Readers(stack, "publisher", 1, wanted.mb).ready()
        for lives in (True, False):
            if not lives:
                trainer.end()
            for _ in limit.part(0.5 if lives else 1.0).rounds(wanted.rounds):
                began_s = time.monotonic()
                with shoal.subscribe(SERIES) as series:
                    series.fetch(series.wait(timeout=WAIT_S), into=target)
                    times[lives].append(time.monotonic() - began_s)
    usual, late = (times[lives][1:] for lives in (True, False))
    yield Row(
        metric=f"weights_late_over_usual_{wanted.mb}mb",
        value=median(late) / median(usual),
        unit="",
        runs=len(late),
    )


def step_delay(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Measure ten steps of a matrix product on one thread, with and without a publication."""
    import shoal  # noqa: PLC0415 - imported once the address of a cluster is known

    torch.set_num_threads(1)
    mb, a = min(wanted.mb, 64), torch.randn(1500, 1500)
    model, ratios = model_of(mb, 1.0), []
    with ExitStack() as stack:
        os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
        stack.callback(end_publishing)
        Readers(stack, "shoal", 1, mb).ready()

        def ten_steps(number: int, *, publishes: bool) -> float:
            change(model, number)
            began_s = time.monotonic()
            if publishes:
                shoal.publish(SERIES, model, step=number, keep=1)
            for _ in range(10):
                for _ in range(3):
                    a @ a
            return time.monotonic() - began_s

        for number in limit.rounds(4 * wanted.rounds, WARM_UP):
            turns = [True, False] if number % 2 else [False, True]
            took = {each: ten_steps(number, publishes=each) for each in turns}
            if number > WARM_UP:
                ratios.append(took[True] / took[False])
    yield Row(metric="weights_step_delay", value=median(ratios), unit="", runs=len(ratios))


def over_link(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Measure a difference and a full version over a link of LINK_BYTES_PER_S to the reader."""
    sys.path.append(str(HERE.parent / "tests"))
    from support.clusters.parameter_cluster import ParameterCluster  # noqa: PLC0415
    from support.network.namespaces import RoutedHosts, why_unavailable  # noqa: PLC0415

    if why := why_unavailable():
        raise LeftOut(why)
    mb = wanted.mb
    model = {
        name: torch.randn(each.shape).mul_(0.028).bfloat16() for name, each in model_of(mb).items()
    }
    took: dict[str, list[float]] = {"full": [], "difference": []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(RoutedHosts())
        running = stack.enter_context(ParameterCluster(place, 2, hosts=hosts))
        os.environ["SHOAL_COORDINATOR"] = running.coordinator.grpc
        stack.callback(end_publishing)
        host = hosts.add("reader")
        # The router's end of the link to the reader's namespace.
        shape = ("rate", f"{int(8 * LINK_BYTES_PER_S)}bit", "burst", "1mb", "latency", "50ms")
        hosts._in_router(
            "tc", "qdisc", "add", "dev", f"to{len(hosts._hosts) - 1}", "root", "tbf", *shape
        )
        under = ("nsenter", f"--net={host.path}")
        reader = Readers(stack, "shoal-differences", 1, mb, under=under).ready()
        # A server computes the difference to the version before, so it has to keep that version.
        turn = shoal_turn(model, reader, changes=False, keep=2)
        for number in limit.rounds(wanted.rounds):
            for kind, times in took.items():
                for each in model.values():
                    bits = each.view(torch.int16)
                    if kind == "full":
                        bits.add_(1)
                    else:
                        bits += (torch.rand(bits.shape) < 0.009).to(torch.int16)  # one number up
                times.append(turn(number)[1])
    full, difference = (median(each[1:]) for each in took.values())
    runs = len(took["full"]) - 1
    yield Row(metric=f"weights_link_full_{mb}mb", value=full, unit="s", runs=runs)
    yield Row(
        metric=f"weights_link_difference_over_full_{mb}mb",
        value=difference / full,
        unit="",
        runs=runs,
    )


def relays(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Measure the distribution of a version to 4, 16 and 64 relaying readers."""
    mb, times, runs = min(wanted.mb, 64), {}, 0
    for number, count in enumerate(RELAYS):
        with ExitStack() as stack:
            os.environ["SHOAL_COORDINATOR"] = stack.enter_context(cluster())
            stack.callback(end_publishing)
            rounds = limit.part(1 / (len(RELAYS) - number)).rounds(wanted.rounds)
            took, copies = relay_rounds(stack, model_of(mb), count, rounds)
        times[count], runs = median(took), len(took)
        metric = f"weights_relays_{count}"
        yield Row(metric=f"{metric}_server_copies", value=median(copies), unit="", runs=runs)
        yield Row(metric=f"{metric}_{mb}mb", value=times[count], unit="s", runs=runs)
    first, *_, last = RELAYS
    over = times[last] / times[first]
    yield Row(metric=f"weights_relays_{last}_over_{first}", value=over, unit="", runs=runs)


def relay_rounds(
    stack: ExitStack, model: dict[str, torch.Tensor], count: int, rounds: Iterator[int]
) -> tuple[list[float], list[float]]:
    """Return, of each round, the seconds from `publish()` until the last of `count` relays has the
    version, and the copies of it that servers sent."""
    import shoal  # noqa: PLC0415 - imported once the address of a cluster is known

    command = [
        *(sys.executable, str(HERE / "weights_relays.py")),
        *(os.environ["SHOAL_COORDINATOR"], SERIES),
    ]
    sizes = [min(RELAYS_A_PROCESS, count - at) for at in range(0, count, RELAYS_A_PROCESS)]
    processes = [
        subprocess.Popen([*command, f"r{i}", str(size)], stdout=subprocess.PIPE, text=True)
        for i, size in enumerate(sizes)
    ]
    for each in processes:
        stack.callback(each.wait)
        stack.callback(each.kill)
    for each in processes:
        assert read_report(each) == ["ready"]
    took, copies = [], []
    num_bytes = sum(each.nbytes for each in model.values())
    for number in rounds:
        change(model, number)
        began_s = time.monotonic()
        version = shoal.publish(SERIES, model, step=number).wait("committed", timeout=WAIT_S)
        assert version is not None
        lines = [
            read_report(process)
            for process, size in zip(processes, sizes, strict=True)
            for _ in range(size)
        ]
        assert all(int(n) == version.number for _, n, _, _ in lines)
        if number > 1:
            took.append(max(float(done_s) for _, _, done_s, _ in lines) - began_s)
            copies.append(sum(int(sent) for *_, sent in lines) / num_bytes)
    return took, copies


def torn_reads(wanted: Wanted, limit: Limit) -> Iterator[Row]:
    """Count torn reads of TorchStore's readers while one writer overwrites the key."""
    if not PEERS_PYTHON.exists():
        raise LeftOut(NO_PEERS)
    with ExitStack() as stack:
        reads, torn = Peer(stack, "torchstore-torn", 64, 2).turn(20)
    yield Row(metric="torchstore_torn_reads", value=torn, unit="reads", runs=int(reads))


Part = Callable[[Wanted, Limit], Iterator[Row]]
PARTS: dict[str, Part] = {
    "readers": by_readers,
    "tcp": over_tcp,
    "late": late_joiner,
    "step": step_delay,
    "differences": lambda wanted, _: weight_differences.measured(wanted.mb, wanted.rounds),
    "link": over_link,
    "relays": relays,
    "failover": lambda wanted, limit: failovers(limit, wanted.rounds),
    "torn": torn_reads,
}


def measured(name: str, wanted: Wanted, minutes: float) -> tuple[list[Row], list[str], bool]:
    """Return the rows of a part, what it left out, and False if it failed."""
    rows: list[Row] = []
    left_out: list[str] = []
    is_well = True
    try:
        with given_up_after(120 * minutes + CLEAN_UP_S):
            for row in PARTS[name](wanted, Limit(60 * minutes, left_out)):
                rows.append(row)
    except (GivenUp, LeftOut) as why:
        left_out.append(str(why))
    except Exception as error:  # noqa: BLE001 - the other parts are measured anyway
        traceback.print_exc()
        left_out.append(f"failed: {error!r}")
        is_well = False
    return rows, [f"{name}: {what}" for what in left_out], is_well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    options = parser.parse_args()
    wanted = Wanted(
        mb=options.mb, rounds=options.rounds, readers=options.readers, peers=options.peers
    )
    # Raised as an exception, so that the processes of the part are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    left_out, is_well = [], True
    for name in options.parts:
        began_s = time.monotonic()
        rows, without, has_ended_well = measured(name, wanted, options.minutes)
        is_well &= has_ended_well
        left_out += without
        publish("weights", rows, adds=True)
        print(f"{name} took {time.monotonic() - began_s:.0f} s", flush=True)
    for what in left_out:
        print(f"left out: {what}")
    if not is_well:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
