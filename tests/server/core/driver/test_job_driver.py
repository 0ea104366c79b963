"""Streams and heartbeats of members at the driver of a job, whose writes are durable at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_server.coordinator.persistence.codec import digest_of
from shoal_server.core.driver.actions import Action, PersistWrite
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import HeartbeatReceived, MemberJoined
from shoal_server.core.membership.phases import Phase

LIMITS = Limits()
SPEC = JobSpec(job="j")


@dataclass(frozen=True)
class Stream:
    member_id: str
    incarnation: str


class Edge:
    """Carries out the driver's actions, and keeps the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        job = Job(spec=SPEC, limits=LIMITS, digest_of=digest_of)
        self.driver: JobDriver[Stream, str] = JobDriver(job, self.now_s)

    def join(self, member_id: str, incarnation: str) -> Stream:
        stream = Stream(member_id, incarnation)
        self._do(self.driver.open_stream(stream, self.now_s))
        joined = MemberJoined(
            member_id=member_id, incarnation=incarnation, spec=SPEC, info=MemberInfo(host="h")
        )
        self._do(self.driver.submit(joined, "join", self.now_s))
        return stream

    def beat(self, member_id: str, incarnation: str, step: int) -> None:
        event = HeartbeatReceived(member_id=member_id, incarnation=incarnation)
        self.driver.heartbeat(event, step, self.now_s)

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s += LIMITS.heartbeat_s / 2
            self._do(self.driver.wake(self.now_s))

    def present(self) -> dict[str, str]:
        """Incarnation of each member."""
        return {name: each.incarnation for name, each in self.driver.job.members.items()}

    def _do(self, actions: Sequence[Action[Stream, str]]) -> None:
        for action in actions:
            if isinstance(action, PersistWrite):
                self._do(self.driver.written(self.now_s))


def test_a_member_without_any_heartbeat_is_lost_after_the_lease() -> None:
    """Also if it has replaced another process of its name."""
    for incarnations in (["i1"], ["i1", "i2"]):
        edge = Edge()
        for incarnation in incarnations:
            edge.join("a", incarnation)
        edge.run(LIMITS.lease_s)
        assert edge.present() == {"a": incarnations[-1]}
        edge.run(LIMITS.lease_s + 2 * LIMITS.heartbeat_s)
        assert edge.present() == {}


def test_a_replacement_does_not_have_the_heartbeats_of_the_replaced_process() -> None:
    edge = Edge()
    edge.join("a", "i1")
    edge.beat("a", "i1", step=50)
    edge.join("a", "i2")
    edge.beat("a", "i2", step=3)
    assert edge.driver.liveness.heartbeats["a"].step == 3


def test_a_process_that_is_refused_leaves_nothing_behind() -> None:
    """A job that is over is kept for weeks, and callers may give any name."""
    edge = Edge()
    edge.join("a", "i1")
    edge.driver.job.phase = Phase.FINISHED
    stream = edge.join("late", "i2")
    edge.driver.end_stream(stream, edge.now_s)
    assert list(edge.present()) == ["a"]
    assert list(edge.driver.liveness.heartbeats) == ["a"]
