"""`shoal.join`: creates a script's session."""

import logging
import multiprocessing
import os
from collections.abc import Iterable, Mapping

import structlog

from shoal.membership.join_config import read_config
from shoal.membership.validators import Validator
from shoal.session.session import Session
from shoal.tracking.tracker import Tracker
from shoal_proto.errors import InvalidSpec
from shoal_proto.terminal import printable_event
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsFiles, TlsIdentity
from shoal_proto.tls.identity import from_environment
from shoal_proto.traces import tracing


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
    reconfigure: bool | None = None,
    validators: Iterable[Validator] = (),
    trackers: Iterable[Tracker] = (),
) -> Session:
    """A session of a job, to be used in a `with` statement; entering it joins.

    What is not given comes from the environment that `shoal run` sets: SHOAL_JOB,
    SHOAL_COORDINATOR (comma-separated host:port), SHOAL_MIN_MEMBERS, SHOAL_MAX_MEMBERS,
    SHOAL_DESIRED_MEMBERS, SHOAL_MEMBER_ID, SHOAL_ADDRESS, SHOAL_CHECK_PEERS ("auto": members on
    different hosts find out before each generation whether they reach each other; "always",
    "never"), SHOAL_BACKEND ("gloo", "nccl", "in-memory"; by itself NCCL for a model on CUDA and
    Gloo for all else), SHOAL_RECONFIGURE (1: each generation reconfigures the process group of the
    one before instead of making a new one; torch 2.14 or newer, Gloo; on all members alike),
    SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or SHOAL_TLS (a folder of
    `shoal certs`), which turn TLS on; for a cluster that this user has started on this machine they
    are found. `validators` are the session's own, beside those that
    `shoal.validator` registered. `trackers`: where `session.log` goes beside the status page, such
    as `shoal.TensorBoard("runs")`, `shoal.WandB("project")` and `shoal.MLflow("file:mlruns")`.

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
        "reconfigure": reconfigure,
    }
    _check_not_imported_by_a_child()
    _set_log_level(os.environ)
    tracing.from_environment("worker")
    config = read_config(given, os.environ)
    _use_certificate(from_environment(os.environ, config.coordinators))
    return Session(config, validators, _trackers(trackers))


class _Certificate:
    """The certificate of the last session in this process."""

    own: TlsIdentity | None = None


def _use_certificate(files: TlsFiles | None) -> None:
    """Connect with these files. Without any, drop those of an earlier session, of another cluster;
    a certificate that the process has from elsewhere stays."""
    if files is not None or identity.own() is _Certificate.own:
        identity.use(files)
        _Certificate.own = identity.own()


def _trackers(given: Iterable[Tracker]) -> tuple[Tracker, ...]:
    trackers = tuple(given)
    for each in trackers:
        if not isinstance(each, Tracker):
            raise InvalidSpec(
                "trackers has something else in it",
                seen=repr(each)[:200],
                expected="shoal.TensorBoard(...), shoal.WandB(...) or shoal.MLflow(...)",
            )
    return trackers


def _set_log_level(environment: Mapping[str, str]) -> None:
    """Log from SHOAL_LOG_LEVEL on, by default one line a change, unless the script configures
    structlog itself. Raises InvalidSpec for an unknown level."""
    name = environment.get("SHOAL_LOG_LEVEL") or "INFO"
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise InvalidSpec(
            "SHOAL_LOG_LEVEL is no level", seen=name, expected="debug, info, warning or error"
        )
    if not structlog.is_configured():
        # Log lines contain text from other members, which a terminal would interpret.
        *processors, renderer = structlog.get_config()["processors"]
        structlog.configure(
            processors=[*processors, printable_event, renderer],
            wrapper_class=structlog.make_filtering_bound_logger(level),
        )


def _check_not_imported_by_a_child() -> None:
    """Raise InvalidSpec if a process that the trainer has spawned, say to load batches, runs the
    script again: it would take the trainer's place in the job."""
    # multiprocessing sets this mark while such a process imports the main module.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidSpec(
            "a process that the script has started imports the script, and joins the job in it",
            seen="shoal.join outside of if __name__ == '__main__'",
            expected="if __name__ == '__main__': around all that trains, where processes are"
            " started by spawn or forkserver",
        )
