"""Models with tensors of several names, such as an output that shares the embedding's weight.

Under every strategy each stays one tensor: its gradient is the sum over its uses, the optimizer
steps it once, and the model's state has it under each of its names.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.collectives.strategy_runs import (
    Run,
    by_one_process,
    difference,
    generation_of,
    take_step,
    use_group,
)
from support.members.elastic_schedule import (
    Schedule,
    check_no_trace,
    check_same_weights,
    elastic,
    lose_all,
)
from support.models import tensor_models, tied_models
from support.processes.ranks import Ranks
from support.training.elastic_bodies import one_process
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.checkpoint.directory import complete
from shoal.model.tied_tensors import tied
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""
RUN = Run(
    build=tied_models.knotted,
    loader=tied_models.loader,
    loss=tensor_models.next_token,
    num_steps=12,
)
NUM_STEPS_BEFORE = 5
MADE: Mapping[str, Callable[[], Strategy]] = {
    "ddp": shoal.DDP,
    "zero1": partial(shoal.Zero1, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, min_group_bytes=0, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, min_group_bytes=0, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
    "fsdp-tensor": partial(shoal.FSDPTensor, min_split_bytes=0, min_group_bytes=0, copies=0),
    "pipeline": partial(shoal.Pipeline, microbatches=2, copies=0),
    "hybrid": partial(shoal.Hybrid, tensor=2, min_split_bytes=0, copies=0),
}
ROUNDS: Mapping[str, Callable[[], Strategy]] = {
    # A round of one step with its whole change: that of the mean gradient, with plain SGD.
    "local-sgd": partial(shoal.LocalSGD, every_steps=1),
    "diloco": partial(
        shoal.DiLoCo, every_steps=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False
    ),
}
_making = threading.Lock()


def through_two_generations(
    run: Run, made: Callable[[], Strategy]
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Train as a rank in two generations. Returns the model's state after all steps, the further
    names of tensors with their first names, and the names of the tensors that the optimizer
    steps."""
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    use_group(strategy)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with _making:
        model, optimizer = run.build(rank)
    replica, optimizer = strategy.distribute(model, optimizer)
    names = [f"m{each}" for each in range(world_size)]
    loader = run.loader()
    for number, steps in ((1, range(NUM_STEPS_BEFORE)), (2, range(NUM_STEPS_BEFORE, 12))):
        kept = dict.fromkeys(names, pb.STATE_ACTION_KEEP) if number > 1 else {}
        generation = generation_of(names, names[rank], number, kept)
        strategy.enter(generation)
        share = strategy.data_share(generation)
        for step in steps:
            take_step(strategy, loader.synchronous(step, *share), run.loss)
        if number == 1:
            strategy.hand_over()
            strategy.abandon()
    state = dict(strategy.state_dict())
    first = {parameter: name for name, parameter in replica.named_parameters()}
    stepped = [first[p] for group in optimizer.param_groups for p in group["params"]]
    ties = tied(replica)
    strategy.finish()
    strategy.close()
    return state, ties, stepped


@pytest.mark.sampled()
@pytest.mark.parametrize("name", MADE)
def test_ties_hold_over_generations(name: str) -> None:
    expected = by_one_process(RUN)
    world_size = {"hybrid": 2, "hsdp": 4, "fsdp-tensor": 4}.get(name, 3)
    ranks = run_in_memory(through_two_generations, world_size, RUN, MADE[name])
    for state, ties, stepped in ranks:
        assert difference(state, expected) < TOLERANCE
        assert all(state[name] is state[first] for name, first in tied_models.TIES.items())
        assert len(stepped) == len(set(stepped)), "stepped twice"
        if name != "pipeline":  # a stage has only some of the names
            assert ties == tied_models.TIES
    assert all(same(state, ranks[0][0]) for state, _, _ in ranks), "ranks differ"


def with_sgd(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = tied_models.knotted(seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("name", ROUNDS)
def test_ties_hold_under_local_sgd_and_diloco(name: str) -> None:
    run = replace(RUN, build=with_sgd)
    expected = by_one_process(run)
    for state, ties, stepped in run_in_memory(through_two_generations, 3, run, ROUNDS[name]):
        assert difference(state, expected) < TOLERANCE
        assert all(state[name] is state[first] for name, first in tied_models.TIES.items())
        assert ties == tied_models.TIES
        assert len(stepped) == len(set(stepped)), "stepped twice"


@pytest.mark.parametrize("name", ["async-sgd", "async-diloco"])
def test_ties_hold_on_parameter_servers(cluster: LocalCluster, name: str) -> None:
    """A server holds the tensor once and receives the sum of the gradients of its uses."""
    strategy: Strategy = shoal.AsyncSGD()
    if name == "async-diloco":
        strategy = shoal.AsyncDiLoCo(
            every_steps=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False
        )
    (model, optimizer), (twin, twins) = with_sgd(0), with_sgd(0)
    with shoal.join(f"tied-{name}", coordinator=cluster.coordinator) as session:
        replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(tensor_models.tokens(), global_batch_size=8, epochs=2):
            with session.step():
                session.backward(tensor_models.next_token(replica(batch.inputs), batch.targets))
            twins.zero_grad()
            tensor_models.next_token(twin(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            twins.step()
        state = session.state_dict()
    assert session.step_number == 6
    assert difference(state, twin.state_dict()) < TOLERANCE
    assert all(state[name] is state[first] for name, first in tied_models.TIES.items())
    assert tied(replica) == tied_models.TIES


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


CASES: list[Any] = [
    ("fsdp", {"min_group_bytes": 0}, "adamw"),
    ("tensor", {"min_split_bytes": 0}, "sgd"),
    pytest.param("zero2", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("zero3", {}, "sgd", marks=pytest.mark.nightly),
    pytest.param("zero1", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("ddp", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("pipeline", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("hybrid", {"min_split_bytes": 0}, "sgd", marks=pytest.mark.nightly),
]


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "options", "optimizer"), CASES, ids=str)
def test_a_tied_gpt_survives_kills_joins_and_a_drain(
    cluster: LocalCluster,
    tmp_path: Path,
    strategy: str,
    options: Mapping[str, Any],
    optimizer: str,
) -> None:
    run = elastic(
        cluster,
        f"tied-{strategy}",
        desired_members=3,
        strategy=strategy,
        options=options,
        optimizer=optimizer,
        model="gpt",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.kill()
        schedule.join()
        schedule.drain()
        schedule.join()
        schedule.kill()
        finished = check_no_trace(schedule, run, TOLERANCE)
        assert finished["weights"]["lm_head.weight"] == finished["weights"]["wte.weight"]


@pytest.mark.long
def test_a_checkpoint_is_read_by_plain_torch_and_by_another_strategy(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    run = elastic(cluster, "tied", optimizer="adamw", model="gpt", checkpoints=str(directory))
    with Ranks() as ranks:
        lost = Schedule(ranks, replace(run, strategy="fsdp", desired_members=2), tmp_path, seed=1)
        lost.start(2)
        newest = lose_all(lost, directory, 1)
        check_plain(complete(directory)[newest], one_process(run, newest))
        going_on = Schedule(
            ranks,
            replace(
                run,
                job=f"{run.job}-2",
                strategy="tensor",
                options={"min_split_bytes": 0},
                desired_members=2,
            ),
            tmp_path,
            seed=1,
        )
        going_on.start(2)
        assert min(data["step"] for _, data in going_on.committed()) >= newest
        check_same_weights(going_on.finish(), run, TOLERANCE)


def check_plain(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Check that plain torch finds the model in the checkpoint, each tensor under all its names."""
    found = tensor_models.tied_gpt().state_dict()
    dcp.load({"model": found}, checkpoint_id=path, no_dist=True)
    assert difference(found, expected) < TOLERANCE


def test_weights_that_share_memory_without_being_one_are_refused() -> None:
    """Separate layouts would train them apart, which one process does not do."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for strategy in (*MADE, "async-sgd"):
        if strategy == "ddp":  # trains the user's own model
            continue
        with pytest.raises(InvalidSpec, match=r"0\.weight and 1\.weight share memory.*assigning"):
            find_strategy(strategy).distribute(model, optimizer)
