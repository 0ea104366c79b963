"""Leases of several members, with the real Samples service."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers
from support.processes.served_process import awaited

from shoal.strategies.asynchronous.sample_leases import Leases
from shoal_client.connection.coordinators import Coordinators
from shoal_client.progress.clocks import Clock
from shoal_client.progress.ranges import SampleRange
from shoal_client.progress.samples import SampleClient
from shoal_proto.errors import JobQuarantined

STEP = 32
NUM_STEPS = 10


def leases_of(
    opened: ExitStack, servers: ParameterServers, name: str, *, num_steps: int = NUM_STEPS
) -> Leases:
    """Return the leases of a member whose rounds have far more steps than an epoch."""
    token = servers.admit(name)
    samples = SampleClient(
        opened.enter_context(closing(Coordinators([servers.coordinator]))),
        lambda: token,
        dataset_size=STEP * num_steps,
        num_epochs=1,
    )
    return opened.enter_context(closing(Leases(samples, STEP, round_batches=100)))


def taken(walk: Iterator[SampleRange | None]) -> list[SampleRange]:
    """Return the ranges on which a member trains until it gets none."""
    spans: list[SampleRange] = []
    while (span := next(walk)) is None:
        continue
    while span is not None:
        spans.append(span)
        span = next(walk)
    return spans


def test_an_epoch_shorter_than_a_round_is_shared_out(opened: ExitStack) -> None:
    """Members get no more than their own shares while others have not acknowledged theirs. `shoal
    why` names the members that have the samples for which a member waits."""
    servers = opened.enter_context(ParameterServers(0))
    servers.num_members = 3
    crew = [leases_of(opened, servers, name) for name in "abc"]
    walks = [iter(leases) for leases in crew]
    first = [taken(walk) for walk in walks]
    assert [len(spans) for spans in first] == [3, 3, 3]
    for span in first[1]:
        crew[1].done(span)
    (last,) = taken(walks[1])
    crew[1].done(last)
    while "b" not in servers.samples.waiting("job"):
        assert next(walks[1]) is None
    reason, _ = servers.samples.waiting("job")["b"]
    assert reason == "samples: all available ones are leased (96 by a, 96 by c)"
    for leases, spans in ((crew[0], first[0]), (crew[2], first[2])):
        for span in spans:
            leases.done(span)
    assert [list(filter(None, walk)) for walk in walks] == [[], [], []]


def test_a_later_member_gets_samples_that_another_has_not_begun(opened: ExitStack) -> None:
    """The first member was alone, and held all samples."""
    servers = opened.enter_context(ParameterServers(0))
    early, late = (leases_of(opened, servers, name) for name in ("early", "late"))
    walk = iter(early)
    while (first := next(walk)) is None:
        continue
    counts = servers.samples.summary("job")
    assert counts is not None
    assert counts.in_flight == STEP * NUM_STEPS
    early.done(first)
    theirs = taken(iter(late))
    assert len(theirs) in (4, 5)
    counts = servers.samples.summary("job")
    assert counts is not None
    assert counts.repeated_max == 0


QUARANTINED = JobQuarantined("job job is quarantined")
WITHIN_S = 20.0


def test_a_quarantined_job_trains_on_and_reports_afterwards(opened: ExitStack) -> None:
    """The member trains on its leased samples, and reports them as soon as the job goes on."""
    servers = opened.enter_context(ParameterServers(0))
    leases = leases_of(opened, servers, "a")
    walk = iter(leases)
    spans = taken(walk)
    leases.done(spans[0])
    servers.refusal = QUARANTINED
    for span in spans[1:]:
        leases.done(span)
    awaited(lambda: servers.num_refused > 2, WITHIN_S, "its reports are refused")
    servers.refusal = None

    def is_booked() -> bool:
        counts = servers.samples.summary("job")
        return counts is not None and counts.completed == STEP * len(spans)

    awaited(is_booked, WITHIN_S, "all of it is booked")
    assert list(filter(None, walk)) == []


def test_a_member_of_a_quarantined_job_leaves_without_an_error(opened: ExitStack) -> None:
    servers = opened.enter_context(ParameterServers(0))
    leases = leases_of(opened, servers, "a")
    first, second, *_ = taken(iter(leases))
    servers.refusal = QUARANTINED
    leases.done(first)
    awaited(lambda: servers.num_refused > 0, WITHIN_S, "its report is refused")
    leases.done(second)
    leases.close()


def test_a_report_without_an_answer_is_repeated_and_its_loss_is_logged(opened: ExitStack) -> None:
    """The member holds no other samples when it leaves."""
    servers = opened.enter_context(ParameterServers(0))
    leases = leases_of(opened, servers, "a", num_steps=1)
    (span,) = taken(iter(leases))
    servers.refusal = QUARANTINED
    leases.done(span)
    # Any request but the one in progress contains the report.
    num_refused = servers.num_refused
    awaited(lambda: servers.num_refused > num_refused + 1, WITHIN_S, "its report is refused")
    with capture_logs() as logs:
        leases.close()
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert warnings == ["samples_not_reported"]


def test_a_member_waits_at_its_bound_while_the_job_is_quarantined(opened: ExitStack) -> None:
    servers = opened.enter_context(ParameterServers(0))
    token = servers.admit("a")
    coordinators = opened.enter_context(closing(Coordinators([servers.coordinator])))
    clock = Clock(coordinators, lambda: token, bound=1)
    servers.refusal = QUARANTINED
    entering = threading.Thread(target=clock.begin)
    entering.start()
    awaited(lambda: servers.num_refused > 2, WITHIN_S, "it asks again")
    servers.refusal = None
    entering.join(WITHIN_S)
    assert not entering.is_alive()
    servers.refusal = QUARANTINED
    clock.finished()
    assert clock.begin() is False
    clock.rest()
