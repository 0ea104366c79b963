"""`shoal.join`: how a script comes by its session."""

import os
from collections.abc import Iterable

from shoal.membership.join_config import read_config
from shoal.membership.validators import Validator
from shoal.session.session import Session


def join(
    job: str | None = None,
    *,
    coordinator: str | None = None,
    min_members: int | None = None,
    max_members: int | None = None,
    desired_members: int | None = None,
    member_id: str | None = None,
    address: str | None = None,
    check_peers: str | None = None,
    backend: str | None = None,
    validators: Iterable[Validator] = (),
) -> Session:
    """A session of a job, to be used in a `with` statement; entering it joins.

    What is not given comes from the environment that `shoal run` sets: SHOAL_JOB,
    SHOAL_COORDINATOR (comma-separated host:port), SHOAL_MIN_MEMBERS, SHOAL_MAX_MEMBERS,
    SHOAL_DESIRED_MEMBERS, SHOAL_MEMBER_ID, SHOAL_ADDRESS, SHOAL_CHECK_PEERS ("auto": members on
    different hosts find out before each generation whether they reach each other; "always",
    "never"), SHOAL_BACKEND ("gloo", "nccl", "in-memory"; by itself NCCL for a model on CUDA and
    Gloo for all else). `validators` are the session's own, beside those that `shoal.validator`
    registered.

    Raises InvalidSpec at once for what is missing or contradictory; entering raises Unavailable if
    no coordinator answers, JobFinished, or what else the coordinator refuses with.
    """
    given = {
        "job": job,
        "coordinator": coordinator,
        "min_members": min_members,
        "max_members": max_members,
        "desired_members": desired_members,
        "member_id": member_id,
        "address": address,
        "check_peers": check_peers,
        "backend": backend,
    }
    return Session(read_config(given, os.environ), validators)
