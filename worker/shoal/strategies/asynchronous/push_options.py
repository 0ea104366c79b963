"""What a script asks of its pushes."""

from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.optimizer_pb2 import StalenessPolicy

LEVELS = ("applied", "replicated", "durable")


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    policy: StalenessPolicy
    """What becomes of gradients of values that others have changed since."""
    schedule: LRScheduler | None
    """Travels with the job; without one the rates go with each push."""
    acknowledgement: Acknowledgement.ValueType
    """What a push waits for."""


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
