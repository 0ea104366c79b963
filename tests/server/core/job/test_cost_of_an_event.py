"""Cost of a member's event: it does not grow with the number of members."""

from collections.abc import Iterator
from cProfile import Profile
from typing import Any

from shoal_proto.incarnation import new_incarnation
from shoal_server.coordinator.persistence import codec
from shoal_server.core.generations.roster import Generation, JobSpec, MemberInfo, Proposal, Step
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase


def lifetime(job: Job, names: dict[str, str]) -> Iterator[events.MemberEvent]:
    """Yield the events of all members from their joins to the generation after a loss."""
    info = MemberInfo(host="h", address="127.0.0.1")
    for name, incarnation in names.items():
        yield events.MemberJoined(member_id=name, incarnation=incarnation, spec=job.spec, info=info)
    proposal = Proposal(fields={"strategy": "ddp"})
    for name, incarnation in names.items():
        yield events.TrainingProposed(member_id=name, incarnation=incarnation, proposal=proposal)
    yield from agreeing(job, names)
    lost, incarnation = names.popitem()
    yield events.MemberLost(member_id=lost, incarnation=incarnation, reason="its host is gone")
    for name, incarnation in names.items():
        yield events.StepReported(
            member_id=name,
            incarnation=incarnation,
            step=Step(5),
            has_state=True,
            left=Generation(1),
        )
    yield from agreeing(job, names)


def agreeing(job: Job, names: dict[str, str]) -> Iterator[events.MemberEvent]:
    assert job.agreement is not None
    number, digest = job.agreement.generation, job.agreement.digest
    for name, incarnation in names.items():
        yield events.RosterAnswered(
            member_id=name, incarnation=incarnation, generation=number, digest=digest
        )
    for name, incarnation in names.items():
        yield events.ReadinessReported(member_id=name, incarnation=incarnation, generation=number)


def test_no_member_is_late_while_answers_to_a_roster_arrive() -> None:
    """The answers of a large job may take longer than `prepare_s` together: the limit is counted
    anew at each."""
    spec = JobSpec(job="j", min_members=1, max_members=6, desired_members=6)
    limits = Limits()
    job = Job(spec=spec, limits=limits, digest_of=codec.digest_of)
    names = {name: new_incarnation() for name in "abcdef"}
    now_s = 0.0
    for event in lifetime(job, names):
        if isinstance(event, events.ReadinessReported):
            break
        if isinstance(event, events.RosterAnswered):
            now_s += 0.8 * limits.prepare_s
            job.tick(now_s)
        job.handle(event, now_s)
    assert job.phase is Phase.COMMITTED
    assert now_s > 4 * limits.prepare_s


def num_calls(num_members: int) -> float:
    """Return the number of function calls for each member."""
    spec = JobSpec(job="j", min_members=1, max_members=num_members, desired_members=num_members)
    job = Job(spec=spec, limits=Limits(), digest_of=codec.digest_of)
    names = {f"member-{number:05d}": new_incarnation() for number in range(num_members)}
    profile = Profile()
    for number, event in enumerate(lifetime(job, names)):
        profile.enable()
        job.handle(event, number * 1e-6)
        job.next_deadline_s()
        profile.disable()
    assert job.phase is Phase.RUNNING
    stats: Any = profile.getstats()
    return float(sum(entry.callcount for entry in stats)) / num_members


def test_an_event_costs_the_same_among_400_members_as_among_100() -> None:
    """The cost is the number of function calls."""
    assert num_calls(400) < 1.1 * num_calls(100)
