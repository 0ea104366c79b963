"""A plan's traffic of a step is the traffic that members of a real session count."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.models import tensor_models as models
from torch import nn

import shoal
from shoal.backends.process_group.collectives import Count, counts, reset_counts
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.step_vote import NUM_WORDS
from shoal_client.local.cluster import LocalCluster

NUM_MEMBERS, BATCH, COUNTED_STEP = 2, 6, 2
STRATEGIES = {
    "ddp": shoal.DDP,
    "zero1": lambda: shoal.Zero1(copies=0),
    "zero2": lambda: shoal.Zero2(copies=0),
    "fsdp": lambda: shoal.FSDP(copies=0),
    "tensor": lambda: shoal.TensorParallel(min_split_bytes=0, copies=0),
    "pipeline": lambda: shoal.Pipeline(copies=0),
    "hybrid": lambda: shoal.Hybrid(pipeline=2, copies=0),
}


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = models.mlp()
    return model, models.adamw(model.parameters())


def member(coordinator: str, name: str, model: nn.Module, strategy: Strategy) -> dict[str, Count]:
    """Return the traffic of a step of one member, a thread of this process."""
    optimizer = models.adamw(model.parameters())
    found: dict[str, Count] = {}
    with shoal.join(
        name, coordinator=coordinator, backend="in-memory", desired_members=NUM_MEMBERS
    ) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(models.numbers(), global_batch_size=BATCH):
            reset_counts()
            with session.step():
                session.forward_backward(batch, models.squared)
            if batch.step == COUNTED_STEP:
                found = {kind: count for kind, count in counts().items() if count.calls}
    return found


@pytest.mark.sampled()
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_of_a_session_moves_what_the_plan_says(cluster: LocalCluster, name: str) -> None:
    made = [built()[0] for _ in range(NUM_MEMBERS)]
    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        members = [
            threads.submit(member, cluster.coordinator, f"planned-{name}", each, STRATEGIES[name]())
            for each in made
        ]
        counted = [each.result() for each in members]
    model, optimizer = built()
    plan = shoal.plan(
        model,
        STRATEGIES[name](),
        world_size=NUM_MEMBERS,
        optimizer=optimizer,
        inputs=models.numbers()[0][:BATCH],
    )
    planned = [
        {each.kind: Count(*plan.moved(each.kind, rank)) for each in plan.ranks[rank].collectives}
        for rank in range(NUM_MEMBERS)
    ]
    # A plan does not include the vote of a session's members.
    for each in planned:
        calls, num_bytes = each.get("all_reduce", Count(0, 0))
        accord = NUM_MEMBERS * NUM_WORDS * torch.int64.itemsize
        # Members with the same samples also agree, in a message before, on the number of parts.
        messages = 2 if STRATEGIES[name]().shares_samples else 1
        each["all_reduce"] = Count(calls + messages, num_bytes + messages * accord)
    # The coordinator decides the rank of each thread.
    assert sorted(counted, key=str) == sorted(planned, key=str)
