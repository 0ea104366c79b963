"""Slots of a launcher's workers."""

import math
import signal
from dataclasses import dataclass, field

from shoal_client.host.output_tail import OutputTail
from shoal_client.liveness.beat_board import MembershipEnding
from shoal_client.liveness.lifeline import ExitWatch
from shoal_client.local.process import Process
from shoal_proto.back_off import doubled_s
from shoal_proto.exit_codes import describe_exit
from shoal_proto.secrets import new_secret

DRAINED = 128 + signal.SIGTERM
PASSING_PAUSE_S = 0.5
MAX_PASSING_PAUSE_S = 30.0
"""Limits of the pause before the restart of a worker that failed by no fault of its script. The
pause doubles each time."""


FOR_TORCHRUN = (
    "a script that calls torch.distributed.init_process_group, or lets a library call it, is for"
    " torchrun:"
    " start it with torchrun --rdzv-backend=shoal (docs/torchrun.md), or leave the call out and let"
    " it train in a session (docs/tutorials/ddp.md, 'From a script for torchrun')"
)
"""Advice for torch's error that RANK is not set."""
NEWEST_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of a process."""

    code: int
    ending: MembershipEnding

    @property
    def is_temporary(self) -> bool:
        """True if the process was fenced, hit a time limit, or could not reach a part of the
        cluster."""
        return self._failed and self.ending in (MembershipEnding.FENCED, MembershipEnding.PASSING)

    @property
    def joined_too_late(self) -> bool:
        """True if the process was not needed: it was a standby, or joined a completed job."""
        return self._failed and self.ending is MembershipEnding.FINISHED

    @property
    def is_scripts_own(self) -> bool:
        """True if the script itself has failed."""
        was_drained = self.ending is MembershipEnding.DRAINED
        return self._failed and not (was_drained or self.is_temporary or self.joined_too_late)

    @property
    def failed_when_done(self) -> bool:
        """True if the process had completed its job, and failed or was killed after that."""
        return self.ending is MembershipEnding.COMPLETED and self.code not in (0, DRAINED)

    @property
    def _failed(self) -> bool:
        return self.code > 0 and self.code != DRAINED

    def __str__(self) -> str:
        if self.joined_too_late:
            return f"was not needed: the job was finished without it (exit code {self.code})"
        if self.is_temporary and self.ending is MembershipEnding.FENCED:
            return f"had been declared lost and was fenced (exit code {self.code})"
        if self.is_temporary:
            return f"ended with a temporary error (exit code {self.code})"
        if self.failed_when_done:
            return f"{describe(self.code)} after its job was completed"
        return describe(self.code)


@dataclass(kw_only=True)
class WorkerSlot:
    """A worker's slot: its process, and the exits of earlier ones."""

    index: int
    member_id: str
    launch_secret: str = field(default_factory=new_secret, repr=False)
    """Proves that a report comes from the launcher."""
    process: Process | None = None
    asked: Process | None = None
    """The newest process that was asked to end."""
    halted: bool = False
    lost_incarnation: str = ""
    """The newest incarnation that was seen as lost; a process that joins again has another."""
    lost_s: float = -math.inf
    """Time (monotonic) when it was first seen as lost."""
    killed_s: float | None = None
    """Time (monotonic) when the launcher first killed the process."""
    watch: ExitWatch | None = None
    start_at_s: float | None = None
    """Time (monotonic) at which the next process is started."""
    has_joined: bool = False
    exits: list[Exit] = field(default_factory=list)
    printed: OutputTail = field(default_factory=OutputTail, repr=False)

    @property
    def pid(self) -> int:
        """The pid; 0 without a process."""
        return self.process.pid if self.process is not None else 0

    @property
    def is_over(self) -> bool:
        return self.process is None and self.start_at_s is None

    @property
    def joined_too_late(self) -> bool:
        """True if the newest process was not needed; see `Exit.joined_too_late`."""
        return bool(self.exits) and self.exits[-1].joined_too_late

    @property
    def advice(self) -> str:
        """Advice for an error whose own text gives none; may be empty."""
        if not self.exits or self.exits[-1].code in (0, DRAINED):
            return ""
        newest = self.printed.part(NEWEST_BYTES).data
        return FOR_TORCHRUN if b"using env:// rendezvous" in newest else ""

    @property
    def pause_s(self) -> float:
        """Pause before the next process is started."""
        if not self.exits[-1].is_temporary:
            return 0.0
        before = sum(each.is_temporary for each in self.exits[:-1])
        return doubled_s(PASSING_PAUSE_S, MAX_PASSING_PAUSE_S, before)


def describe(code: int) -> str:
    """Describe the end of a process by its exit code."""
    if code < 0:
        return describe_exit(code)
    if code == DRAINED:
        return f"was drained (exit code {code})"
    return "completed" if code == 0 else f"failed with exit code {code}"
