"""The places of a launcher's workers: the process of now, and how those before it ended."""

import signal
from dataclasses import dataclass, field

from shoal_client.host.output_tail import OutputTail
from shoal_client.liveness.beat_board import Ending
from shoal_client.liveness.lifeline import Watch
from shoal_client.local.process import Process, how_it_ended
from shoal_proto.secrets import drawn

DRAINED = 128 + signal.SIGTERM
"""The exit code of a worker that left its job in good order because it was asked to."""
FENCED_PAUSE_S = 0.5
MAX_FENCED_PAUSE_S = 30.0
"""Before a fenced worker is started again, twice as long each time: what made it lose its place (a
host that swaps, a debugger, a laptop's lid) may go on for a while."""


FOR_TORCHRUN = (
    "a script that calls torch.distributed.init_process_group, or what does so, is for torchrun:"
    " start it with torchrun --rdzv-backend=shoal (docs/torchrun.md), or leave the call out and let"
    " it train in a session (docs/tutorials/ddp.md, 'From a script for torchrun')"
)
"""What to do about an error of torch's, which says that RANK is not set."""
NEWEST_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one process of a slot ended."""

    code: int
    ending: Ending

    @property
    def fenced(self) -> bool:
        """It failed because it was no member any more, and not by itself."""
        return self.code > 0 and self.code != DRAINED and self.ending is Ending.FENCED

    @property
    def found_it_finished(self) -> bool:
        """It stood by, or came too late: others had completed the job."""
        return self.code > 0 and self.code != DRAINED and self.ending is Ending.FINISHED

    def __str__(self) -> str:
        if self.found_it_finished:
            return f"was not needed: the job was finished without it (exit code {self.code})"
        if self.fenced:
            return f"had been declared lost and was fenced (exit code {self.code})"
        return describe(self.code)


@dataclass(kw_only=True)
class WorkerSlot:
    """One worker's place: the process of now, and how those before it ended."""

    index: int
    member_id: str
    launch_secret: str = field(default_factory=drawn, repr=False)
    """By which the coordinator knows that a report on its processes is their launcher's."""
    process: Process | None = None
    watch: Watch | None = None
    start_at_s: float | None = None
    """When the next process is to be started, by the monotonic clock."""
    exits: list[Exit] = field(default_factory=list)
    printed: OutputTail = field(default_factory=OutputTail, repr=False)
    """The newest lines of all its processes."""

    @property
    def is_over(self) -> bool:
        return self.process is None and self.start_at_s is None

    @property
    def found_it_finished(self) -> bool:
        """Whether others had completed the job before its newest process could."""
        return bool(self.exits) and self.exits[-1].found_it_finished

    @property
    def advice(self) -> str:
        """What to do about an error that does not say so itself; empty if nothing is known."""
        if not self.exits or self.exits[-1].code in (0, DRAINED):
            return ""
        newest = self.printed.part(NEWEST_BYTES).data
        return FOR_TORCHRUN if b"using env:// rendezvous" in newest else ""

    @property
    def pause_s(self) -> float:
        """Before the next process is started."""
        if not self.exits[-1].fenced:
            return 0.0
        before = sum(each.fenced for each in self.exits[:-1])
        return min(FENCED_PAUSE_S * 2.0**before, MAX_FENCED_PAUSE_S)


def describe(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return how_it_ended(code)
    if code == DRAINED:
        return f"was drained (exit code {code})"
    return "completed" if code == 0 else f"failed with exit code {code}"
