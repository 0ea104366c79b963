"""The leader, or its etcd node, fails while jobs are in each phase of the protocol."""

import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from support.clusters.coordinator_processes import Replica, Replicas
from support.clusters.fault_world import Etcd
from support.members.held_jobs import HELD, Held
from support.processes.served_process import awaited

from .conftest import NUM_REPLICAS, new_cast

DEPOSED_S = 30.0

Fault = Callable[[Replicas, Etcd], AbstractContextManager[None]]


@contextmanager
def _killed(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    old.process.send_signal(signal.SIGKILL)
    replicas.leader(other_than=old)
    yield


@contextmanager
def _ended(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    old.process.send_signal(signal.SIGTERM)
    replicas.leader(other_than=old)
    yield


@contextmanager
def _halted(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    old.process.send_signal(signal.SIGSTOP)
    try:
        new = replicas.leader(other_than=old)
        yield
    finally:
        old.process.send_signal(signal.SIGCONT)
    _is_deposed(old, new)


@contextmanager
def _cut_off_from_etcd(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    old.to_etcd.silence()
    try:
        new = replicas.leader(other_than=old)
        awaited(lambda: not old.leads(), DEPOSED_S, "the leader that is cut off ends its term")
        yield
    finally:
        old.to_etcd.restore()
    _is_deposed(old, new)


def _is_deposed(old: Replica, new: Replica) -> None:
    """Wait until the old leader is back and follows the new one, which still leads."""
    awaited(lambda: old.follows(new.grpc), DEPOSED_S, "it follows")
    assert new.leads()


@contextmanager
def _etcd_leader_killed(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    etcd.leader().process.send_signal(signal.SIGKILL)
    try:
        yield
    finally:
        etcd.restore()


@contextmanager
def _etcd_away(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    etcd.signal_all(signal.SIGSTOP)
    try:
        # The leader's lease may have run out by its own clock: no coordinator leads until etcd is
        # back.
        awaited(lambda: not old.leads(), DEPOSED_S, "without etcd nobody leads")
    finally:
        etcd.restore()
    replicas.leader()
    yield


@contextmanager
def _killed_twice(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    with _killed(replicas, etcd), _killed(replicas, etcd):
        yield


@contextmanager
def _etcd_without_a_majority(replicas: Replicas, etcd: Etcd) -> Iterator[None]:
    old = replicas.leader()
    for each in etcd.members[1:]:
        each.process.send_signal(signal.SIGKILL)
    try:
        awaited(lambda: not old.leads(), DEPOSED_S, "without etcd nobody leads")
    finally:
        etcd.restore()
    replicas.leader()
    yield


FAULTS: Mapping[str, Fault] = {
    "leader killed": _killed,
    "leader ended": _ended,
    "leader halted": _halted,
    "leader cut off from etcd": _cut_off_from_etcd,
    "leader of etcd killed": _etcd_leader_killed,
    "all of etcd away": _etcd_away,
}
NIGHTLY: Mapping[str, Fault] = {
    "two leaders killed": _killed_twice,
    "majority of etcd killed": _etcd_without_a_majority,
}
PARAMS = [
    *FAULTS,
    *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY),
]


@pytest.fixture(scope="module", params=PARAMS)
def struck(
    request: pytest.FixtureRequest, replica_pool: Replicas, etcd: Etcd
) -> Iterator[Mapping[str, Future[None]]]:
    """Outcomes of the jobs that were held in each phase while the fault struck."""
    replicas = replica_pool.full(NUM_REPLICAS)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(HELD)))
        held: dict[str, Held] = {}
        for name, hold in HELD.items():
            held[name] = hold(stack.enter_context(new_cast(replicas)))
        with {**FAULTS, **NIGHTLY}[request.param](replicas, etcd):
            outcomes = {name: threads.submit(job.goes_on) for name, job in held.items()}
            wait(outcomes.values())
        yield outcomes
        for job in held.values():
            job.cast.check_agreement()


@pytest.mark.sampled()
@pytest.mark.parametrize("phase", HELD)
def test_a_job_in_any_phase_continues(struck: Mapping[str, Future[None]], phase: str) -> None:
    """Generations are neither lost nor decided twice, and training members are not disturbed."""
    struck[phase].result()
