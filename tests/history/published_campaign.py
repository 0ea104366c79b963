"""A campaign of faults against a job that publishes weights, judged by its processes' journals.

Etcd, a coordinator, three parameter servers, two members and four readers each run as a process.
Every server, two of the readers, the members' host, etcd and the coordinator have a network
namespace of their own. The other two readers share the memory of a server's host.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from history.published_processes import JOB, SERIES, Setup, read, train
from support.clusters.parameter_cluster import ParameterCluster, Server
from support.network.namespaces import HERE, Cut, Loss, RoutedHosts
from support.processes.forking import forked

from shoal_client.weights.reader import SeriesReader
from shoal_proto.errors import ShoalError
from shoal_server.etcd import keys
from shoal_server.etcd.records.series import parse_head

PATIENCE_S = 120.0
POLL_S = 0.02
RESTART_S = 0.5
"""Shortest time between two starts of the same process."""
SHORTEST_S, LONGEST_S = 0.3, 6.0
TRAINERS = ("trainer-0", "trainer-1")
TRAINING_HOST = "trainers"
READERS: Mapping[str, str] = {
    "reader-0": "reader-0",
    "reader-1": "reader-1",
    "reader-2": "ps-0",
    "reader-3": "ps-1",
}
"""Host of each reader."""
SERVERS = ("ps-0", "ps-1", "ps-2")

Found = TypeVar("Found")


class Stuck(AssertionError):
    """An expected event did not happen within PATIENCE_S."""


class Kind(StrEnum):
    """The kinds of fault, each with the process it strikes."""

    SERVER_KILLED = "server_killed"
    SERVER_PAUSED = "server_paused"
    SERVER_CUT_FROM_ETCD = "server_cut_from_etcd"
    SERVER_CUT_FROM_COORDINATOR = "server_cut_from_coordinator"
    SERVER_CUT_FROM_PEERS = "server_cut_from_peers"
    SERVER_CUT_FROM_ALL = "server_cut_from_all"
    COORDINATOR_KILLED = "coordinator_killed"
    COORDINATOR_PAUSED = "coordinator_paused"
    COORDINATOR_CUT_FROM_ETCD = "coordinator_cut_from_etcd"
    ETCD_KILLED = "etcd_killed"
    ETCD_PAUSED = "etcd_paused"
    TRAINER_KILLED = "trainer_killed"
    TRAINER_KILLED_BEFORE_COMMIT = "trainer_killed_before_commit"
    """Dies when its bytes are on the servers, and its part is not yet submitted."""
    TRAINERS_KILLED = "trainers_killed"
    """Kills all members: the job starts over."""
    TRAINER_PAUSED = "trainer_paused"
    TRAINERS_CUT_FROM_COORDINATOR = "trainers_cut_from_coordinator"
    TRAINERS_CUT_FROM_SERVER = "trainers_cut_from_server"
    READER_KILLED = "reader_killed"
    READER_KILLED_IN_FETCH = "reader_killed_in_fetch"
    READER_PAUSED = "reader_paused"
    READER_CUT_FROM_COORDINATOR = "reader_cut_from_coordinator"
    READER_CUT_FROM_SERVERS = "reader_cut_from_servers"


def _kinds(prefix: str) -> list[Kind]:
    return [kind for kind in Kind if kind.startswith(prefix)]


GROUPS: Sequence[Sequence[Kind]] = (
    [*_kinds("server"), *_kinds("coordinator"), *_kinds("etcd")],
    _kinds("trainer"),
    _kinds("reader"),
)
"""Groups of which at most one fault is active at a time: a version survives the loss of one server,
not of two."""
RARELY = {Kind.TRAINERS_KILLED: 0.2}
"""Kinds that take long to recover from, with the probability that a draw of one is kept."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: Kind
    lasts_s: float
    loss: Loss
    ways: Sequence[str]

    def __str__(self) -> str:
        if "cut" in self.kind:
            how = f" {self.lasts_s:.1f} s, {self.loss.name.lower()} {' and '.join(self.ways)}"
        else:
            how = f" {self.lasts_s:.1f} s" if "paused" in self.kind else ""
        return f"{self.kind}{how}"


def draw(kinds: Sequence[Kind], rng: random.Random) -> Fault:
    """Draw a fault of one of these kinds, its length log-uniform."""
    kind = rng.choice(kinds)
    while rng.random() > RARELY.get(kind, 1.0):
        kind = rng.choice(kinds)
    return Fault(
        kind=kind,
        lasts_s=SHORTEST_S * math.exp(rng.random() * math.log(LONGEST_S / SHORTEST_S)),
        loss=Loss.REFUSED if rng.random() < 0.3 else Loss.DROPPED,
        ways=(rng.choice(("out", "in")),) if rng.random() < 0.3 else ("out", "in"),
    )


@dataclass(kw_only=True)
class Report:
    """Descriptions of everything that contradicts the guarantees."""

    torn: list[str] = field(default_factory=list)
    regressed: list[str] = field(default_factory=list)
    unfenced: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_versions: int = 0
    num_installed: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Number of failed publications, by error."""


class PublishedCampaign:
    """A campaign's processes; all have started when the `with` block begins."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self._stack = ExitStack()
        self._parts: dict[str, BaseProcess] = {}
        self._lives: dict[str, int] = defaultdict(int)
        self._starts_s: dict[str, float] = {}
        self._doomed: dict[str, int] = {}
        """Lives that will end by themselves at the worst moment of their work, by process."""
        self._offsets: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self.num_restarts: dict[str, int] = defaultdict(int)

    def __enter__(self) -> "PublishedCampaign":
        with ExitStack() as stack:
            self.hosts = stack.enter_context(RoutedHosts())
            self.cluster = stack.enter_context(
                ParameterCluster(self.directory, len(SERVERS), hosts=self.hosts)
            )
            self.coordinator = self.cluster.coordinator.grpc
            stack.callback(self._end_parts)
            for name in (*TRAINERS, *READERS):
                self._start(name)
            self.view = SeriesReader([self.coordinator], SERIES, "watcher")
            stack.callback(self.view.close)
            self.await_well()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- processes ---

    def _setup(self, name: str) -> Setup:
        host = self.hosts.add(READERS.get(name, TRAINING_HOST))
        return Setup(
            name=name,
            coordinator=self.coordinator,
            directory=self.directory,
            host=host,
            life=self._lives[name],
        )

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        self._starts_s[name] = time.monotonic()
        target = read if name in READERS else train
        process = forked.Process(target=target, args=(self._setup(name),), name=name, daemon=True)
        process.start()
        self._parts[name] = process

    def _kill(self, name: str) -> None:
        self._parts[name].kill()
        self._parts[name].join()

    def _end_parts(self) -> None:
        for process in self._parts.values():
            process.kill()
        for process in self._parts.values():
            process.join()

    def tend(self) -> None:
        """Restart processes that have ended, as launchers and supervisors do.

        A job whose members were all lost has lost its state: it starts over.
        """
        if not self.cluster.coordinator.runs:
            # A coordinator exits by itself if its lease expires before it becomes leader.
            self.num_restarts["coordinator"] += 1
            self.cluster.kill_coordinator()
        for name, process in list(self._parts.items()):
            if process.exitcode is None or time.monotonic() < self._starts_s[name] + RESTART_S:
                continue
            if name in TRAINERS and "StateLost" in self._last_error(name):
                self._begin_anew()
                return
            self.num_restarts[name] += 1
            self._start(name)

    def _last_error(self, name: str) -> str:
        path = self._setup(name).log
        lines = path.read_text().splitlines() if path.exists() else []
        last = json.loads(lines[-1]) if lines else {}
        is_own = last.get("life") == self._lives[name] and last.get("what") == "ended"
        return str(last["error"]) if is_own else ""

    def _begin_anew(self) -> None:
        """Start the job over, or leave that to the next call: while the coordinator is cut off from
        etcd, the job cannot be removed, and a wait for that would prolong the cut."""
        for name in TRAINERS:
            self._kill(name)
        command = (sys.executable, "-m", "shoal_client", "rm", JOB, "--coordinator")
        done = subprocess.run((*command, self.coordinator), capture_output=True, check=False)
        if done.returncode == 0:
            for name in TRAINERS:
                self._start(name)

    # --- observations ---

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Complete lines of a process's journal, over all its lives."""
        path = self._setup(name).log
        if not path.exists():
            return
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def installed(self, name: str) -> int:
        """The version that the reader installed last, in any of its lives."""
        path, offset = self._setup(name).log, self._offsets.get(name, 0)
        if path.exists():
            with path.open() as file:
                file.seek(offset)
                while (line := file.readline()).endswith("\n"):
                    offset = file.tell()
                    each = json.loads(line)
                    if each["what"] == "installed":
                        self._newest[name] = each["number"]
            self._offsets[name] = offset
        return self._newest.get(name, 0)

    def head(self) -> int:
        """The newest version according to the record in etcd."""
        found = self.cluster.read(keys.series_head(SERIES))
        return parse_head(SERIES, found[0].value).number if found else 0

    def lost(self) -> Sequence[int]:
        """The versions that are lost according to the record in etcd."""
        found = self.cluster.read(keys.series_head(SERIES))
        return parse_head(SERIES, found[0].value).lost if found else ()

    def await_well(self) -> None:
        """Wait until each reader has installed a version that was committed after this call, and
        two running servers hold the newest version."""
        self._awaited(self._has_leader, "a coordinator leads")
        self.cluster.await_ready()
        self._awaited(lambda: len(self.cluster.present) == len(SERVERS), "servers")
        since = self._awaited(lambda: self.head() or None, "a version")
        for name in READERS:
            self._awaited(lambda n=name: self.installed(n) > since, f"{name} is above {since}")
        self._awaited(self._has_copies, "two copies of the newest version")

    def _has_leader(self) -> bool:
        coordinator = self.cluster.coordinator
        return coordinator.runs and coordinator.serves() and coordinator.leads()

    def _has_copies(self) -> bool:
        try:
            view = self.view.view(2.0)
        except ShoalError:
            return False
        present = {server.server_id for server in self.cluster.present}
        if not view.versions or view.head < self.head() - 20:
            return False
        segments = view.versions[-1].segments
        return all(len(present.intersection(each.holders)) >= 2 for each in segments)

    def _awaited(self, look: Callable[[], Found | None], what: str) -> Found:
        give_up_s = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > give_up_s:
                raise Stuck(f"not within {PATIENCE_S:g} s: {what}; {self._told()}")
            self.tend()
            time.sleep(POLL_S)
        return found

    def _told(self) -> str:
        seen = {name: self.installed(name) for name in READERS}
        ends = {name: process.exitcode for name, process in self._parts.items()}
        return f"head {self.head()}, readers {seen}, processes {ends}, logs in {self.directory}"

    # --- faults ---

    def strike(self, faults: Sequence[Fault]) -> float:
        """Apply these faults at once, for the length of the longest; return the seconds of
        recovery after their end."""
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(self._striking(fault))
            lasts = [f.lasts_s for f in faults if "cut" in f.kind or "paused" in f.kind]
            until_s = time.monotonic() + max(lasts, default=0.0)
            self._awaited(lambda: time.monotonic() >= until_s, "the fault's end")
        since_s = time.monotonic()
        while self._doomed:
            # Wait after the other faults: during them there may be nothing to publish or to fetch.
            name, life = self._doomed.popitem()
            self._awaited(lambda n=name, of=life: self._lives[n] > of, f"{name} dies")
        self.await_well()
        return time.monotonic() - since_s

    @contextmanager
    def _striking(self, fault: Fault) -> Iterator[None]:
        if "cut" in fault.kind:
            self.hosts.cut(self._cuts(fault))
            try:
                yield
            finally:
                self.hosts.restore()
        elif "paused" in fault.kind:
            send = self._paused(fault.kind)
            send(signal.SIGSTOP)
            try:
                yield
            finally:
                send(signal.SIGCONT)
        else:
            self._kill_by(fault.kind)
            yield

    def _server(self) -> Server:
        return self.rng.choice(self.cluster.present)

    def _paused(self, kind: Kind) -> Callable[[int], None]:
        if kind is Kind.SERVER_PAUSED:
            return self._server().send_signal
        if kind is Kind.COORDINATOR_PAUSED:
            return self.cluster.coordinator.process.send_signal
        if kind is Kind.ETCD_PAUSED:
            return self.cluster.signal_etcd
        name = self.rng.choice(TRAINERS if kind is Kind.TRAINER_PAUSED else list(READERS))
        process = self._parts[name]

        def send(number: int) -> None:
            # The process may have ended, and another one may have its pid.
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

        return send

    def _kill_by(self, kind: Kind) -> None:
        if kind is Kind.SERVER_KILLED:
            server = self._server()
            server.kill()
            self.cluster.start(server.server_id)
        elif kind is Kind.COORDINATOR_KILLED:
            self.cluster.kill_coordinator()
        elif kind is Kind.ETCD_KILLED:
            self.cluster.kill_etcd()
        elif kind is Kind.TRAINERS_KILLED:
            self._begin_anew()
        elif kind in (Kind.TRAINER_KILLED_BEFORE_COMMIT, Kind.READER_KILLED_IN_FETCH):
            of = list(READERS) if kind is Kind.READER_KILLED_IN_FETCH else list(TRAINERS)
            name = self.rng.choice(of)
            self._setup(name).dies.touch()
            self._doomed[name] = self._lives[name]
        else:
            self._kill(self.rng.choice(TRAINERS if kind is Kind.TRAINER_KILLED else list(READERS)))

    def _cuts(self, fault: Fault) -> list[Cut]:
        one, others = self._sides(fault.kind)
        found = []
        for other in others:
            if other == one:
                continue
            if "out" in fault.ways:
                found.append(Cut(source=one, target=other, loss=fault.loss))
            if "in" in fault.ways:
                found.append(Cut(source=other, target=one, loss=fault.loss))
        return found

    def _sides(self, kind: Kind) -> tuple[str, Sequence[str]]:
        server = self._server().server_id
        reader = self.rng.choice([name for name, host in READERS.items() if name == host])
        everybody = ["etcd", "coordinator", TRAINING_HOST, HERE, *SERVERS, *set(READERS.values())]
        sides: Mapping[Kind, tuple[str, Sequence[str]]] = {
            Kind.SERVER_CUT_FROM_ETCD: (server, ["etcd"]),
            Kind.SERVER_CUT_FROM_COORDINATOR: (server, ["coordinator"]),
            Kind.SERVER_CUT_FROM_PEERS: (server, SERVERS),
            Kind.SERVER_CUT_FROM_ALL: (server, sorted(set(everybody))),
            Kind.COORDINATOR_CUT_FROM_ETCD: ("coordinator", ["etcd"]),
            Kind.TRAINERS_CUT_FROM_COORDINATOR: (TRAINING_HOST, ["coordinator"]),
            Kind.TRAINERS_CUT_FROM_SERVER: (TRAINING_HOST, [server]),
            Kind.READER_CUT_FROM_COORDINATOR: (reader, ["coordinator"]),
            Kind.READER_CUT_FROM_SERVERS: (reader, SERVERS),
        }
        return sides[kind]

    # --- the verdict ---

    def judged(self) -> Report:
        """Check the journals of all members and readers against the guarantees."""
        report, versions, failures = Report(), {}, defaultdict(int)
        for name in (*TRAINERS, *READERS):
            newest: dict[int, int] = defaultdict(int)
            for each in self.lines(name):
                if each["what"] == "failed":
                    failures[each["error"]] += 1
                if each["what"] == "regressed":
                    report.regressed.append(f"{name}: {each['text']}")
                if each["what"] not in ("installed", "committed"):
                    continue
                number, content = each["number"], (each["digest"], each["step"], each["epoch"])
                known = versions.setdefault(number, content)
                if known != content:
                    report.unfenced.append(f"version {number} is {content} and {known}")
                if each["what"] == "committed":
                    continue
                report.num_installed += 1
                if not each["is_whole"]:
                    report.torn.append(f"{name}: version {number}")
                if number <= newest[each["life"]]:
                    report.regressed.append(f"{name}: {number} after {newest[each['life']]}")
                newest[each["life"]] = number
        epoch = 0
        for number, (_, _, own) in sorted(versions.items()):
            if own < epoch:
                report.unfenced.append(f"version {number} of epoch {own} after epoch {epoch}")
            epoch = max(epoch, own)
        head = self.head()
        if max(versions, default=0) > head:
            report.lost.append(f"version {max(versions)} was seen, and the record ends at {head}")
        report.lost += [f"version {number}" for number in self.lost()]
        report.num_versions, report.failures = head, dict(failures)
        return report


__all__ = ["GROUPS", "Fault", "Kind", "PublishedCampaign", "Report", "Stuck", "draw"]
