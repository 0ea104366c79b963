"""Calls between two steps in which fewer members than the job's minimum are left: they finish the
call, and train on with the members that replace the lost ones."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.members.thread_members import WAIT_S, Killed, ThreadJob
from support.training import evaluation_bodies
from support.training.elastic_bodies import NUM_SAMPLES, build
from support.training.elastic_bodies import numbers as data
from support.training.evaluation_bodies import BATCH
from torch import distributed as dist
from torch.nn.functional import cross_entropy

from shoal.data.batches import Batch
from shoal.session.session import Session
from shoal.session.shared_calls import SharedCalls
from shoal_client.local.cluster import LocalCluster

AT_STEP = 2
SIZE = 3


Call = Callable[[Session, Any, Callable[[], None]], float]
"""A call between two steps, of (session, model, lose). It calls `lose` within or right before the
call."""


def evaluate(session: Session, model: Any, lose: Callable[[], None]) -> float:
    def measure(batch: Batch) -> dict[str, Any]:
        lose()
        return evaluation_bodies.measured(model, batch)

    return float(session.evaluate(data(), measure, batch_size=BATCH)["samples"])


def all_reduce(session: Session, model: Any, lose: Callable[[], None]) -> float:
    lose()
    return float(session.all_reduce(NUM_SAMPLES, "max"))


def state_dict(session: Session, model: Any, lose: Callable[[], None]) -> float:
    lose()
    assert session.state_dict()
    # A second call after the same step is made by the same members.
    return float(session.all_reduce(NUM_SAMPLES, "max"))


_before_confirm = threading.local()
"""`lose` of the member on this thread: called once, when all have the result of a call."""


def confirming(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm = SharedCalls.confirm

    def losing(calls: SharedCalls, group: dist.ProcessGroup) -> bool:
        vars(_before_confirm).pop("lose", lambda: None)()
        return confirm(calls, group)

    monkeypatch.setattr(SharedCalls, "confirm", losing)


def evaluate_and_sum(session: Session, model: Any, lose: Callable[[], None]) -> float:
    """A member is lost when all have the result and none knows that the others have it. Then comes
    a second call."""

    def lose_paused() -> None:
        # During the pause no change of members begins that would fail and delay the joiner.
        with session.pause("on its way out", limit_s=WAIT_S):
            lose()

    _before_confirm.lose = lose_paused
    num_samples = float(session.evaluate(data(), lambda b: {"n": len(b.inputs)}, batch_size=5)["n"])
    return num_samples * float(session.all_reduce(1)) / session.world_size


class Crew:
    """Members of one job with a minimum of two, as threads of this process. Members that make the
    call during training go on until three train again."""

    def __init__(self, cluster: LocalCluster, call: Call, threads: ThreadPoolExecutor) -> None:
        self.job = ThreadJob(cluster=cluster, num_members=SIZE)
        self._call = call
        self._threads = threads
        self.lost = threading.Semaphore(0)
        self.gate = threading.Event()
        """Set once the members that are to die may die."""

    def start(self, name: str, *, dies: bool = False, at_end: bool = False) -> Future[Any]:
        return self._threads.submit(self._train, name, dies, at_end)

    def _train(self, name: str, dies: bool, at_end: bool) -> tuple[list[float], list[int], int]:
        def lose() -> None:
            if dies:
                self.lost.release()
                assert self.gate.wait(WAIT_S)
                raise Killed

        model, optimizer = build("sgd", "layers")
        found, sizes = [], []
        with self.job.join(member_id=name, min_members=2) as session:
            model, optimizer = session.distribute(model, optimizer)
            epochs = 1 if at_end else 10_000
            for batch in session.batches(data(), global_batch_size=24, epochs=epochs):
                with session.step() as step:
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                sizes.append(session.world_size)
                if step.committed and batch.step == AT_STEP and not at_end:
                    found.append(self._call(session, model, lose))
                if batch.step > AT_STEP and session.world_size == SIZE and not at_end:
                    session.stop("all who are left train together")
            if at_end:
                found.append(self._call(session, model, lose))
            return found, sizes, session.step_number


@pytest.mark.sampled()
@pytest.mark.parametrize("call", [evaluate, all_reduce, state_dict])
def test_the_last_member_in_a_call_finishes_it_and_trains_on_with_joiners(
    cluster: LocalCluster, call: Call
) -> None:
    """Joiners do not fail meanwhile, and no step is taken with fewer members than the minimum."""
    with ThreadPoolExecutor(5) as threads:
        crew = Crew(cluster, call, threads)
        crew.gate.set()
        survivor = crew.start("a")
        lost = [crew.start(name, dies=True) for name in "bc"]
        for _ in lost:
            assert crew.lost.acquire(timeout=WAIT_S)
        joiners = [crew.start(name) for name in "de"]
        assert all(isinstance(each.exception(WAIT_S), Killed) for each in lost)
        found, sizes, step = survivor.result(WAIT_S)
        assert found == [NUM_SAMPLES]
        assert min(sizes) >= 2
        assert [each.result(WAIT_S)[2] for each in joiners] == [step] * 2


def test_an_evaluation_after_the_last_step_completes_on_the_only_survivor(
    cluster: LocalCluster,
) -> None:
    with ThreadPoolExecutor(3) as threads:
        crew = Crew(cluster, evaluate, threads)
        crew.gate.set()
        survivor = crew.start("a", at_end=True)
        lost = [crew.start(name, dies=True, at_end=True) for name in "bc"]
        assert all(isinstance(each.exception(WAIT_S), Killed) for each in lost)
        assert survivor.result(WAIT_S)[0] == [NUM_SAMPLES]


def test_a_joiner_takes_no_part_in_a_second_call_after_the_same_step(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members are in no call when the generation begins. On the way to the next call they find out
    if all have the last one's result."""
    confirming(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        crew = Crew(cluster, evaluate_and_sum, threads)
        others = [crew.start(name) for name in "ab"]
        lost = crew.start("c", dies=True)
        assert crew.lost.acquire(timeout=WAIT_S)
        joiner = crew.start("d")
        crew.job.await_proposal("d")
        crew.gate.set()
        assert isinstance(lost.exception(WAIT_S), Killed)
        ends = [each.result(WAIT_S) for each in others]
        assert [found for found, _, _ in ends] == [[NUM_SAMPLES]] * 2
        assert joiner.result(WAIT_S)[2] == ends[0][2]
