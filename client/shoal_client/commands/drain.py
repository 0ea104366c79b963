"""`shoal drain`: lets a member finish its step, hand over and leave, while the others go on."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from shoal_client.commands.address import ASK_WITHIN_S, StatusAddress
from shoal_client.commands.status import Json, StatusClient
from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.job_secret import JobSecretFile, secret_in
from shoal_client.membership import calls as membership_calls
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    NotLeader,
    RetryError,
    UnknownMember,
)
from shoal_proto.names import check_name
from shoal_proto.short_lists import sendable
from shoal_proto.v1.membership_pb2 import DrainRequest

ANSWER_WITHIN_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class DrainConfig:
    """Asks a member to leave gracefully: it finishes its step, the others agree to continue without
    it and take over its state, and its process exits with code 143. `shoal run` does not restart
    it. Returns once the member has left."""

    member: str = field(kw_only=False)
    """Id of the member."""
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """The member's job. Needed only if several jobs have a member of this name."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)
    timeout_s: Annotated[float, Parameter(name="--timeout", metavar="SECONDS")] = 60.0
    """Seconds to wait for the member to leave."""
    reason: str = "an operator asked for it"
    """Reason to show to the other members."""
    job_secret: JobSecretFile = None

    def __post_init__(self) -> None:
        check_name(self.member, "member")
        if self.job:
            check_name(self.job, "job")
        if not self.timeout_s > 0:
            raise InvalidSpec("bad --timeout", seen=f"{self.timeout_s:g}", expected="above 0")


def drain(config: DrainConfig) -> int:
    """Ask the member to leave, and wait until it has left. Raises UnknownMember,
    DeadlineExceeded."""
    member_id = config.member
    urls = config.address.urls()
    started_s = time.monotonic()
    with StatusClient(urls) as status:
        # Drain the present process: a later one of the same name is to stay.
        job, process = _process_of(status, config, started_s + config.timeout_s)
        request = DrainRequest(
            job=job,
            member_id=member_id,
            public_id=process,
            reason=sendable(config.reason),
            job_secret=secret_in(config.job_secret),
        )

        def ask(timeout_s: float) -> None:
            addresses = config.address.coordinators or (status.leader(),)
            with closing(Coordinators(addresses)) as coordinators:
                coordinators.call(
                    membership_calls.METHODS[DrainRequest], request, timeout_s=timeout_s
                )

        detail = _drained(request, ask, status, started_s + config.timeout_s)
    took_s = time.monotonic() - started_s
    print(f"{member_id} left job {job} after {took_s:.1f} s; {_what_runs(detail)}")
    return 0


def _process_of(status: StatusClient, config: DrainConfig, give_up_s: float) -> tuple[str, str]:
    """The member's job, and the public id of its process. Retries for a while if no coordinator
    leads, or the leader does not answer in time."""
    give_up_s = min(give_up_s, time.monotonic() + ASK_WITHIN_S)
    while True:
        try:
            job = config.job or status.job_of(config.member)
            return job, str(status.member(job, config.member)["member"]["public_id"])
        except (NotLeader, DeadlineExceeded):
            if time.monotonic() >= give_up_s:
                raise
        time.sleep(POLL_S)


def _drained(
    request: DrainRequest, ask: Callable[[float], None], status: StatusClient, give_up_s: float
) -> Json:
    """Ask for the drain; return the job once the process has left it. `ask` takes a time limit.
    Raises UnknownMember, or DeadlineExceeded with the member's state."""
    seen, asked, was_away = "no coordinator answers", False, False
    while True:
        try:
            if not asked:
                left_s = max(POLL_S, give_up_s - time.monotonic())
                ask(min(left_s, ANSWER_WITHIN_S))
                asked = True
            detail = status.job(request.job)
        except RetryError as error:
            # The next leader may not know of the request.
            seen, asked, was_away = str(error), False, True
        except UnknownMember:
            if not was_away:
                raise
            asked = True  # an earlier request was carried out: the member has left
            continue
        else:
            members = [entry["member"] for entry in detail["members"]]
            left = [each for each in members if each["public_id"] == request.public_id]
            if not left:
                return detail
            seen = f"the member is {left[0]['state']}, and waits for: {left[0]['waiting_for']}"
        if time.monotonic() >= give_up_s:
            raise DeadlineExceeded(
                f"{request.member_id} has not left job {request.job} yet",
                seen=seen,
                expected="a step that ends, and other members that can go on without it",
                fix=f"See `shoal why {request.member_id} --job {request.job}`, or wait longer"
                " with --timeout.",
            )
        time.sleep(POLL_S)


def _what_runs(detail: Json) -> str:
    summary = detail["summary"]
    if summary["phase"] != "running":
        return f"no generation runs now ({summary['shown_state']}): {summary['reason']}"
    numbers = [entry["member"]["generation"] for entry in detail["members"]]
    members = "member" if summary["num_training"] == 1 else "members"
    return f"generation {max(numbers)} runs with {summary['num_training']} {members}"
