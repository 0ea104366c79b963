"""Command `shoal run`: runs the workers of one job."""

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import structlog

from shoal.launcher.launcher import Launcher
from shoal.launcher.output import say
from shoal.launcher.over_ssh import HostLaunchers
from shoal.launcher.run_config import RunConfig, threads_per_worker, worker_files
from shoal_client.commands.jobs import check_not_finished, reset_job
from shoal_client.connection.admission import ADMISSION_VARIABLE, admission_s
from shoal_client.connection.coordinators import chance
from shoal_client.host.reports import check_reachable
from shoal_client.host.stop_orders import SIGNALS_SEEN_S, StopOrders
from shoal_client.local.access import LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.directory import temporary_directory
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.options import ClusterOptions
from shoal_proto.back_off import BackOff
from shoal_proto.errors import CertificateRefused, JobFinished, Unavailable
from shoal_proto.secrets import job_secret
from shoal_proto.terminal import printable
from shoal_proto.tls import identity
from shoal_proto.tls.options import LauncherTls

REACH_TIMEOUT_S = 3.0
BAD_ARGUMENTS = 2
LOOPBACK = "127.0.0.1"


def run(config: RunConfig) -> int:
    """Run the workers and return the exit code; 2 if the script is missing or does not compile.

    With a `finished_file`, waits for SIGTERM after exit code 0. Raises ShoalErrors, such as
    Unavailable, JobFinished or InvalidSpec, only before all workers have started, and SystemExit
    for a SIGTERM before or after the launcher's run.
    """
    if not config.module and not Path(config.script[0]).is_file():
        say(
            f"no such script; saw {config.script[0]}; expected a Python file."
            " With -m, give the name of a module."
        )
        return BAD_ARGUMENTS
    if not config.module and (problem := _syntax_error(Path(config.script[0]))):
        print(problem, end="", file=sys.stderr, flush=True)
        return BAD_ARGUMENTS
    _log_from_level(config)
    if (
        "OMP_NUM_THREADS" not in config.environment
        and config.num_workers > 1
        and not config.over_ssh.hosts
    ):
        threads = threads_per_worker(config.num_workers)
        say(f"OMP_NUM_THREADS={threads} for each worker; set it yourself for another number")
    orders = StopOrders()

    def leave(number: int, frame: FrameType | None) -> None:
        # A repeated signal must not interrupt the clean-up.
        if not orders.is_repeated(number):
            raise SystemExit(128 + number)

    with ExitStack() as stack:
        # Handle SIGTERM while the launcher's own handler is not installed.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, leave))
        stack.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, _go_on))
        if (file := config.restart.finished_file) is not None:
            file.unlink(missing_ok=True)
        try:
            code = _run_workers(config, orders)
        except JobFinished as error:
            if file is None and not config.restart.finished_ok:
                raise
            say(str(error))
            code = 0
        if file is not None and code == 0 and not orders.were_given:
            file.touch()
            say(f"wrote {file}; waiting for SIGTERM")
            while True:
                time.sleep(SIGNALS_SEEN_S)
        return code


def _go_on(number: int, frame: FrameType | None) -> None:
    """Answer Ctrl-Z. A suspended launcher would not read the workers' output: a worker that prints
    waits then, and counts as hung. Programs that read the launcher's output, such as `tee`, are in
    its process group and go on too: a shell would not show that they are suspended."""
    with suppress(OSError):
        os.killpg(0, signal.SIGCONT)
        # The code that the signal interrupts may hold the lock of `say`.
        os.write(2, b"shoal run: Ctrl-Z does not suspend a run: training goes on; Ctrl-C ends it\n")


def _run_workers(config: RunConfig, orders: StopOrders) -> int:
    with ExitStack() as stack:
        hosts = None
        if config.over_ssh.hosts:
            hosts = stack.enter_context(HostLaunchers(config, orders, say=say))
            config = hosts.connect()
        if config.coordinators:
            _await_coordinator(config)
            _check_job(config)
            say(f"job {config.job}: workers elsewhere join it with --job {config.job}")
            return hosts.run(config) if hosts else Launcher(config, orders).run()
        address = hosts.address if hosts else LOOPBACK
        cluster = _own_cluster(stack, config, "" if address == LOOPBACK else address)
        tls = LauncherTls(folder=cluster.certificates)
        stack.enter_context(identity.using(tls.files))
        config = replace(
            config,
            coordinators=tuple(each.advertised for each in cluster.coordinators),
            cluster=ClusterOptions(),
            tls=tls,
            alone=True,
        )
        if hosts:
            cluster.call_on_failure(hosts.give_up)
            return hosts.run(config)
        launcher = Launcher(config, orders)
        cluster.call_on_failure(launcher.give_up)
        return launcher.run()


def _syntax_error(script: Path) -> str:
    """Return the error of a script that does not compile, else nothing."""
    if script.suffix != ".py":
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return printable("".join(traceback.format_exception_only(error)), lines=True)
    except OSError:
        pass  # the worker reports it
    return ""


def _log_from_level(config: RunConfig) -> None:
    name = "DEBUG" if config.output.verbose else config.environment.get("SHOAL_LOG_LEVEL", "INFO")
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is not None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def _await_coordinator(config: RunConfig) -> None:
    """Return once a coordinator leads, or knows the leader.

    Raises CertificateRefused, or Unavailable after one attempt, or after SHOAL_ADMISSION_S seconds
    if that is set. Certificates of a local cluster that starts meanwhile are used as soon as it has
    announced them.
    """
    text = config.environment.get(ADMISSION_VARIABLE, "")
    give_up_s, back_off = time.monotonic() + (admission_s(text) if text else 0.0), BackOff()
    is_logged = False
    while True:
        if identity.own() is None:
            identity.use(worker_files(config))
        try:
            check_reachable(config.coordinators, REACH_TIMEOUT_S)
        except (Unavailable, CertificateRefused) as error:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or (isinstance(error, CertificateRefused) and identity.own()):
                raise
            if not is_logged:
                limit = f"up to {left_s:.0f} s ({ADMISSION_VARIABLE})"
                say(f"{error} Waiting for a coordinator for {limit}.")
            is_logged = True
            time.sleep(min(left_s, back_off.pause_s(chance())))
            continue
        if is_logged:
            say("a coordinator has answered")
        return


def _check_job(config: RunConfig) -> None:
    if not config.fresh:
        check_not_finished(config.coordinators, config.job)
    elif reset_job(config.coordinators, config.job, job_secret(config.environment)):
        say(f"job {config.job} starts over: the records of its last run are removed")


def _own_cluster(stack: ExitStack, run: RunConfig, advertise: str) -> LocalCluster:
    options, environment = run.cluster, dict(run.environment)
    if run.output.verbose:
        environment["SHOAL_LOG_LEVEL"] = "DEBUG"
    directory = stack.enter_context(temporary_directory("shoal-run-"))
    say("no --coordinator given: starting a cluster on this machine for this run")
    config = LocalClusterConfig(
        directory=directory,
        advertise=advertise,
        num_parameter_servers=options.num_parameter_servers,
        # No other host starts parameter servers.
        parameters=options.num_parameter_servers > 0,
        limits=options.limits,
        environment=environment,
        restart=RestartPolicy(),
        tls=None if options.insecure else LocalTls(),
    )
    cluster = stack.enter_context(LocalCluster(config, say=say))
    say(f"coordinator at {cluster.coordinator}, status page at {cluster.http_url}")
    if advertise:
        say(f"for other hosts the coordinator is at {cluster.coordinators[0].advertised}")
    return cluster
