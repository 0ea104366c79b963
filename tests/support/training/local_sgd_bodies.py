"""Bodies of members of a real job under local SGD, and the same training in one process."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from support.oracles.local_sgd_twin import NUM_SAMPLES, Twin, build, strategy_of
from support.processes.ranks import Rank, Report
from support.training import elastic_bodies, equality, rank_bodies
from support.training.rank_bodies import Run, session_of
from torch import nn

from shoal.membership.generation import Generation
from shoal.strategies.local_sgd.strategy import LocalSGD


@dataclass(frozen=True, kw_only=True)
class LocalRun(Run):
    """A member's run."""

    every_steps: int
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    stop_file: str = ""
    """File with the step at which all members stop, once the test has decided on it."""


def train(report: Report, run: LocalRun) -> None:
    """Run the README's training loop, with a fault in it."""
    model, optimizer = build(run.optimizer, seed_of(run.member_id), run.dtype)
    strategy = strategy_of(run.strategy, run.every_steps)
    sources = _report_bring_up(strategy, report)
    held = False
    planted = run.fault if run.fault in elastic_bodies.PLACES else ""
    with session_of(run) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        dataset = equality.samples(NUM_SAMPLES)
        for batch in session.batches(dataset, global_batch_size=run.batch_size, epochs=run.epochs):
            if elastic_bodies.is_over(run.stop_file, batch.step):
                break
            if batch.step == run.hold_at and not held:
                held = True
                report("holds")
                Path(run.gate).read_bytes()
            place = {"generation": session.generation, "rank": session.rank}
            source = sources[session.generation]
            report(
                "tried",
                step=batch.step,
                **place,
                member=run.member_id,
                source=source,
                share=(session.rank, session.world_size),
                indices=batch.indices,
            )
            if planted and batch.step >= run.at_step:
                elastic_bodies.plant(planted, optimizer)
                planted = ""
            with session.step() as step:
                loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
                if batch.step == run.at_step:
                    rank_bodies.prepare_fault(run.fault, model, optimizer)
                session.backward(loss)
            if step.committed:
                report("committed", step=batch.step, **place)
        if run.stop_file:
            # A member that leaves right after the last meeting would break it for others.
            report("stopped")
            Path(f"{run.stop_file}.{run.member_id}").read_bytes()
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
    report("finished", weights=weights, step=session.step_number)


def seed_of(member_id: str) -> int:
    """Return the seed of a member's initial weights, which differs for each member."""
    return int.from_bytes(member_id.encode())


def _report_bring_up(strategy: LocalSGD, report: Report) -> Mapping[int, str]:
    """Report each generation that the strategy enters. Returns the member whose state it starts
    from, by generation."""
    enter, sources = strategy.enter, dict[int, str]()

    def enter_and_report(generation: Generation) -> None:
        at = {"generation": generation.number, "member": generation.me.member_id}
        report("entering", **at, step=strategy.step)
        sources[generation.number] = generation.record.roster.source_member_id
        enter(generation)

    strategy.enter = enter_and_report  # type: ignore[method-assign]
    return sources


def twin_of(ranks: Sequence[Rank], run: LocalRun, num_steps: int) -> Twin:
    """Train the same rounds in one process, each by the members of the generation that ended it."""
    members: dict[int, dict[int, str]] = defaultdict(dict)
    started: dict[int, int] = {}
    sources: dict[int, str] = {}
    steps: dict[tuple[int, str], int] = {}
    for kind, data in (report for rank in ranks for report in rank.seen):
        if kind == "tried":
            number = data["generation"]
            members[number][data["rank"]] = data["member"]
            started[number] = min(started.get(number, data["step"]), data["step"])
            sources[number] = data["source"]
        elif kind == "entering":
            steps[data["generation"], data["member"]] = data["step"]
    numbers = sorted(members)
    twin = Twin(
        run.strategy,
        run.optimizer,
        seed_of(sources[numbers[0]]),
        batch_size=run.batch_size,
        dtype=run.dtype,
    )
    known: set[str] = set()
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        by_rank = [members[number][rank] for rank in sorted(members[number])]
        stood = {name: steps[number, name] for name in by_rank if name in known}
        newest = [name for name in stood if stood[name] == max(stood.values())]
        source = sources[number] if sources[number] in newest else next(iter(newest), None)
        for name in by_rank:
            # Also a survivor that has not completed a meeting which others have completed.
            if name not in newest:
                twin.joins(name, source)
        known |= set(by_rank)
        # Steps after the start of the next generation were trained again there.
        stop = num_steps if following is None else started[following]
        cuts = [s for s in range(started[number] + 1, stop) if s % run.every_steps == 0]
        edges = [started[number], *cuts, stop]
        for start, end in pairwise(edges):
            if start < end:
                twin.train(by_rank, start, end)
    return twin


def num_steps_of(run: LocalRun) -> int:
    """Return the number of steps of the whole job."""
    return -(-NUM_SAMPLES // run.batch_size) * run.epochs
