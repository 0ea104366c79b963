"""Bodies of members whose group is reconfigured from one generation to the next."""

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Report
from support.training import elastic_bodies, rank_bodies
from support.training.elastic_bodies import Elastic
from support.training.rank_bodies import AbortableFileStore

from shoal.backends.network.gloo import GlooBackend
from shoal.backends.process_group.interface import Seat
from shoal.torch_private.c10d import ReconfigurableGloo


def train(report: Report, run: Elastic) -> None:
    """Train as the members of an elastic run; report each group that was reconfigured."""
    reconfigure = ReconfigurableGloo.reconfigure

    def reconfigure_and_report(
        live: ReconfigurableGloo, number: int, *arguments: Any, **limits: Any
    ) -> None:
        reconfigure(live, number, *arguments, **limits)
        report("reconfigured", generation=number, group=id(live))

    ReconfigurableGloo.reconfigure = reconfigure_and_report  # type: ignore[method-assign]
    elastic_bodies.train(report, replace(run, reconfigure=True))


def many_generations(report: Report, path: str, rank: int, world_size: int, number: int) -> None:
    """Run generations of which every second one ends in the middle of a step."""
    rank_bodies.many_generations(report, path, rank, world_size, number, reconfigures=True)


def one_fails(report: Report, path: str, rank: int, world_size: int, how: str) -> None:
    """Run three generations; in the second one, rank 1 fails once.

    `how`: "handle" before it writes its handle, "before" it connects, "behind": once it has
    connected.
    """
    backend = GlooBackend(reconfigures=True)
    for generation in range(1, 4):
        if generation == 2 and rank == 1:
            _fail_once(how)
        seat = Seat(
            generation=generation,
            rank=rank,
            world_size=world_size,
            address="127.0.0.1",
            bring_up_s=60,
            collective_s=60,
        )
        group = backend.group(seat, AbortableFileStore(f"{path}.{generation}", world_size))
        started_s = time.perf_counter()
        process_group = group.open()
        seconds = time.perf_counter() - started_s
        ones = torch.ones(1)
        dist.all_reduce(ones)
        live: Any = backend._live
        report(
            "stands",
            seconds=seconds,
            reconfigured=bool(live._live),
            total=float(ones),
            size=(process_group.rank(), process_group.size()),
        )
        group.retire()


def _fail_once(how: str) -> None:
    name = "renew" if how == "handle" else "reconfigure"
    as_torch_has_it = getattr(ReconfigurableGloo, name)

    def fails(live: ReconfigurableGloo, *arguments: Any, **limits: Any) -> None:
        setattr(ReconfigurableGloo, name, as_torch_has_it)
        if how == "behind":
            as_torch_has_it(live, *arguments, **limits)
        raise RuntimeError("a fault of the test's")

    setattr(ReconfigurableGloo, name, fails)
