"""Configuration of a member, from the arguments of `shoal.join` or else the environment."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog
import torch

from shoal_client.connection.admission import ADMISSION_S, ADMISSION_VARIABLE, admission_s
from shoal_client.connection.coordinators import own_address
from shoal_client.connection.reach import CHOICES
from shoal_client.liveness.beat_board import BeatSlot
from shoal_client.membership.member import Member
from shoal_proto.errors import InvalidSpec
from shoal_proto.incarnation import new_incarnation
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.numbers_given import as_index, convert_fields
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.secrets import MemberSecrets, member_secrets
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo

log = structlog.get_logger(__name__)

MAX_MEMBERS = 1024
"""Upper bound of the number of members, if the job gives none."""

_NUM_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_ADDRESS = re.compile(r"\[?[^\s,]+\]?:\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class LauncherSettings:
    """Values that `shoal run` gives its workers; defaults in any other process."""

    shared_directory: str = ""
    """Folder that the workers of this launcher share; empty: none."""
    beat_slot: str = ""
    """Address of the slot through which the launcher sends this member's heartbeats; empty: the
    member itself does."""
    job: str = ""
    """Job of the launcher's workers. A script may join another one."""
    admission_s: float = ADMISSION_S
    """Seconds that a coordinator may take to admit this member; a day under `shoal run`."""


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """Settings of `shoal.join`. Checked at construction."""

    job: str
    """Name of the job."""
    coordinators: tuple[str, ...]
    """host:port of every coordinator. Empty: this process trains alone."""
    min_members: int = 1
    """Smallest number of members with which the job trains."""
    max_members: int = MAX_MEMBERS
    """Largest number of members that train; further ones are on standby."""
    desired_members: int = 0
    """Number of members with which the first generation forms at once. 0: `min_members`."""
    member_id: str = ""
    """Name of this member in the job; empty: a generated one."""
    address: str = ""
    """IP address at which other members reach this one; empty: the address of the interface that
    leads to the coordinators."""
    check_peers: str = "auto"
    """Members that check, before a generation starts, that they reach each other, unless they have
    trained together: "auto" (members on different hosts), "always" (on one host too) or "never"."""
    backend: str = ""
    """Transport of collectives: "gloo", "nccl" or "in-memory"; empty: NCCL for a model on CUDA,
    else Gloo."""
    local_rank: int = 0
    """Index of this worker among those of its launcher on this host. If the worker sees several
    GPUs, it uses the one with this index."""
    local_world_size: int = 1
    """Number of workers that the launcher runs on this host."""
    num_ranks: int = 1
    """Number of processes that torchrun, MPI or srun has started; 1 without these."""
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    secrets: MemberSecrets = field(default_factory=MemberSecrets)

    def __post_init__(self) -> None:
        convert_fields(self, indices=("min_members", "max_members", "desired_members"))
        if not self.job:
            raise InvalidSpec(
                "no job was named",
                expected="the name of a job",
                fix="shoal.join('NAME'), or set SHOAL_JOB, or start the script with `shoal run`.",
            )
        for what, name in (("job", self.job), ("member_id", self.member_id)):
            if name and not is_name(name):
                raise InvalidSpec(
                    f"{what} is not a valid name", seen=repr(name), expected=NAME_RULE
                )
        if self.check_peers not in CHOICES:
            raise InvalidSpec(
                "check_peers has an unknown value",
                seen=repr(self.check_peers),
                expected=", ".join(CHOICES),
            )
        self._check_alone()
        for address in self.coordinators:
            if not _ADDRESS.fullmatch(address):
                raise InvalidSpec(
                    "a coordinator's address is malformed", seen=repr(address), expected="host:port"
                )
        desired = self.desired_members or self.min_members
        if not 1 <= self.min_members <= desired <= self.max_members:
            raise InvalidSpec(
                f"the bounds of job {self.job} contradict each other",
                seen=f"min_members={self.min_members} desired_members={desired}"
                f" max_members={self.max_members}",
                expected="1 <= min_members <= desired_members <= max_members",
            )
        object.__setattr__(self, "desired_members", desired)

    def _check_alone(self) -> None:
        """Raise InvalidSpec if several processes would each train alone."""
        several = {
            "min_members": self.min_members,
            "desired_members": self.desired_members,
            "workers of this launcher": max(self.local_world_size, self.num_ranks),
        }
        seen = [f"{what}: {count}" for what, count in several.items() if count > 1]
        if seen and not self.coordinators:
            raise InvalidSpec(
                "no coordinator was named, and this process is not to train alone",
                seen=", ".join(seen),
                expected="host:port of one or more coordinators",
                fix="Pass coordinator='host:port', or set SHOAL_COORDINATOR, or start the script"
                " with `shoal run`; `shoal up` starts a cluster on this machine.",
            )

    def member(self) -> Member:
        """Return this process as a member, with a new incarnation. Raises InvalidSpec if another
        process of this worker has joined, and Unavailable if no route leads to a coordinator for
        `admission_s`."""
        incarnation = new_incarnation()
        host, directory = socket.gethostname(), self.launcher.shared_directory
        generated_id = f"{_as_name(host)}-{os.getpid()}-{incarnation[-8:]}"
        return Member(
            coordinators=self.coordinators,
            spec=JobSpec(
                job=self.job,
                min_members=self.min_members,
                max_members=self.max_members,
                desired_members=self.desired_members,
            ),
            member_id=self.member_id or generated_id,
            incarnation=incarnation,
            info=MemberInfo(
                host=host,
                pid=os.getpid(),
                address=self.address or own_address(self.coordinators, self.launcher.admission_s),
                device="cuda" if torch.cuda.is_available() else "cpu",
                # All CPUs of a host count as one device.
                num_devices=torch.cuda.device_count() if torch.cuda.is_available() else 1,
                torch_version=torch.__version__,
                shoal_version=shoal_version(),
                launch_digest=self.secrets.launch_digest,
            ),
            job_secret=self.secrets.job,
            admission_s=self.launcher.admission_s,
            beat_slot=_beat_slot(self.launcher.beat_slot),
            launcher_job=self.launcher.job,
            shared_directory=Path(directory) if directory else None,
        )


def read_config(
    given: Mapping[str, str | int | None], environment: Mapping[str, str]
) -> JoinConfig:
    """Return the configuration from the given arguments, and else from variables of SHOAL,
    torchrun, MPI and srun. Raises InvalidSpec."""

    def text(name: str, variable: str) -> str:
        value = given.get(name)
        return str(value) if value is not None else environment.get(variable, "")

    def number(name: str, variable: str, default: int) -> int:
        argument = given.get(name)
        if argument is not None and not isinstance(argument, str):
            return as_index(name, argument)
        value = text(name, variable)
        if not value:
            return default
        try:
            return int(value)
        except ValueError:
            raise InvalidSpec(
                f"{variable} is not a number", seen=repr(value), expected="a whole number"
            ) from None

    min_members = number("min_members", "SHOAL_MIN_MEMBERS", 1)
    coordinators = text("coordinator", "SHOAL_COORDINATOR")
    job = text("job", "SHOAL_JOB")
    return JoinConfig(
        job=job if job or coordinators else _script_name(),
        coordinators=tuple(part.strip() for part in coordinators.split(",") if part.strip()),
        min_members=min_members,
        max_members=number("max_members", "SHOAL_MAX_MEMBERS", max(MAX_MEMBERS, min_members)),
        desired_members=number("desired_members", "SHOAL_DESIRED_MEMBERS", 0),
        member_id=text("member_id", "SHOAL_MEMBER_ID"),
        address=text("address", "SHOAL_ADDRESS"),
        check_peers=text("check_peers", "SHOAL_CHECK_PEERS") or "auto",
        backend=text("backend", "SHOAL_BACKEND"),
        local_rank=number("local_rank", "SHOAL_LOCAL_RANK", number("", "LOCAL_RANK", 0)),
        local_world_size=number(
            "local_world_size", "SHOAL_LOCAL_WORLD_SIZE", number("", "LOCAL_WORLD_SIZE", 1)
        ),
        num_ranks=max(number("", each, 1) for each in _NUM_RANKS),
        launcher=LauncherSettings(
            shared_directory=text("shared_directory", "SHOAL_SHARED_DIRECTORY"),
            beat_slot=text("beat_slot", "SHOAL_BEATS"),
            job=environment.get("SHOAL_JOB", ""),
            admission_s=admission_s(environment.get(ADMISSION_VARIABLE, "")),
        ),
        secrets=member_secrets(environment),
    )


def shoal_version() -> str:
    """Version of the distribution, for the status page."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return f"protocol {OWN_PROTOCOLS.newest}"


def _beat_slot(address: str) -> BeatSlot | None:
    if not address:
        return None
    try:
        slot = BeatSlot.open(address)
    except (OSError, InvalidSpec) as error:
        # The variable was inherited on another host or by another user.
        log.info("beat_slot_not_used", address=address, reason=str(error))
        return None
    if not slot.lifeline.hold() and (holder := slot.lifeline.other_holder):
        raise InvalidSpec(
            "two processes of one worker would join as the same member",
            seen=f"process {holder}, which has joined already, and process {os.getpid()}",
            expected="one process that calls shoal.join in each worker",
            fix="Leave torch.multiprocessing.spawn out, and call its function directly:"
            " `shoal run -n 3` starts three workers itself.",
        )
    return slot


def _script_name() -> str:
    return _as_name(Path(sys.argv[0]).stem)


def _as_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", host)[:64].lstrip("-") or "host"
