"""Partitions, pauses and outages: drawn by a seed, each of its own length, and undone at its end.

A partition drops what one server and some peers send each other, in both directions or in one. A
pause stops processes, which later continue as if nothing had happened. An outage takes etcd away.
Most last longer than 2 s: after that time servers continue without each other, and a server's
lease expires.
"""

import math
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from history.campaign import Campaign
from history.events import now_s
from support.clusters.parameter_cluster import Server
from support.network.namespaces import HERE, Cut, Loss, RoutedHosts

SHORTEST_S, LONGEST_S = 0.5, 20.0
LONG_OUTAGE_S = 30.0
LONG_OUTAGE_RATE = 0.1
REFUSED_RATE, ONE_WAY_RATE = 0.3, 0.3


class Kind(StrEnum):
    """The kinds of fault, each with the component it strikes."""

    CUT_FROM_ETCD = "cut_from_etcd"
    CUT_FROM_PEERS = "cut_from_peers"
    CUT_FROM_COORDINATOR = "cut_from_coordinator"
    CUT_FROM_WORKERS = "cut_from_workers"
    CUT_FROM_ALL = "cut_from_all"
    HOLDERS_CUT_FROM_ETCD = "holders_cut_from_etcd"
    """Strikes all servers that hold a copy of one shard, drawn at random."""
    PRIMARY_PAUSED = "primary_paused"
    BACKUP_PAUSED = "backup_paused"
    HOLDERS_PAUSED = "holders_paused"
    ETCD_KILLED = "etcd_killed"
    """Etcd is killed, and started again at once."""
    ETCD_DOWN = "etcd_down"
    ETCD_PAUSED = "etcd_paused"
    KILLED_WITHOUT_ETCD = "killed_without_etcd"
    """A primary dies while etcd is paused, so that no successor can be recorded."""


PARTITIONS = [kind for kind in Kind if "cut" in kind]
PAUSES = [Kind.PRIMARY_PAUSED, Kind.BACKUP_PAUSED, Kind.HOLDERS_PAUSED]
OUTAGES = [Kind.ETCD_KILLED, Kind.ETCD_DOWN, Kind.ETCD_PAUSED, Kind.KILLED_WITHOUT_ETCD]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault as the seed gives it; its victims depend on the shard assignments at that time."""

    kind: Kind
    lasts_s: float
    loss: Loss = Loss.DROPPED
    ways: Sequence[str] = ("out", "in")

    def __str__(self) -> str:
        how = f", {self.loss.name.lower()} {' and '.join(self.ways)}"
        return f"{self.kind} for {self.lasts_s:.1f} s{how if self.kind in PARTITIONS else ''}"


def draw(kind: Kind, rng: random.Random) -> Fault:
    """Draw a fault of this kind, its length log-uniform: half of them last less than 3.2 s."""
    lasts_s = SHORTEST_S * math.exp(rng.random() * math.log(LONGEST_S / SHORTEST_S))
    if kind is Kind.ETCD_DOWN and rng.random() < LONG_OUTAGE_RATE:
        lasts_s = LONG_OUTAGE_S
    loss = Loss.REFUSED if rng.random() < REFUSED_RATE else Loss.DROPPED
    one_way = rng.random() < ONE_WAY_RATE
    ways = (rng.choice(("out", "in")),) if one_way else ("out", "in")
    return Fault(kind=kind, lasts_s=lasts_s, loss=loss, ways=ways)


def plan(kinds: Sequence[Kind], num_faults: int, rng: random.Random) -> list[Fault]:
    """Draw `num_faults` faults, all kinds equally often, in random order."""
    order = rng.sample(kinds, len(kinds))
    faults = [draw(order[number % len(order)], rng) for number in range(num_faults)]
    rng.shuffle(faults)
    return faults


@contextmanager
def striking(run: Campaign, hosts: RoutedHosts, fault: Fault) -> Iterator[None]:
    """Keep the fault in effect while the block runs."""
    if fault.kind in PARTITIONS:
        with _partition(run, hosts, fault):
            yield
    elif fault.kind in PAUSES:
        with _pause(run, fault.kind):
            yield
    else:
        with _outage(run, fault.kind):
            yield


def strike(run: Campaign, hosts: RoutedHosts, fault: Fault) -> None:
    """Apply the fault for its whole length, then wait until servers and workers have recovered.

    Raises Stuck if they do not recover.
    """
    with striking(run, hosts, fault):
        until_s = now_s() + fault.lasts_s
        run.awaited(lambda: now_s() > until_s, f"{fault}")
    run.cluster.await_ready()
    run.await_in_step()
    run.await_all_succeed()


@contextmanager
def _partition(run: Campaign, hosts: RoutedHosts, fault: Fault) -> Iterator[None]:
    cuts = []
    for server in _struck(run, fault.kind):
        for other in _cut_from(run, fault.kind, server):
            if "out" in fault.ways:
                cuts.append(Cut(source=server.server_id, target=other, loss=fault.loss))
            if "in" in fault.ways:
                cuts.append(Cut(source=other, target=server.server_id, loss=fault.loss))
    try:
        hosts.cut(cuts)
        yield
    finally:
        hosts.restore()


def _cut_from(run: Campaign, kind: Kind, server: Server) -> Sequence[str]:
    peers = [other.server_id for other in run.cluster.present if other is not server]
    others: Mapping[Kind, Sequence[str]] = {
        Kind.CUT_FROM_ETCD: ["etcd"],
        Kind.HOLDERS_CUT_FROM_ETCD: ["etcd"],
        Kind.CUT_FROM_PEERS: peers,
        Kind.CUT_FROM_COORDINATOR: ["coordinator"],
        Kind.CUT_FROM_WORKERS: [HERE],
        Kind.CUT_FROM_ALL: ["etcd", "coordinator", HERE, *peers],
    }
    return others[kind]


@contextmanager
def _pause(run: Campaign, kind: Kind) -> Iterator[None]:
    victims = _struck(run, kind)
    for victim in victims:
        victim.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for victim in victims:
            victim.send_signal(signal.SIGCONT)


@contextmanager
def _outage(run: Campaign, kind: Kind) -> Iterator[None]:
    cluster = run.cluster
    if kind is Kind.ETCD_KILLED:
        cluster.kill_etcd()
        yield
        return
    if kind is Kind.ETCD_DOWN:
        cluster.end_etcd()
        try:
            yield
        finally:
            cluster.restart_etcd()
        return
    victim = run.victim()
    cluster.signal_etcd(signal.SIGSTOP)
    try:
        if kind is Kind.KILLED_WITHOUT_ETCD:
            victim.kill()
            cluster.start(victim.server_id)
        yield
    finally:
        cluster.signal_etcd(signal.SIGCONT)


def _struck(run: Campaign, kind: Kind) -> Sequence[Server]:
    """The fault's victims: the primary of a random shard, one of its backups, or all of these."""
    shard = run.rng.choice(run.cluster.assignments(run.work.job).shards)
    everybody = {server.server_id: server for server in run.cluster.present}
    backups = [everybody[each.server_id] for each in shard.backups]
    primary = everybody[shard.primary.server_id]
    if kind in (Kind.HOLDERS_PAUSED, Kind.HOLDERS_CUT_FROM_ETCD):
        return [primary, *backups]
    return [run.rng.choice(backups)] if kind is Kind.BACKUP_PAUSED else [primary]


__all__ = ["OUTAGES", "PARTITIONS", "PAUSES", "Fault", "Kind", "draw", "plan", "strike", "striking"]
