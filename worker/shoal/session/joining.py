"""`shoal.join`: creates a script's session."""

import multiprocessing
import os
from collections.abc import Iterable

from shoal.membership.join_config import read_config
from shoal.membership.validators import Validator
from shoal.session.session import Session
from shoal.tracking.tracker import Tracker
from shoal_proto.errors import InvalidSpec
from shoal_proto.terminal import configure_script_log
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
    validators: Iterable[Validator] = (),
    trackers: Iterable[Tracker] = (),
) -> Session:
    """Return the session of a job, for a `with` statement; entering the block joins the job.

    An argument that is not given is read from the environment, which `shoal run` sets:

    - SHOAL_JOB, SHOAL_COORDINATOR (comma-separated host:port), SHOAL_MIN_MEMBERS,
      SHOAL_MAX_MEMBERS, SHOAL_DESIRED_MEMBERS, SHOAL_MEMBER_ID, SHOAL_ADDRESS.
    - SHOAL_CHECK_PEERS: "auto" (before a generation, members on different hosts check that they
      reach each other, unless they have trained together), "always" (on one host too) or "never".
    - SHOAL_BACKEND: "gloo", "nccl" or "in-memory"; by default NCCL for a model on CUDA, else Gloo.
    - SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or SHOAL_TLS (a folder made by `shoal certs`):
      turn TLS on. Not needed for a cluster that this user has started on this machine.

    `validators` are for this session only, in addition to those registered by `shoal.validator`.
    `trackers` receive the values of `session.log`, as the status page does:
    `shoal.TensorBoard("runs")`, `shoal.WandB("project")` or `shoal.MLflow("file:mlruns")`.

    Raises InvalidSpec at once if a value is missing or contradicts another. Entering the block
    raises DeadlineExceeded if no coordinator admits this member within SHOAL_ADMISSION_S (10 s; a
    day under `shoal run`), JobFinished if the job is finished, or another refusal of a coordinator.
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
    _check_not_imported_by_a_child()
    configure_script_log(os.environ)
    tracing.from_environment("worker")
    config = read_config(given, os.environ)
    _use_certificate(from_environment(os.environ, config.coordinators))
    return Session(config, validators, _trackers(trackers))


class _Certificate:
    """Certificate that the last session of this process set."""

    own: TlsIdentity | None = None


def _use_certificate(files: TlsFiles | None) -> None:
    """Use these files for connections. None drops only a certificate that an earlier session has
    set."""
    if files is not None or identity.own() is _Certificate.own:
        identity.use(files)
        _Certificate.own = identity.own()


def _trackers(given: Iterable[Tracker]) -> tuple[Tracker, ...]:
    trackers = tuple(given)
    for each in trackers:
        if not isinstance(each, Tracker):
            raise InvalidSpec(
                "trackers contains an object that is not a tracker",
                seen=repr(each)[:200],
                expected="shoal.TensorBoard(...), shoal.WandB(...) or shoal.MLflow(...)",
            )
    return trackers


def _check_not_imported_by_a_child() -> None:
    # multiprocessing sets this mark while a new process imports the main module.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidSpec(
            "a process that the script has started imports the script, which joins the job again",
            seen="shoal.join outside of if __name__ == '__main__'",
            expected="if __name__ == '__main__': around the training code, if processes are"
            " started by spawn or forkserver",
        )
