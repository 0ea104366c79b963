"""`shoal drain`: a member finishes its step, hands over and leaves, and the others go on."""

import argparse
import os
import time

from shoal_client.commands.status import Json, StatusClient, add_http
from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.reports import parse_coordinators
from shoal_client.membership import calls as membership_calls
from shoal_proto.errors import DeadlineExceeded, InvalidSpec, Unavailable
from shoal_proto.v1.membership_pb2 import DrainRequest

DEFAULT_COORDINATOR = "127.0.0.1:7700"
DEFAULT_TIMEOUT_S = 60.0
ANSWER_WITHIN_S = 10.0
POLL_S = 0.1

_DESCRIPTION = """\
Asks a member to leave in good order: it finishes its step, the others agree on going on without
it and take over, and its process ends with exit code 143, which `shoal run` does not start again.
Returns once the member is gone.
"""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shoal drain`."""
    parser = subparsers.add_parser(
        "drain",
        help="let a member finish its step, hand over and leave",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("member", metavar="MEMBER", help="id of the member")
    parser.add_argument("--job", metavar="NAME", required=True, help="the member's job")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT,...",
        default=os.environ.get("SHOAL_COORDINATOR") or DEFAULT_COORDINATOR,
        help=f"default: $SHOAL_COORDINATOR, else {DEFAULT_COORDINATOR}",
    )
    add_http(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="wait so long for the member to be gone (default %(default)g)",
    )
    parser.add_argument(
        "--reason", default="an operator asked for it", help="what the others are told"
    )
    parser.set_defaults(handler=_drain)


def _drain(options: argparse.Namespace) -> int:
    job, member_id = options.job, options.member
    if not options.timeout > 0:
        raise InvalidSpec("bad --timeout", seen=f"{options.timeout:g}", expected="above 0")
    coordinators = Coordinators(parse_coordinators(options.coordinator))
    started_s = time.monotonic()
    try:
        with StatusClient(options.http) as status:
            # Of this process: one that comes after it under the same name is to stay.
            process = status.member(job, member_id)["member"]["public_id"]
            request = DrainRequest(
                job=job, member_id=member_id, public_id=process, reason=options.reason
            )
            detail = _drained(request, coordinators, status, started_s + options.timeout)
    finally:
        coordinators.close()
    took_s = time.monotonic() - started_s
    print(f"{member_id} left job {job} after {took_s:.1f} s; {_what_runs(detail)}")
    return 0


def _drained(
    request: DrainRequest, coordinators: Coordinators, status: StatusClient, give_up_s: float
) -> Json:
    """The job once the process has left it. Raises DeadlineExceeded with what it waits for."""
    seen, asked = "no coordinator answers", False
    while True:
        try:
            if not asked:
                left_s = max(POLL_S, give_up_s - time.monotonic())
                coordinators.call(
                    membership_calls.drain, request, timeout_s=min(left_s, ANSWER_WITHIN_S)
                )
                asked = True
            detail = status.job(request.job)
        except Unavailable as error:
            # Whoever leads next has not heard of it.
            seen, asked = str(error), False
        else:
            members = [entry["member"] for entry in detail["members"]]
            left = [each for each in members if each["public_id"] == request.public_id]
            if not left:
                return detail
            seen = f"it is {left[0]['state']}, and waits for: {left[0]['waiting_for']}"
        if time.monotonic() >= give_up_s:
            raise DeadlineExceeded(
                f"{request.member_id} has not left job {request.job} yet",
                seen=seen,
                expected="a step that ends, and others that can go on without it",
                fix=f"See `shoal why {request.member_id} --job {request.job}`, or wait longer"
                " with --timeout.",
            )
        time.sleep(POLL_S)


def _what_runs(detail: Json) -> str:
    summary = detail["summary"]
    if summary["phase"] != "running":
        return f"no generation runs now ({summary['phase']}): {summary['reason']}"
    numbers = [entry["member"]["generation"] for entry in detail["members"]]
    members = "member" if summary["num_training"] == 1 else "members"
    return f"generation {max(numbers)} runs with {summary['num_training']} {members}"
