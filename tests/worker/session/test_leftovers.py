"""Losses after which a script, or a receiver, reads what an aborted collective left.

Members are threads. Their groups report that they were aborted, as NCCL's do: there collectives
return normally with part of a result, which causes errors of any kind.
"""

import json
import threading
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from support.members.thread_members import WAIT_S, Killed, ThreadJob
from support.processes.served_process import awaited
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

from shoal.backends.in_memory.seat import InMemorySeat
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import GenerationBroken, MalformedMessage

AT_STEP = 2
NUM_STEPS = 6


_reasons: WeakKeyDictionary[InMemorySeat, str] = WeakKeyDictionary()
"""Reasons of the seats whose groups were cut."""
_cut = InMemorySeat.cut


def cut(seat: InMemorySeat, reason: str) -> None:
    _reasons.setdefault(seat, reason)
    _cut(seat, reason)


def check(seat: InMemorySeat) -> None:
    if seat in _reasons:
        raise GenerationBroken("a collective was aborted", seen=_reasons[seat])


def noted_cuts(strategy: Any) -> set[int]:
    """Return a set that gets each generation once its collectives were aborted."""
    cut_generations, cut_strategy = set[int](), strategy.cut

    def noted(generation: int) -> None:
        cut_strategy(generation)
        cut_generations.add(generation)

    strategy.cut = noted
    return cut_generations


def survivor(cluster: LocalCluster, error: Exception) -> int:
    """Return the number of steps of a member that gets the error in a step in which the only other
    member is lost."""
    job, met = ThreadJob(cluster=cluster, num_members=2), threading.Event()

    def train(name: str) -> int:
        model, optimizer = build("sgd", "layers")
        with job.join(member_id=name) as session:
            model, optimizer = session.distribute(model, optimizer)
            cut_generations = noted_cuts(session.strategy)
            for batch in session.batches(data(), global_batch_size=24, epochs=10_000):
                with session.step() as step:
                    loss = cross_entropy(model(batch.inputs), batch.targets)
                    if batch.step == AT_STEP and name == "b":
                        raise Killed
                    if batch.step == AT_STEP and not met.is_set():
                        met.set()
                        is_cut = partial(cut_generations.__contains__, session.generation)
                        awaited(is_cut, WAIT_S, "the loss of the other one")
                        raise error
                    session.backward(loss)
                if step.committed and batch.step == NUM_STEPS - 1:
                    session.stop("that is all")
            return session.step_number

    one, other = job.outcomes(train, ("a",), ("b",))
    assert isinstance(other, Killed)
    if isinstance(one, BaseException):
        raise one
    num_steps: int = one
    return num_steps


ERRORS = [
    ValueError("the loss is not finite"),
    AssertionError(),
    json.JSONDecodeError("half of a description", "", 0),
    UnicodeDecodeError("utf-8", b"", 0, 1, "half of a description"),
    KeyError("no such dtype"),
    MalformedMessage("a description of impossible size"),
]


@pytest.mark.sampled()
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_after_an_aborted_collective_counts_as_the_loss_of_a_peer(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(InMemorySeat, "cut", cut)
    monkeypatch.setattr(InMemorySeat, "check", check)
    assert survivor(cluster, error) == NUM_STEPS


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "error",
    [ValueError("of the script"), MalformedMessage("of a peer")],
    ids=lambda e: type(e).__name__,
)
def test_without_an_aborted_collective_the_script_gets_its_error(
    cluster: LocalCluster, error: Exception
) -> None:
    with pytest.raises(type(error)):
        survivor(cluster, error)
