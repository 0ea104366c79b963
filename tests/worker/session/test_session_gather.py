"""`session.gather` in the steps of real members: exact, repeated after a loss, refused by name."""

import secrets
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from support.collectives.strategy_runs import difference
from support.members import contrastive_members
from support.members.contrastive_members import BATCH, EPOCHS, Contrastive, of_all
from support.members.thread_members import ThreadJob
from support.processes.ranks import Ranks
from torch import Tensor
from torch.nn.functional import cross_entropy

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-12
Passes = Callable[[Session, Any, shoal.Batch], Any]
"""Passes of a member in each step; the result goes to the test."""


def member(join: Callable[[], Any], passes: Passes, **how: Any) -> list[Any]:
    """Train as a member; return the results of all steps, and the weights after the last one."""
    strategy, data = how.pop("strategy", "ddp"), how.pop("data", contrastive_members.samples())
    model, optimizer = contrastive_members.build(dropped=how.pop("dropped", 0.0))
    with join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        found = []
        for batch in session.batches(data, global_batch_size=BATCH, epochs=EPOCHS):
            with session.step():
                found.append(passes(session, model, batch))
        return [*found, {name: each.clone() for name, each in session.state_dict().items()}]


def crew(cluster: LocalCluster, num_members: int, passes: Passes, **how: Any) -> list[Any]:
    """Return the results or errors of all members, threads of this process."""
    job = ThreadJob(cluster=cluster, num_members=num_members)
    return job.outcomes(partial(member, job.join, passes, **how))


def alone(passes: Passes, strategy: Any = "ddp") -> list[Any]:
    return member(shoal.join, passes, strategy=strategy)


def backward(session: Session, model: Any, batch: shoal.Batch) -> None:
    contrastive_members.take(session, model, batch)


# --- training ---


@pytest.mark.parametrize("num_members", [1, 3])
def test_a_session_trains_what_one_process_does(cluster: LocalCluster, num_members: int) -> None:
    expected = contrastive_members.by_one_process()
    for found in crew(cluster, num_members, backward):
        assert difference(found[-1], expected) < TOLERANCE


def test_a_loss_in_forward_backward_may_gather(cluster: LocalCluster) -> None:
    def passes(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.forward_backward(batch, lambda outputs, _: of_all(session.gather(outputs)))

    expected = contrastive_members.by_one_process()
    for found in crew(cluster, 3, passes):
        assert difference(found[-1], expected) < TOLERANCE


def counted(batch: shoal.Batch) -> Tensor:
    """Select the rows that count in the loss: all but the first thirty of a batch."""
    return (batch.first + torch.arange(len(batch.inputs)) >= 30).double()


def test_rows_of_a_member_whose_loss_weighs_nothing_are_trained(cluster: LocalCluster) -> None:
    """The others' losses compare their rows with the first member's. The first member's own loss is
    a mean over nothing: NaN."""

    def passes(session: Session, model: Any, batch: shoal.Batch) -> float:
        outputs = model(batch.inputs)
        every = session.gather(outputs)
        counts = counted(batch) if len(batch.indices) else torch.zeros(1)
        if batch.step % 3 == 2:  # of two samples
            counts = torch.ones(len(outputs))
        places = (batch.first + torch.arange(len(outputs))).clamp(max=len(every) - 1)
        by_row = cross_entropy(outputs @ every.T, places, reduction="none")
        weight = counts.sum()
        session.backward((by_row * counts).sum() / weight, weight=weight)
        return float(weight)

    (expected,) = crew(cluster, 1, passes)
    assert expected[0] == BATCH - 30
    found = crew(cluster, 3, passes)
    assert sorted(each[0] for each in found) == [0.0, 13.0, 21.0]
    for each in found:
        assert difference(each[-1], expected[-1]) < TOLERANCE


def in_parts(session: Session, model: Any, batch: shoal.Batch) -> None:
    """Train in parts as docs/contrastive.md does: first features without gradients, and the loss's
    gradients of these; then each part with its gradients."""
    with torch.no_grad():
        every = session.gather(model(batch.inputs))
    every.requires_grad_()
    (asked,) = torch.autograd.grad(of_all(every), every)
    for part in batch.parts(4):
        size = max(len(part.indices), 1)
        own = asked[part.first :][:size]
        features = model(part.inputs)[: len(own)]
        session.backward((features * own).sum() * len(every) / size)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_batch_in_parts_is_trained_as_the_whole_one(cluster: LocalCluster, strategy: str) -> None:
    """Dropout drops the same values."""
    (expected,) = crew(cluster, 1, backward, dropped=0.3)
    assert difference(expected[-1], contrastive_members.by_one_process()) > 1e-3
    for found in crew(cluster, 3, in_parts, dropped=0.3, strategy=strategy):
        assert difference(found[-1], expected[-1]) < TOLERANCE


def test_features_in_bfloat16_are_gathered_in_bfloat16(cluster: LocalCluster) -> None:
    def passes(session: Session, model: Any, batch: shoal.Batch) -> tuple[torch.dtype, float]:
        every = session.gather(model(batch.inputs).bfloat16())
        loss = of_all(every.float())
        session.backward(loss)
        return every.dtype, float(loss.detach())

    (expected,) = crew(cluster, 1, passes)
    for found in crew(cluster, 3, passes):
        assert found[0][0] == torch.bfloat16
        assert abs(found[0][1] - expected[0][1]) < 1e-6
        assert difference(found[-1], expected[-1]) < 1e-3


FAULTS = ["forward", "backward"]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_step_is_taken_again_when_a_member_is_killed_in_it(
    cluster: LocalCluster, strategy: str, fault: str
) -> None:
    """The kill comes while the others wait for its rows, or for its gradients of their rows. The
    shares are 64 over 3, and then 64 over 2."""
    run = Contrastive(
        coordinator=cluster.coordinator,
        job=f"gather-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        min_members=2,
        desired_members=3,
        at_step=1,
        whole=strategy == "ddp",
    )
    expected = contrastive_members.by_one_process()
    with Ranks() as ranks:
        lost = ranks.start(contrastive_members.train, replace(run, member_id="c", fault=fault))
        others = [ranks.start(contrastive_members.train, replace(run, member_id=n)) for n in "ab"]
        assert lost.join() == -signal.SIGKILL
        for each in others:
            weights = each.expect("finished")["weights"]
            found = {
                name: torch.tensor(value, dtype=torch.float64) for name, value in weights.items()
            }
            assert difference(found, expected) < TOLERANCE
            tried = [(data["step"], data["ok"]) for kind, data in each.seen if kind == "tried"]
            assert (1, False) in tried


# --- refusals ---


def check_refused(ends: list[Any], words: str) -> None:
    for end in ends:
        with pytest.raises(InvalidSpec, match=words):
            raise end


@pytest.mark.long
@pytest.mark.parametrize("where", ["once more", "once less", "not in backward"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unequal_numbers_of_gathers_are_refused_on_all_members(
    cluster: LocalCluster, strategy: str, where: str
) -> None:
    """The error comes in that generation, and not only when a collective has run out of time."""

    def passes(session: Session, model: Any, batch: shoal.Batch) -> None:
        outputs = model(batch.inputs)
        differs = session.rank == 1 and batch.step == 1
        if not (differs and where == "once less"):
            every = session.gather(outputs)
        loss = of_all(outputs if differs and where != "once more" else every)
        session.backward(loss)
        if differs and where == "once more":
            session.gather(outputs.detach())

    ends = crew(cluster, 3, passes, strategy=strategy)
    check_refused(
        ends, r"wait for each other at different points.*session\.gather, call \d of step 1"
    )


@pytest.mark.long
@pytest.mark.parametrize("often", [0, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unequal_numbers_of_gathers_in_the_first_step_are_refused_on_all_processes(
    cluster: LocalCluster, strategy: str, often: int
) -> None:
    """Gloo carries the vote on a step in the same group. A gathering is not mistaken for another
    collective, which would terminate a process."""
    run = Contrastive(
        coordinator=cluster.coordinator,
        job=f"gather-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        min_members=3,
        desired_members=3,
        at_step=0,
    )
    with Ranks() as ranks:
        members = [
            ranks.start(
                contrastive_members.train,
                replace(run, member_id=name, gathers=often if name == "b" else 1),
            )
            for name in "abc"
        ]
        for each in members:
            text = each.expect("refused")["text"]
            assert "session.gather, call" in text
            assert "b: session" in text


def test_a_tensor_that_is_not_the_share_is_refused_on_all_members(cluster: LocalCluster) -> None:
    def passes(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.gather(model(batch.inputs)[session.rank :])

    check_refused(crew(cluster, 3, passes), "more or fewer rows than.*20 rows for 21 samples")


def by_torch(session: Session, outputs: Tensor) -> None:
    torch.distributed.nn.all_gather(outputs)


def by_a_layer(session: Session, outputs: Tensor) -> None:
    found = [torch.zeros_like(outputs) for _ in range(session.world_size)]
    dist.all_gather(found, outputs)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
@pytest.mark.parametrize("gather", [by_torch, by_a_layer])
def test_torchs_own_gathering_of_unequal_shares_is_refused(
    cluster: LocalCluster, gather: Callable[[Session, Tensor], None]
) -> None:
    """The refusal comes before a member sends more than another one has memory for."""

    def passes(session: Session, model: Any, batch: shoal.Batch) -> None:
        gather(session, model(batch.inputs).detach())

    check_refused(
        crew(cluster, 3, passes),
        r"in a step with unequal shares; saw.*\(22, 8\).*\(21, 8\).*session.gather\(tensor\)",
    )


def test_torchs_own_gathering_of_equal_sizes_is_accepted(cluster: LocalCluster) -> None:
    """Scripts that know of unequal shares gather the sizes, and pad."""

    def passes(session: Session, model: Any, batch: shoal.Batch) -> list[float]:
        contrastive_members.take(session, model, batch)
        sizes = [torch.zeros(1) for _ in range(session.world_size)]
        dist.all_gather(sizes, torch.ones(1) * len(batch.indices))
        return sorted(float(each) for each in sizes)

    for found in crew(cluster, 3, passes):
        assert found[0] == [21.0, 21.0, 22.0]


def in_a_part(session: Session, model: Any, batch: shoal.Batch) -> None:
    for part in batch.parts(2):
        contrastive_members.take(session, model, part)


def test_gathering_in_a_loop_over_parts_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"loop over the parts.*saw batch.parts\(2\)"):
        alone(in_a_part)


def test_gathering_outside_a_step_is_refused() -> None:
    """Members have samples of their own in an evaluation, and some have more batches."""
    model, optimizer = contrastive_members.build()
    with shoal.join("") as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(contrastive_members.samples(), global_batch_size=BATCH):
            with session.step():
                backward(session, model, batch)
            with pytest.raises(InvalidSpec, match=r"session\.gather outside a step"):
                session.gather(batch.inputs)

            def measure(each: shoal.Batch) -> dict[str, int]:
                return {"n": len(session.gather(model(each.inputs)))}

            with pytest.raises(InvalidSpec, match=r"session\.gather outside a step"):
                session.evaluate(contrastive_members.samples(), measure, batch_size=8)


@pytest.mark.parametrize(
    ("strategy", "words"), [("pipeline", "micro-batch"), ("local-sgd", "models that differ")]
)
def test_gathering_is_refused_under_strategies_where_it_has_no_meaning(
    strategy: str, words: str
) -> None:
    def passes(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.forward_backward(batch, lambda outputs, _: of_all(session.gather(outputs)))

    with pytest.raises(InvalidSpec, match=f"session.gather under {strategy}.*{words}"):
        alone(passes, strategy)


def test_rows_gathered_without_gradients_have_none() -> None:
    def passes(session: Session, model: Any, batch: shoal.Batch) -> bool:
        with torch.no_grad():
            every = session.gather(model(batch.inputs))
        backward(session, model, batch)
        return every.requires_grad

    assert alone(passes)[0] is False
