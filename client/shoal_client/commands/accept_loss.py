"""`shoal accept-loss`: gives up lost shards, which start over."""

import getpass
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal_client.commands.status import in_short
from shoal_client.connection.addresses import UsualCoordinators, usual_coordinators
from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_name
from shoal_proto.terminal import printable
from shoal_proto.tls.options import TlsOption, TlsOptions
from shoal_proto.v1.shards_pb2 import (
    SAMPLES_AFTER_LOSS_ANEW,
    SAMPLES_AFTER_LOSS_KEEP,
    SAMPLES_AFTER_LOSS_UNSAID,
    AcceptLossReply,
    AcceptLossRequest,
    GivenUpShard,
)
from shoal_proto.v1.shards_pb2_grpc import ShardsStub

ANSWER_WITHIN_S = 30.0
_SAMPLES = {
    None: SAMPLES_AFTER_LOSS_UNSAID,
    "anew": SAMPLES_AFTER_LOSS_ANEW,
    "keep": SAMPLES_AFTER_LOSS_KEEP,
}


@dataclass(frozen=True, kw_only=True)
class AcceptLossConfig:
    """Gives up lost shards of a job: they start over with the initial values of the next worker
    that joins. The job's other shards keep their values. Giving up cannot be undone: try `shoal
    restore` first, or start the server whose journal has the shards."""

    job: str = field(kw_only=False)
    """Name of the job."""
    shards: Annotated[Sequence[int], Parameter(name="--shard", metavar="N")] = ()
    """Id of a lost shard. May be repeated. By default all lost shards."""
    yes: Annotated[bool, Parameter(name="--yes")] = False
    """Do not ask for the job's name as a confirmation."""
    samples: Literal["anew", "keep"] | None = None
    """anew: train on all samples again. keep: train on the remaining samples only. By default anew
    if all trained values are lost; if some shards keep theirs, you have to choose."""
    coordinators: UsualCoordinators = ()
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())
        if any(not 0 <= shard < 2**32 for shard in self.shards):
            raise InvalidSpec(
                "bad --shard", seen=str(list(self.shards)), expected="ids of shards, from 0"
            )


def accept_loss(config: AcceptLossConfig) -> int:
    """Give up the shards. Raises UnknownJob, UnknownShard, NothingLost, or InvalidSpec; a missing
    --samples is refused before the confirmation.
    """
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    with closing(Coordinators(config.coordinators)) as coordinators:

        def ask(shard_ids: Sequence[int], *, dry_run: bool) -> AcceptLossReply:
            request = AcceptLossRequest(
                job=config.job,
                shard_ids=shard_ids,
                by=_me(),
                dry_run=dry_run,
                samples=_SAMPLES[config.samples],
            )
            return coordinators.call(
                lambda channel: ShardsStub(channel).AcceptLoss, request, timeout_s=ANSWER_WITHIN_S
            )

        shard_ids = config.shards
        if not config.yes:
            planned = ask(shard_ids, dry_run=True)
            lost = [shard for shard in planned.shards if not shard.before]
            is_clear = planned.samples != SAMPLES_AFTER_LOSS_UNSAID
            if lost and is_clear:
                _confirm(config.job, lost, _samples_in_words(planned))
            # Only the shards that were shown: further ones may be lost by now.
            shard_ids = [shard.shard_id for shard in planned.shards]
        reply = ask(shard_ids, dry_run=False)
    for shard in reply.shards:
        at = _local(shard.accepted_unix_s)
        again = ", in an earlier call" if shard.before else ""
        print(
            f"loss of {in_short(shard.shard_id, shard.version)} of job {config.job} accepted by"
            f" {printable(shard.by)} at {at}{again}"
        )
    if any(not shard.before for shard in reply.shards):
        print(_samples_in_words(reply))
    return 0


def _samples_in_words(reply: AcceptLossReply) -> str:
    progress = f"{reply.completed_samples} of {reply.total_samples} were trained on"
    if not reply.total_samples:
        progress = "none was trained on"
    if reply.samples == SAMPLES_AFTER_LOSS_ANEW:
        return f"The job's samples start over ({progress}): the next run trains on all of them."
    return f"The job's samples stay counted ({progress}): the next run trains on the rest."


def _confirm(job: str, lost: Sequence[GivenUpShard], samples: str) -> None:
    for shard in lost:
        at = _local(shard.lost_unix_s)
        print(
            f"{in_short(shard.shard_id, shard.version)} was lost at {at} with"
            f" {', '.join(shard.servers) or 'its servers'}"
        )
    print("Their trained values will be gone for good.")
    print(samples)
    try:
        given = input("Type the job's name to give up these shards: ").strip()
    except EOFError:
        given = ""
    if given != job:
        raise InvalidSpec(
            "the loss was not accepted: nothing has changed",
            seen=repr(given),
            expected=f"the job's name, {job}",
            fix="Type it, or give --yes.",
        )


def _local(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # a container may run under a user id without a name
    return f"{user}@{socket.gethostname()}"
