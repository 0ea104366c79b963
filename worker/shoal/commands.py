"""`shoal run`: the workers of one job on this host."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shoal.launcher.launcher import Launcher
from shoal.launcher.run_config import RunConfig, threads_per_worker
from shoal_client.commands.jobs import check_not_finished, reset_job
from shoal_client.host.reports import check_reachable, parse_coordinators
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.limits import add_limits, given_limits
from shoal_proto.errors import InvalidSpec

REACH_TIMEOUT_S = 3.0
BAD_ARGUMENTS = 2

_DESCRIPTION = """\
Starts workers of a job on this host and stays until they have ended. A worker that is killed is
started again. Without --coordinator (or $SHOAL_COORDINATOR) a cluster of its own is started on
this machine for the run.
"""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shoal run`."""
    parser = subparsers.add_parser(
        "run",
        help="start and watch the workers of a job on this host",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("-n", type=int, default=1, help="workers on this host (default 1)")
    option("--job", help="name of the job (default: the script's name)")
    option(
        "--fresh",
        action="store_true",
        help="begin the job anew: take away what the cluster keeps of an earlier run of its name",
    )
    option("--coordinator", metavar="HOST:PORT,...", help="default: $SHOAL_COORDINATOR")
    option("--min", type=int, default=1, help="train with no fewer workers (default 1)")
    option("--max", type=int, default=0, help="at most so many train (default: --desired)")
    option("--desired", type=int, default=0, help="start at once with so many (default: -n)")
    option("--max-restarts", type=int, default=3, help="for each worker (default 3)")
    option(
        "--restart-on",
        choices=("signal", "failure"),
        default="signal",
        help="start a worker again that a signal killed (default), or any that failed",
    )
    option(
        "--grace-s",
        type=float,
        default=45.0,
        metavar="SECONDS",
        help="after SIGTERM or Ctrl-C the workers may finish their step and hand over for so long"
        " (default %(default)g)",
    )
    parser.add_argument(
        "--ps", type=int, default=2, help="parameter servers of a cluster of its own"
    )
    add_limits(parser)
    option("-m", "--module", action="store_true", help="run a module, not a script")
    option("script", help="what each worker runs: a script, or with -m a module")
    option("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    """Run the workers and return the exit code for the shell; 2 for bad arguments."""
    try:
        config = read_config(options, os.environ.get("SHOAL_COORDINATOR", ""))
    except InvalidSpec as error:
        print(f"shoal run: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    if "OMP_NUM_THREADS" not in config.environment and config.num_workers > 1:
        threads = threads_per_worker(config.num_workers)
        _say(f"OMP_NUM_THREADS={threads} for each worker; set it yourself for another number")
    with ExitStack() as stack:
        if config.coordinators:
            check_reachable(config.coordinators, REACH_TIMEOUT_S)
            _check_job(config, fresh=options.fresh)
            return Launcher(config).run()
        # Before the launcher takes the signals over: a SIGTERM must undo what has started.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _leave))
        cluster = _own_cluster(stack, options)
        launcher = Launcher(replace(config, coordinators=(cluster.coordinator,), alone=True))
        cluster.when_given_up(launcher.give_up)
        return launcher.run()


def _check_job(config: RunConfig, *, fresh: bool) -> None:
    """Before anything is started: a finished job is begun anew on request, and refused else."""
    if not fresh:
        check_not_finished(config.coordinators, config.job)
    elif reset_job(config.coordinators, config.job):
        _say(f"job {config.job} begins anew: what was kept of its last run is gone")


def read_config(options: argparse.Namespace, coordinators: str) -> RunConfig:
    """The settings, checked. `coordinators` stands in for an absent --coordinator."""
    addresses = options.coordinator if options.coordinator is not None else coordinators
    given = options.coordinator is not None or bool(coordinators)
    if not given and options.ps < 0:
        raise InvalidSpec("bad --ps", seen=str(options.ps), expected="0 or more")
    if given and (limits := given_limits(options)):
        raise InvalidSpec(
            "time limits are the coordinator's, and this run uses one that stands",
            seen=f"{', '.join(limits)} with the coordinator {addresses}",
            expected="time limits where the run starts a cluster of its own",
            fix="Give them to `shoal up` or `shoal coordinator`.",
        )
    return RunConfig(
        job=options.job or _default_job(options),
        coordinators=parse_coordinators(addresses) if given else (),
        target=_target(options),
        num_workers=options.n,
        min_members=options.min,
        max_members=options.max,
        desired_members=options.desired,
        max_restarts=options.max_restarts,
        restart_on=options.restart_on,
        grace_s=options.grace_s,
        colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )


def _default_job(options: argparse.Namespace) -> str:
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    return name or "job"


def _target(options: argparse.Namespace) -> Sequence[str]:
    if options.module:
        return ("-m", options.script, *options.arguments)
    path = Path(options.script)
    if not path.is_file():
        raise InvalidSpec(
            "no such script",
            seen=str(path),
            expected="a Python file",
            fix="With -m it is taken as the name of a module.",
        )
    return (options.script, *options.arguments)


def _own_cluster(stack: ExitStack, options: argparse.Namespace) -> LocalCluster:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-run-")))
    _say("no --coordinator given: starting a cluster on this machine for this run")
    config = LocalClusterConfig(
        directory=directory,
        num_parameter_servers=options.ps,
        limits=given_limits(options),
        restart=RestartPolicy(),
    )
    cluster = stack.enter_context(LocalCluster(config, say=_say))
    _say(f"coordinator at {cluster.coordinator}, status page at {cluster.http_url}")
    return cluster


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(f"shoal run: {text}", file=sys.stderr, flush=True)
