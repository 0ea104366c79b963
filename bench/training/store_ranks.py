"""Rank processes of bench/rendezvous.py, which bring groups up over each kind of store."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.network.gloo import GlooBackend, GlooGroup
from shoal.backends.network.retired import free_now
from shoal.backends.process_group.interface import Seat
from shoal.membership.join_config import JoinConfig
from shoal.membership.rendezvous_store import RendezvousStore
from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession

HOST = "127.0.0.1"
COORDINATOR, TCP, TCP_PLAIN = "coordinator", "TCPStore", "TCPStore-plain"
"""Plain: with torch's own init_process_group, whose bring-up cannot be interrupted."""
BRING_UP_S, COLLECTIVE_S = 30.0, 60.0
"""BRING_UP_S is a session's default. COLLECTIVE_S limits one operation of Gloo."""
HOSTS_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class World:
    """Shared state of the ranks of one measurement."""

    job: str
    coordinators: tuple[str, ...]
    size: int
    barrier: Barrier
    port: "Synchronized[int]"
    """Port of rank 0 in this round. In a real job the roster has it, so sharing it is not timed."""


class Rank:
    """A member of a running generation, with a connection to the coordinators for its store."""

    def __init__(
        self, world: World, on_break: Callable[[int, str], None] = lambda generation, reason: None
    ) -> None:
        config = JoinConfig(
            job=world.job,
            coordinators=world.coordinators,
            min_members=world.size,
            max_members=world.size,
        )
        self.world = world
        self.membership = MemberSession(config.member(), on_break=on_break)
        self.membership.join()
        self.membership.propose({"strategy": "none"}, synchronous=True, step=0, has_state=False)
        self.record = self.membership.await_generation(above=0)
        self.token = self.membership.token
        own = self.token.member_id
        self.number = next(
            entry.rank for entry in self.record.roster.entries if entry.member_id == own
        )
        self.coordinators = Coordinators(config.coordinators)
        self._bound: socket.socket | None = None

    def announce(self) -> None:
        """Bind rank 0's socket before the measurement, and share its port."""
        if self.number == 0:
            self._bound = socket.create_server((HOST, 0), backlog=128)
            self.world.port.value = self._bound.getsockname()[1]
        self.world.barrier.wait()

    def store(self, kind: str, attempt: int) -> Any:
        if kind == COORDINATOR:
            return RendezvousStore(self.coordinators, self.token, timeout_s=BRING_UP_S)
        return dist.TCPStore(
            HOST,
            self.world.port.value,
            is_master=self._bound is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=BRING_UP_S),
            master_listen_fd=self._bound.detach() if self._bound is not None else None,
        )

    def group(self, store: Any) -> GlooGroup:
        seat = Seat(
            generation=self.token.generation,
            rank=self.number,
            world_size=self.world.size,
            address=HOST,
            bring_up_s=BRING_UP_S,
            collective_s=COLLECTIVE_S,
        )
        return GlooBackend().group(seat, store)

    def close(self) -> None:
        self.coordinators.close()
        self.membership.leave(completed=True, reason="measured")


def bring_up(pipe: Connection, world: World, kinds: list[str], num_rounds: int) -> None:
    """Bring the group up in every round with each kind of store. Sends (kind, round, start, end) of
    each bring-up with its first all-reduce, and None at the end."""
    rank = Rank(world)
    rank.membership.ready(rank.record)
    for attempt in range(num_rounds):
        for kind in kinds:
            rank.announce()
            started_s = time.monotonic()
            inner = rank.store(kind, attempt)
            # Referenced here: torch does not keep the Python part of a store alive.
            store = dist.PrefixStore(f"{kind}/{attempt}", inner)
            if kind == TCP_PLAIN:
                dist.init_process_group(
                    "gloo", store=store, rank=rank.number, world_size=world.size
                )
                dist.all_reduce(torch.ones(1))
                ended_s = time.monotonic()
                world.barrier.wait()
                dist.destroy_process_group()
            else:
                group = rank.group(store)
                dist.all_reduce(torch.ones(1), group=group.open())
                ended_s = time.monotonic()
                world.barrier.wait()
                group.retire()
                assert free_now(BRING_UP_S)
            pipe.send((kind, attempt, started_s, ended_s))
            world.barrier.wait()
            del store, inner
    pipe.send(None)
    rank.close()


def lose_host(pipe: Connection, world: World, kind: str) -> None:
    """Run a rank of a group that loses rank 0. Rank 0 hosts the store and never opens the group;
    each other rank opens it, and sends the name of the error that this raises, and its time.

    A break that the coordinator reports interrupts a group that uses the coordinator's store, as in
    training.
    """
    groups: list[GlooGroup] = []
    rank = Rank(world, lambda generation, reason: [group.cut(reason) for group in groups])
    rank.announce()
    store = rank.store(kind, 0)
    if rank.number == 0:
        pipe.send(("hosts", rank.token.member_id, os.getpid()))
        time.sleep(HOSTS_S)
    group = rank.group(store)
    if kind == COORDINATOR:
        groups.append(group)
    pipe.send(("opens", rank.token.member_id, os.getpid()))
    try:
        group.open()
    except Exception as error:  # noqa: BLE001 - any error ends the bring-up
        pipe.send(("raised", type(error).__name__, time.monotonic()))
