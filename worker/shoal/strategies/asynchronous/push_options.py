"""What a script asks of its pushes."""

import math
from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from shoal.compression.base import Compression
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.optimizer_pb2 import StalenessPolicy

LEVELS = ("applied", "replicated", "durable")


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    policy: StalenessPolicy
    """What is done with gradients whose values others have changed since."""
    schedule: LRScheduler | None
    """Sent with the job; without a schedule, learning rates are sent with each push."""
    acknowledgement: Acknowledgement.ValueType
    """What a push waits for."""
    lost_wait_s: float = 0.0
    """How long a step waits for lost shards to come back."""
    must_fall: bool = False
    """Whether a loss that is not lower at the end than at first is an error."""
    compression: Compression | None = None
    """How gradients are made small before they are pushed."""

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("lost_wait_s",))
        if not 0.0 <= self.lost_wait_s < math.inf:
            raise InvalidSpec(
                "bad lost_wait_s", seen=str(self.lost_wait_s), expected="0 or more seconds, finite"
            )
        if self.compression is not None and self.policy.kind == "compensate":
            raise InvalidSpec(
                "compressed gradients cannot be corrected for delay",
                seen=f"compression={str(self.compression)!r} with staleness='compensate'",
                expected="one of the two",
                fix="Delay compensation sends the values along that gradients were computed on,"
                " which are not compressed: train with staleness='damp'.",
            )


def level(acknowledge: str) -> Acknowledgement.ValueType:
    """The level of this name. Raises InvalidSpec where there is none."""
    name = f"ACKNOWLEDGEMENT_{acknowledge.upper()}"
    if acknowledge not in LEVELS:
        raise InvalidSpec(
            "no such level of acknowledgement",
            seen=repr(acknowledge),
            expected=" or ".join(LEVELS),
        )
    # Where a shard has no backup, "replicated" is what its primary alone can give.
    return Acknowledgement.Value(name)
