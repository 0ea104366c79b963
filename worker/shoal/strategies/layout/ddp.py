"""Data parallel: every member holds the whole model; gradients are averaged in each step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.compression import find_compression
from shoal.compression.base import Compression, refuse_loss_weights, refuse_several_models
from shoal.compression.wire import Traffic
from shoal.layouts.base import Layout, World
from shoal.layouts.replicated import ReplicatedLayout
from shoal.membership.generation import Generation, receivers_of
from shoal.model.gradients import StepGradients, watch_parameters
from shoal.model.several import models_of, refuse_untrained
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.state.host_copies import state_dict_on_host
from shoal.state.registered.objects import of_shard, with_registered
from shoal.state.replicated import ReplicatedState
from shoal.state.shards import StateShard, whole_chunk
from shoal.state.transfer import receive, send
from shoal.strategies.layout.strategy import LayoutStrategy
from shoal.strategies.synchronous.generation_group import check_same_step
from shoal.torch_private.replicated_module import bucket_size
from shoal.weights.pieces import HeldWeights, replicated_weights


@dataclass(frozen=True)
class ReplicaBinding:
    """Layout around the script's own model and optimizer."""

    layout: Layout
    held_parameters: Mapping[str, Tensor]
    gradients: StepGradients


class DDP(LayoutStrategy):
    """Strategy "ddp", on torch's DistributedDataParallel, which is made anew each generation.

    `bucket_mb`: size of the buckets in which gradients are sent while backward still runs.
    `find_unused_parameters`: for models in which some parameters get no gradient in some steps.
    `compression`: compresses gradients for a slow network: "fp16", "bf16", "int8", "one-bit",
    "top-k", "powersgd", or an object such as `shoal.TopK(ratio=0.01)`. See docs/compression.md.
    """

    name = "ddp"
    trains_several = True
    syncs_batchnorm = True
    updates_alike = True

    def __init__(
        self,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        compression: str | Compression | None = None,
    ) -> None:
        super().__init__()
        self.bucket_mb = bucket_size(bucket_mb)
        self.find_unused_parameters = find_unused_parameters
        self.compression = None if compression is None else find_compression(compression)
        # The same object serves all generations, as it keeps this member's residuals.
        self._compressor = self.compression.compressor() if self.compression else None
        self._traffic = Traffic()
        self._watching: list[RemovableHandle] = []

    # --- before any generation ---

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_untrained(self.name, model)
        refuse_several_models(self.compression, model)

    def _keep_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._state = ReplicatedState(model, optimizer)
        self._gradients = StepGradients(model.parameters(), optimizer)

    def options(self) -> Mapping[str, str]:
        return {"compression": str(self.compression or "none")}

    def _refuse_weights(self) -> None:
        refuse_loss_weights(self.compression)

    @property
    def unscales(self) -> bool:
        # An Inf would stay in the residual that compression keeps.
        return self.compression is None

    # --- generations ---

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        return ReplicatedLayout(
            model,
            world,
            bucket_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
            compressor=self._compressor,
            traffic=self._traffic,
        )

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        self._align(generation, group)
        self._checkpoints.select_writers(generation.world_size)
        kept = self._checkpoints.newest(generation, group) if self.step == 0 else None
        if kept is not None:
            state_shard = self._checkpoints.read(kept, whole_chunk, self._optimizer)
            self.restore(state_shard)
        if not self._watching:
            # The same parameters in all generations, unlike those of other layouts.
            self._watching = watch_parameters(
                self._model.parameters(), self._transaction.expects_gradient
            )
        layout = self._lay_out_all(self._model, self._world(generation, group))
        self._binding = ReplicaBinding(layout, self._state.parameters, self._gradients)

    def _release_training(self) -> None:
        self._gradients.forget()
        if not self._transaction.snapshot.is_whole:
            # This member's state is lost: another member or a checkpoint has to provide it.
            self._has_state, self._transaction.step = False, 0
            self._transaction.snapshot.is_whole = True
        binding, self._binding = self._binding, None
        if binding is not None:
            binding.layout.release()

    @torch.no_grad()
    def _align(self, generation: Generation, group: dist.ProcessGroup) -> None:
        source, receivers = receivers_of(generation)
        if generation.rank == source and receivers:
            own = with_registered(self._state.collect(self.step), self._registered.current())
            send(self._checkpoints.samples.add_position(own), receivers, group)
        elif generation.rank in receivers:
            given = receive(source, receivers, group)
            self.restore(given)
            self._checkpoints.samples.adopt(given)
        if receivers or not self.position.is_shared:
            check_same_step(generation.number, self.step, group)

    # --- steps ---

    @property
    def local_model(self) -> nn.Module:
        return self._model

    def _module_of(self, name: str) -> nn.Module:
        if self._binding is None:
            # Evaluation outside a generation needs no other member.
            return models_of(self._model)[name]
        return super()._module_of(name)

    def _committed(self) -> None:
        self.position.inspection.check(self._optimizer, lambda: self._state.collect(self.step))

    def _write_checkpoint(self) -> None:
        is_first = self.group.rank() == 0
        self._checkpoints.write(self.step, self._state_shard, lambda _: is_first)

    def _state_shard(self) -> StateShard:
        return with_registered(self._state.state_shard(self.step), self._registered.current())

    def keep_alone(self) -> None:
        if self._has_state:
            self._checkpoints.write_alone(self.step, self._state_shard)

    def metrics(self) -> Mapping[str, float]:
        return self._traffic.metrics()

    # --- state ---

    def state_dict(self) -> Mapping[str, Tensor]:
        return state_dict_on_host(self._model)

    def weights(self) -> HeldWeights:
        group = self.group
        self._transaction.snapshot.settle_buffers()
        return replicated_weights(
            self._state.parameters,
            persistent_buffers(self._model),
            step=self.step,
            rank=group.rank(),
            world_size=group.size(),
            tied=tied(self._model),
        )

    def restore(self, state_shard: StateShard) -> None:
        """Load the state of another member, or of a checkpoint."""
        held, self._has_state = self._has_state, False
        # Meanwhile this member is at step 0, without state: a failure leaves the state partly
        # written, so another member or a checkpoint has to provide it.
        self._transaction.step = 0
        self._state.restore(state_shard)
        self._registered.adopt(of_shard(state_shard))
        self._transaction.step = state_shard.step
        self._has_state = held

    def close(self) -> None:
        try:
            super().close()
        finally:
            for each in self._watching:
                each.remove()
