"""Options of `shoal run`, and its workers' environment."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.launcher.hosts import HostOptions, WorkerCount, check_reached, num_workers_of
from shoal.launcher.metrics import parse_address
from shoal_client.connection.addresses import CoordinatorAddresses
from shoal_client.local.options import ClusterOptions
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import MAX_NAME_LENGTH, NAME_RULE, is_name
from shoal_proto.secrets import job_secret
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.identity import files_at, without_tls
from shoal_proto.tls.names import CertificateRole
from shoal_proto.tls.options import LauncherTls, LauncherTlsOption

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(1024 * 1024 * 1024),
}
"""Settings of glibc's malloc, in bytes: blocks up to 32 MiB (the maximum) come from its heap, which
keeps up to 1 GiB. By default malloc returns memory to the kernel after a step, which must clear
each page again."""


_INTERNAL = Parameter(parse=False)


def _workers_of(kind: Any, tokens: Sequence[Any]) -> WorkerCount:
    return num_workers_of(str(tokens[-1].value))  # RunConfig refuses 0


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """Time for workers to end, and rules for starting an ended worker again."""

    max_restarts: Annotated[int, Parameter(metavar="N")] = 3
    """Number of restarts allowed for each worker."""
    restart_on: Literal["signal", "failure"] = "signal"
    """signal: restart only workers that a signal killed (preemption, out of memory), or that failed
    by no fault of the script (declared lost, a time limit); failure: also those that exited with a
    code other than 0. A worker that the job refused is not restarted: it would be refused again."""
    grace_s: Annotated[float, Parameter(metavar="SECONDS")] = 45.0
    """Seconds that workers have to finish their step and hand over after SIGTERM or Ctrl-C, before
    they are killed. The other members need up to a quarter of the coordinator's --join-s to agree
    to continue without them."""
    finished_file: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Once the workers have ended without error, or if the job was finished before, create this
    file and wait for SIGTERM. For a Deployment of Kubernetes, which would start ended workers again
    and again; its readiness probe can look for the file."""
    finished_ok: bool = False
    """End with exit code 0 if the job was finished before, which is an error otherwise. For a Job
    of Kubernetes, or another scheduler, that may replace a lost worker as late as that."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InvalidSpec("bad --max-restarts", seen=str(self.max_restarts), expected=">= 0")
        if not self.grace_s > 0:
            raise InvalidSpec("bad --grace-s", seen=f"{self.grace_s:g}", expected="above 0")
        if self.finished_file is not None and not _may_write(self.finished_file):
            raise InvalidSpec(
                "bad --finished-file",
                seen=str(self.finished_file),
                expected="a file in a directory that exists, and in which this user can write",
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files with the workers' output, its level of detail, and metrics of the launcher."""

    metrics: Annotated[str, Parameter(metavar="[HOST:]PORT")] = ""
    """Address at which the launcher serves its metrics for Prometheus, without TLS and without a
    token; a port alone is at 127.0.0.1. By default it serves none."""
    log_directory: Annotated[
        Path | None, Parameter(name="--log-dir", metavar="DIRECTORY", env_var="SHOAL_LOG_DIR")
    ] = None
    """Directory of files with the newest 8 to 16 MiB of each worker's output, for `shoal logs` on
    this host. By default a directory of this user under the system's temporary directory."""
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], negative=())] = False
    """Set SHOAL_LOG_LEVEL=debug for the workers, and for the cluster if the run starts one."""

    def __post_init__(self) -> None:
        if self.metrics:
            parse_address(self.metrics)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Starts workers of a job on this host and waits until they have ended. A worker that is killed
    is restarted. Without --coordinator (or $SHOAL_COORDINATOR) it starts a cluster on this machine
    for the run. With --hosts the workers are started on those hosts, over ssh."""

    script: Annotated[Sequence[str], Parameter(metavar="SCRIPT")] = field(kw_only=False)
    """Script that each worker runs, with its arguments; a module with -m."""
    module: Annotated[bool, Parameter(name=["-m", "--module"])] = False
    """Run a module."""
    num_workers: Annotated[
        int,
        Parameter(name=["-n", "--nproc-per-node"], metavar="N", converter=_workers_of, n_tokens=1),
    ] = 1
    """Worker processes on this host, or on each of --hosts. auto: one for each GPU of the host;
    without a GPU, one for each core that this process may use."""
    over_ssh: Annotated[HostOptions, Parameter(name="*")] = field(default_factory=HostOptions)
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """Name of the job, by default the script's name. With --coordinator a random ending is added to
    that name, so that two runs do not meet by accident, and the name is printed."""
    fresh: bool = False
    """Start over: remove what the cluster keeps of an earlier run with this name."""
    coordinators: CoordinatorAddresses = ()
    tls: LauncherTlsOption = field(default_factory=LauncherTls)
    min_members: Annotated[int, Parameter(name="--min", metavar="N")] = 1
    """The fewest workers that train, over all hosts."""
    max_members: Annotated[int, Parameter(name="--max", metavar="N")] = 0
    """The most workers that train, over all hosts; further ones are standbys. 0: same as --desired.
    """
    desired_members: Annotated[int, Parameter(name="--desired", metavar="N")] = 0
    """The job starts as soon as this many workers have joined. 0: same as -n, or the workers of all
    --hosts that can be reached, within --min and --max."""
    restart: Annotated[RestartOptions, Parameter(name="*")] = field(default_factory=RestartOptions)
    output: Annotated[OutputOptions, Parameter(name="*")] = field(default_factory=OutputOptions)
    cluster: Annotated[ClusterOptions, Parameter(name="*")] = field(default_factory=ClusterOptions)
    alone: Annotated[bool, _INTERNAL] = False
    """True if no worker can join from another host."""
    environment: Annotated[Mapping[str, str], _INTERNAL] = field(
        default_factory=lambda: dict(os.environ)
    )
    """Origin of the workers' environment."""

    def __post_init__(self) -> None:
        if not self.job:
            name = _job_of(self.script[0], self.module)
            # Two runs of a script must not meet by accident.
            unique = f"{name}-{os.urandom(3).hex()}" if self.coordinators else name
            object.__setattr__(self, "job", unique)
        if not is_name(self.job):
            raise InvalidSpec(
                "the job has a bad name",
                seen=repr(self.job),
                expected=NAME_RULE,
                fix="Give a name with --job; the default is the script's name.",
            )
        if self.num_workers < 1 and not self.over_ssh.hosts:
            raise InvalidSpec("no workers", seen=f"-n {self.num_workers}", expected="at least 1")
        if self.min_members < 1:
            raise InvalidSpec("bad --min", seen=str(self.min_members), expected="at least 1")
        if self.coordinators and (limits := self.cluster.limits):
            raise InvalidSpec(
                "time limits are the coordinator's, and this run uses an existing one",
                seen=f"{', '.join(limits)} with the coordinator {','.join(self.coordinators)}",
                expected="time limits only if the run starts a cluster of its own",
                fix="Give them to `shoal up` or `shoal coordinator`.",
            )
        if self.coordinators and self.cluster.num_servers_given is not None:
            raise InvalidSpec(
                "--ps is for a cluster of the run's own, and this run uses an existing one",
                seen=f"--ps {self.cluster.num_servers_given} with the coordinator"
                f" {','.join(self.coordinators)}",
                expected="--ps only if the run starts a cluster of its own",
                fix="Give it to `shoal up`, or start parameter servers with `shoal ps`.",
            )
        if self.coordinators and self.cluster.insecure:
            raise InvalidSpec(
                "--insecure is for a cluster of the run's own, and this run uses an existing one",
                seen=f"--insecure with the coordinator {','.join(self.coordinators)}",
                expected="--insecure only if the run starts a cluster of its own",
                fix="Without a certificate the run speaks plain text already.",
            )
        if self.cluster.insecure and self.over_ssh.hosts:
            raise InvalidSpec(
                "--insecure is for a cluster on one machine",
                seen="--insecure with --hosts",
                expected="one of them: other hosts reach the cluster with TLS only",
            )
        if self.over_ssh.hosts and not self.alone:
            check_reached(self.over_ssh.hosts, self.coordinators)
        job_secret(self.environment)  # else each worker would refuse a bad secret
        check_member_ids(self)
        if not self.over_ssh.hosts:
            self._set_bounds(self.num_workers)

    def on_hosts(self, num_workers: Sequence[int]) -> "RunConfig":
        """Return the config with bounds for the hosts that can be used.

        `num_workers`: workers of each host. Raises InvalidSpec for bad bounds, and if fewer hosts
        than --nnodes requires could have enough workers.
        """
        num_nodes, sizes = self.over_ssh.min_nodes, sorted(num_workers)
        least = max(self.min_members, sum(sizes[:num_nodes]))
        of_fewer = sum(sizes[1 - num_nodes :]) if num_nodes > 1 else 0
        if of_fewer >= least:
            raise InvalidSpec(
                "fewer hosts than --nnodes requires have enough workers to train",
                seen=f"--nnodes {self.over_ssh.num_nodes}: {of_fewer} workers on {num_nodes - 1} of"
                f" the hosts, and {least} are enough",
                expected="hosts with similar numbers of workers, or --min",
                fix=f"Give --min {of_fewer + 1}, or --min without --nnodes.",
            )
        config = replace(self, min_members=least)
        config._set_bounds(sum(num_workers))
        return config

    def _set_bounds(self, num_workers: int) -> None:
        desired = self.desired_members or max(num_workers, self.min_members)
        highest = self.max_members or max(desired, self.min_members)
        if not self.desired_members:
            # Workers beyond the maximum are standbys.
            desired = min(desired, highest)
        if not self.min_members <= highest:
            raise InvalidSpec(
                "--min is above --max",
                seen=f"{self.min_members} > {highest}",
                expected="min <= max",
            )
        if not self.desired_members and not self.coordinators and num_workers < self.min_members:
            raise InvalidSpec(
                "fewer workers than --min",
                seen=f"{num_workers} workers, and --min {self.min_members}",
                expected="at least --min workers in a run that starts a cluster of its own",
                fix="If workers of other runs are to join, give --coordinator.",
            )
        if not self.min_members <= desired <= highest:
            raise InvalidSpec(
                "--desired is out of bounds",
                seen=str(desired),
                expected=f"between --min {self.min_members} and --max {highest}",
                fix="Without --desired it is the number of workers, within these bounds.",
            )
        object.__setattr__(self, "desired_members", desired)
        object.__setattr__(self, "max_members", highest)

    @property
    def colour(self) -> bool:
        """True if output prefixes are coloured."""
        return sys.stdout.isatty() and "NO_COLOR" not in self.environment

    @property
    def target(self) -> Sequence[str]:
        """Arguments of `python -u` in each worker."""
        return ("-m", *self.script) if self.module else tuple(self.script)


def _job_of(target: str, module: bool) -> str:
    name = target.rpartition(".")[2] if module else Path(target).stem
    return name or "job"


def _may_write(file: Path) -> bool:
    return os.access(file.absolute().parent, os.W_OK | os.X_OK) and not file.is_dir()


def worker_files(config: RunConfig) -> TlsFiles | None:
    """Return the workers' TLS files, if the cluster uses TLS."""
    return config.tls.files_of(CertificateRole.WORKER) or files_at(
        config.coordinators, CertificateRole.WORKER
    )


def worker_environment(config: RunConfig, member_id: str, index: int = 0) -> dict[str, str]:
    """Return the environment of the worker with local rank `index`."""
    files = worker_files(config)
    environment = without_tls(config.environment) | (files.environment() if files else {})
    if config.output.verbose:
        environment["SHOAL_LOG_LEVEL"] = "DEBUG"
    environment.update(
        SHOAL_COORDINATOR=",".join(config.coordinators),
        SHOAL_JOB=config.job,
        SHOAL_MEMBER_ID=member_id,
        SHOAL_MIN_MEMBERS=str(config.min_members),
        SHOAL_MAX_MEMBERS=str(config.max_members),
        SHOAL_DESIRED_MEMBERS=str(config.desired_members),
        # Not LOCAL_RANK: Accelerate would expect torchrun's variables.
        SHOAL_LOCAL_RANK=str(index),
        SHOAL_LOCAL_WORLD_SIZE=str(config.num_workers),
    )
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_worker(config.num_workers)))
    if not any("malloc" in environment.get(key, "") for key in ("GLIBC_TUNABLES", "LD_PRELOAD")):
        for key, value in KEPT_MEMORY.items():
            environment.setdefault(key, value)
    return environment


def check_member_ids(config: RunConfig) -> None:
    """Raise InvalidSpec if SHOAL_MEMBER_ID makes bad names: log files have them, too."""
    if config.environment.get("SHOAL_MEMBER_ID"):
        for member_id in member_ids(config, ""):
            if not is_name(member_id):
                seen = repr(member_id[: 2 * MAX_NAME_LENGTH])
                raise InvalidSpec("bad SHOAL_MEMBER_ID", seen=seen, expected=NAME_RULE)


def member_ids(config: RunConfig, host: str) -> list[str]:
    """Return the workers' member ids: SHOAL_MEMBER_ID, with a suffix for each of several workers,
    or random ids."""
    if member_id := config.environment.get("SHOAL_MEMBER_ID"):
        if config.num_workers == 1:
            return [member_id]
        return [f"{member_id}-{index}" for index in range(config.num_workers)]
    # Hosts of one name, and launchers on one host, must not share ids.
    unique = f"{_name_part(host)}-{os.urandom(2).hex()}"
    return [f"{unique}-{index}" for index in range(config.num_workers)]


def threads_per_worker(num_workers: int) -> int:
    """Return each worker's share of the cores, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _name_part(host: str) -> str:
    first = host.partition(".")[0]
    kept = "".join(each if each.isalnum() and each.isascii() else "-" for each in first)
    return kept.strip("-")[:64] or "host"
