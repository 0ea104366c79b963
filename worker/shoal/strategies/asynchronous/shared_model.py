"""What all members train together, as one of them holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.gradients import StepGradients
from shoal.strategies.asynchronous.optimizer_spec import FollowedSchedule
from shoal.strategies.asynchronous.push_compression import PushCompressor
from shoal.strategies.asynchronous.shared_values import SharedValues
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    model: nn.Module
    optimizer: Optimizer
    values: SharedValues
    """The model's parameters, to send and to fill."""
    spec: OptimizerSpec
    """What the servers do with what they are pushed."""
    gradients: StepGradients
    """Those of the whole model, with which no step begins."""
    compressor: PushCompressor | None = None
    """Of the member's gradients; None: they are pushed as they are."""
    followed: FollowedSchedule | None = None
    """Whose rates go with each push; None: those that the optimizer has."""

    @cached_property
    def untrained(self) -> Mapping[str, Tensor]:
        """Parameters that are this member's own, by name."""
        shared = self.values.parameters
        return {name: each for name, each in self.model.named_parameters() if name not in shared}
