"""Layout with whole parameters on every rank.

Gradients are averaged by torch's DistributedDataParallel while backward runs.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shoal.compression.base import Compressor
from shoal.compression.exchange import exchange_for
from shoal.compression.wire import Traffic
from shoal.layouts.base import Layout, World, materialise
from shoal.layouts.buffers import RunningBuffers
from shoal.layouts.gradients import not_reduced
from shoal.model.tied_tensors import persistent_buffers
from shoal.torch_private.replicated_module import ReplicatedModule, bucket_size
from shoal_proto.errors import InvalidSpec


class ReplicatedLayout(Layout):
    """Layout in which every rank holds and steps all parameters, with its own share of samples.

    A parameter that a loss leaves out is an error unless `find_unused_parameters`. Real parameters
    stay the script's own.
    """

    elementwise = False
    is_replicated = True
    strategy = "DDP"

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        compressor: Compressor | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`compressor`: the same object in all generations, as it keeps unsent gradients.
        `traffic`: counts bytes in all generations."""
        bucket_mb = bucket_size(bucket_mb)
        if any(parameter.is_meta for parameter in model.parameters()):
            materialise(model, world.device)
        self.world = world
        self.data_index, self.data_count = world.rank, world.world_size
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._allocate()
        self._buffers = RunningBuffers(model)
        names = {parameter: name for name, parameter in self._parameters.items()}
        self.traffic = traffic or Traffic()
        self.exchange = exchange_for(
            world.group,
            lambda p: names[p],  # type: ignore[index]
            self.traffic,
            compressor,
        )
        # `init_sync` is off, as parameters are not filled yet.
        self._ddp = ReplicatedModule(
            model,
            process_group=world.group,
            init_sync=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            is_notified_of_passes=world.makes_passes,
            unfinished=self._not_reduced,
        )
        self._ddp.register_comm_hook(None, self.exchange.average)
        self.module = self._ddp

    def _allocate(self) -> None:
        """Move parameters to their final memory, before DDP sees them."""

    @property
    def plain(self) -> nn.Module:
        return self._model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    @property
    def held(self) -> Mapping[str, Tensor]:
        return {**self._parameters, **persistent_buffers(self._model)}

    def is_counted_here(self, name: str) -> bool:
        return self.world.rank == 0

    def replicas(self, name: str) -> Sequence[int]:
        # Only the first rank publishes buffers: `share_buffers` broadcasts its values.
        return range(self.world.world_size if name in self._parameters else 1)

    def is_lost_with_rank(self, name: str) -> bool:
        return False

    def reduce_in_backward(self, reduces: bool) -> None:
        # The flag has to be set in the forward pass too, as DDP's `no_sync` does.
        self._ddp.require_backward_grad_sync = reduces

    @property
    def leaves(self) -> Sequence[Tensor]:
        return [each for each in self._parameters.values() if each.requires_grad]

    def note_loss(self, loss: Tensor) -> None:
        self.exchange.losses.note(loss)

    def begin_pass(self, loss: Tensor) -> None:
        self._ddp.begin_backward(loss)
        self.exchange.begin_pass()

    def end_pass(self) -> None:
        self._ddp.end_backward()

    def communicates_in_forward(self, *, is_first_step: bool) -> bool:
        return self._ddp.communicates_in_forward(is_first_step=is_first_step)

    def begin(self) -> None:
        self.exchange.begin(self.step)
        self._ddp.begin_step()

    def forget_gradients(self) -> None:
        self.exchange.forget()

    def reduce(self) -> None:
        self.unreached = [] if self.exchange.complete else self._without_gradient()
        if self.exchange.complete and self.looks_for_faults:
            self.exchange.check(self.step)

    def _not_reduced(self) -> InvalidSpec:
        return not_reduced(self.step, self._without_gradient(), self.strategy)

    def _without_gradient(self) -> list[str]:
        trained = ((name, p) for name, p in self._parameters.items() if p.requires_grad)
        return [name for name, p in trained if p.grad is None]

    def overflowed(self) -> bool:
        return not self.exchange.has_finite_averages()

    def check(self) -> None:
        """Do nothing: `reduce` has examined the averages, the same on every rank."""

    def share_buffers(self) -> None:
        self._buffers.broadcast_buffers(self.world.group)

    def names_without_gradient(self) -> Sequence[str]:
        return self._without_gradient()

    def synchronised(self) -> bool:
        return self.exchange.complete

    def release(self) -> None:
        self._ddp.release()
