"""ZeRO-1: whole parameters on every member, the optimizer's state split over the members."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from shoal.compression import find_compression
from shoal.compression.base import Compression, refuse_loss_weights, refuse_several_models
from shoal.compression.wire import Traffic
from shoal.layouts.base import Layout, World
from shoal.layouts.zero1 import Zero1Layout
from shoal.model.elementwise_optimizers import refuse_unless_per_parameter
from shoal.model.several import refuse_untrained
from shoal.planning.figures import Plan, PlanInput, uncompressed
from shoal.planning.replicated import ReplicatedFigures
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.torch_private.replicated_module import bucket_size


class Zero1(ShardedStrategy):
    """Strategy "zero1": as "ddp", with about 1/n of the optimizer's state on each of n members.

    Parameters stay whole, for optimizers that need a whole parameter at a time. `bucket_mb`,
    `find_unused_parameters` and `compression`: see `DDP`. `per_parameter_optimizer=True` states
    that an optimizer that is not torch's own updates each parameter by that parameter's gradient
    and state alone. `copies`, `copy_every_steps`: see `ShardedStrategy`.
    """

    name = "zero1"
    trains_several = True
    syncs_batchnorm = True

    def __init__(
        self,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        compression: str | Compression | None = None,
        per_parameter_optimizer: bool = False,
        copies: int = 1,
        copy_every_steps: int | None = None,
    ) -> None:
        super().__init__(copies=copies, copy_every_steps=copy_every_steps)
        self._bucket_mb = bucket_size(bucket_mb)
        self._find_unused_parameters = find_unused_parameters
        self._compression = None if compression is None else find_compression(compression)
        self._compressor = self._compression.compressor() if self._compression else None
        self._traffic = Traffic()
        self._per_parameter_optimizer = per_parameter_optimizer

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_unless_per_parameter(self.name, optimizer, vouched=self._per_parameter_optimizer)
        refuse_several_models(self._compression, model)
        refuse_untrained(self.name, model)

    @property
    def unscales(self) -> bool:
        # An Inf would stay in the residual that compression keeps.
        return self._compression is None

    def gradients_lack(self) -> str:
        lack = super().gradients_lack()
        if not lack and self._reduced:
            return "gradients of the parameters that this member steps"
        return lack

    def options(self) -> Mapping[str, str]:
        return {"compression": str(self._compression or "none")}

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        return Zero1Layout(
            model,
            world,
            bucket_mb=self._bucket_mb,
            find_unused_parameters=self._find_unused_parameters,
            compressor=self._compressor,
            traffic=self._traffic,
        )

    def _refuse_weights(self) -> None:
        refuse_loss_weights(self._compression)

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes sent for gradients, without broadcast parameters, and the compression
        ratio.
        """
        return self._traffic.metrics()

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`; gradients count as uncompressed."""
        if subject.optimizer is not None:
            self.check(subject.model, subject.optimizer)
        return ReplicatedFigures(
            subject, self._bucket_mb, find_unused_parameters=self._find_unused_parameters
        ).zero1(uncompressed(self._compression))
