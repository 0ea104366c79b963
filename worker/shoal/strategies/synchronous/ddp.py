"""Data parallel: every member holds the whole model; gradients are averaged in each step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.compression import find_compression
from shoal.compression.base import Compression, refuse_loss_weights, refuse_several_models
from shoal.compression.exchange import exchange_for
from shoal.compression.gradient_exchange import GradientExchange
from shoal.compression.wire import Traffic
from shoal.data.order import Order
from shoal.layouts import local_step
from shoal.layouts.buffers import RunningBuffers
from shoal.layouts.gradients import not_reduced
from shoal.membership.generation import Generation, receivers_of
from shoal.model.digests import optimizer_digest, schema_digest
from shoal.model.elementwise_optimizers import refuse_further_state, refuse_lbfgs
from shoal.model.gradients import (
    StepGradients,
    refuse_layers,
    refuse_parameter_hooks,
    watch_parameters,
)
from shoal.model.several import models_of, proxies_of, refuse_untrained
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.model.trained_parameters import refuse_extra_state
from shoal.state.host_copies import state_dict_on_host
from shoal.state.registered.objects import into_state, of_shard, of_state, with_registered
from shoal.state.replicated import ReplicatedState, State
from shoal.state.shards import StateShard, whole_chunk
from shoal.state.transfer import receive, send
from shoal.strategies.synchronous.generation_group import check_same_step
from shoal.strategies.synchronous.step_vote import OptimizerAction
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.replicated_module import ReplicatedModule, bucket_size
from shoal.torch_private.tensors import foreach_mul_
from shoal.weights.pieces import HeldWeights, replicated_weights
from shoal_proto.errors import InvalidSpec


class ModelReplica:
    """A whole model in one generation: torch's wrapper, the exchange that averages its gradients,
    and its shared running statistics."""

    def __init__(self, ddp: ReplicatedModule, exchange: GradientExchange) -> None:
        self.ddp = ddp
        self.exchange = exchange
        self.running = RunningBuffers(ddp.module)
        self._watching: list[RemovableHandle] = []

    def watch(self, ours: Callable[[], bool]) -> None:
        """Begin to average the gradients of backward passes. A pass in which `ours()` returns False
        raises InvalidSpec."""
        self._watching = watch_parameters(self.ddp.module.parameters(), ours)
        self.ddp.register_comm_hook(None, self.exchange.average)

    def release(self) -> None:
        """Release the model and the group."""
        while self._watching:
            self._watching.pop().remove()
        self.ddp.release()


class DDP(SynchronousStrategy):
    """Strategy "ddp", on torch's DistributedDataParallel, which is made anew each generation.

    `bucket_mb`: size of the buckets in which gradients are sent while backward still runs.
    `find_unused_parameters`: for models in which some parameters get no gradient in some steps.
    `compression`: compresses gradients for a slow network: "fp16", "bf16", "int8",
    "one-bit", "top-k", "powersgd", or an object such as `shoal.TopK(ratio=0.01)`. See
    docs/compression.md.
    """

    name = "ddp"
    carries = True
    trains_several = True
    syncs_batchnorm = True
    changes_batch_size = True

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
        # One object for all generations, as it keeps this member's residuals.
        self.compressor = self.compression.compressor() if self.compression else None
        self._traffic = Traffic()
        self._replicas: dict[str, ModelReplica] = {}
        self._rank = 0

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_lbfgs(self.name, optimizer)
        refuse_further_state(self.name, optimizer)
        refuse_extra_state(model)
        refuse_layers(self.name, model)
        refuse_untrained(self.name, model)
        refuse_several_models(self.compression, model)
        refuse_parameter_hooks(model)
        self._state = ReplicatedState(model, optimizer)
        self._gradients = StepGradients(model.parameters(), optimizer)
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "backend": self._backend.name,
            "compression": str(self.compression or "none"),
        }
        self._model, self._optimizer = model, optimizer
        self._registered.follow(optimizer)
        self._transaction.train(model, optimizer)
        return proxies_of(model, self._module_of), optimizer

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def trains_on(self, samples: Mapping[str, str], order: Order) -> None:
        refuse_parameter_hooks(self._model)
        super().trains_on(samples, order)

    # --- generations ---

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        self._align(generation, group)
        self._checkpoints.select_writers(generation.world_size)
        kept = self._checkpoints.newest(generation, group) if self.step == 0 else None
        if kept is not None:
            state_shard = self._checkpoints.read(kept, whole_chunk, self._optimizer)
            self._state.adopt(state_shard)
            self._registered.adopt(of_shard(state_shard))
            self._transaction.step = state_shard.step
        self._rank = generation.rank
        self._wrap(group)

    def _release_training(self) -> None:
        self._gradients.forget()
        if not self._transaction.snapshot.is_whole:
            # This member's state is lost: another member or a checkpoint has to provide it.
            self._has_state, self._transaction.step = False, 0
            self._transaction.snapshot.is_whole = True
        replicas, self._replicas = self._replicas, {}
        for replica in replicas.values():
            replica.release()

    @torch.no_grad()
    def _align(self, generation: Generation, group: dist.ProcessGroup) -> None:
        """Send the source's state to the members that lack it."""
        source, receivers = receivers_of(generation)
        if generation.rank == source and receivers:
            state = into_state(self._state.collect(self.step), self._registered.current())
            send(self._checkpoints.samples.add_position(state), receivers, group)
        elif generation.rank in receivers:
            state = receive(source, receivers, group)
            held, self._has_state = self._has_state, False
            # `_has_state` is False meanwhile: a failure would leave the state partly written.
            self.restore(state)
            self._has_state = held
        if receivers or not self.position.is_shared:
            check_same_step(generation.number, self.step, group)

    def _wrap(self, group: dist.ProcessGroup) -> None:
        for name, model in models_of(self._model).items():
            # `init_sync=False`: all members have the source's state already.
            ddp = ReplicatedModule(
                model,
                process_group=group,
                init_sync=False,
                bucket_cap_mb=self.bucket_mb,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.find_unused_parameters,
                is_notified_of_passes=True,
                unfinished=partial(self._not_averaged, [model]),
            )
            exchange = exchange_for(group, self._state.name_of, self._traffic, self.compressor)
            self._replicas[name] = ModelReplica(ddp, exchange)
            self._replicas[name].watch(self._transaction.expects_gradient)

    # --- steps ---

    def begin_step(self) -> None:
        self._gradients.forget()
        self._open_step(self._model, self._state.parameters)
        for replica in self._replicas.values():
            replica.exchange.begin(self.step)
            replica.ddp.begin_step()

    @property
    def local_model(self) -> nn.Module:
        return self._model

    @property
    def module(self) -> nn.Module:
        return self._module_of("")

    def _module_of(self, name: str) -> nn.Module:
        """Return DDP within a step, with gradients enabled; else the plain model, so that
        evaluation needs no other member."""
        replica = self._replicas.get(name)
        if self._transaction.in_step and replica is not None and torch.is_grad_enabled():
            votes = self._transaction.votes
            votes.exchange_parts()
            if replica.ddp.communicates_in_forward(is_first_step=votes.is_first_step):
                votes.announce()
            return replica.ddp
        return models_of(self._model)[name]

    def _reduce_in_backward(self, reduces: bool) -> None:
        for replica in self._replicas.values():
            # As DDP's `no_sync`; it has to be set in the forward pass too.
            replica.ddp.require_backward_grad_sync = reduces

    def backward(self, loss: Tensor, weight: float) -> None:
        with self._transaction.weighted_backward():
            replicas = self._replicas_of(self._transaction.chosen)
            loss = loss if weight == 1.0 else loss * weight
            # With several models, compute gradients only for the models that the pass trains.
            inputs = self._transaction.training and [
                parameter
                for replica in replicas
                for parameter in replica.ddp.module.parameters()
                if parameter.requires_grad
            ]
            for replica in replicas:
                replica.ddp.begin_backward(loss)
                replica.exchange.begin_pass()
            loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
            for replica in replicas:
                replica.ddp.end_backward()

    def _replicas_of(self, optimizers: frozenset[str]) -> list[ModelReplica]:
        """Return the replicas of the models that these optimizers train."""
        if self._transaction.training is None:
            return list(self._replicas.values())
        names = self._transaction.models(optimizers)
        return [replica for name, replica in self._replicas.items() if name in names]

    def update(self) -> None:
        if self._transaction.training is None:
            super().update()
        optimizers = self._transaction.take("session.update")
        replicas = self._replicas_of(optimizers)
        if not all(replica.exchange.complete for replica in replicas):
            raise self._not_averaged(each.ddp.module for each in replicas)
        for replica in replicas:
            replica.exchange.check(self.step)
        self._transaction.agree_on(OptimizerAction.UPDATE)
        self._generation_group.check()
        held = [each for replica in replicas for each in replica.ddp.module.parameters()]
        with self._transaction.updating(self._optimizer, held):
            local_step.step(self._optimizer)

    def backward_by_weight(self, loss: Tensor, weight: float) -> None:
        refuse_loss_weights(self.compression)
        self.backward(loss, self._transaction.add_weight(weight))

    def _scale_gradients(self, factor: float) -> None:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        foreach_mul_(gradients, torch.tensor(factor, dtype=torch.float64))

    @property
    def unscales(self) -> bool:
        # An Inf would stay in the residual that compression keeps.
        return self.compression is None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._transaction.has_own_weights or self._registered.scaler is not None:
            # Gradients are weighted sums, not means, until the vote has shown all losses' weights.
            self._settle()
        if self._transaction.training is None:
            whole: Tensor = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
            return whole
        self._transaction.take("session.clip_grad_norm")
        self._transaction.agree_on(OptimizerAction.CLIP)
        norm: Tensor = torch.nn.utils.clip_grad_norm_(
            self._transaction.parameters(self._optimizer), max_norm
        )
        return norm

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        group = self.group
        self._transaction.check_weighted()
        self._transaction.snapshot.settle_buffers()
        replicas = self._replicas_of(self._transaction.due)
        if not all(replica.exchange.complete for replica in replicas):
            raise self._not_averaged(each.ddp.module for each in replicas)
        # Vote before the check below: the vote is sent while this member examines its gradients.
        self._transaction.votes.propose(idle=self._without_gradients())
        overflowed = False
        for replica in replicas:
            if self._registered.scaler is None:
                with self._generation_group.judging():
                    replica.exchange.check(self.step)
            else:
                overflowed = overflowed or not replica.exchange.has_finite_averages()
        self._settle()
        # Share before the optimizer steps: a failure here leaves the state of the last step.
        for replica in self._replicas.values():
            replica.running.broadcast_buffers(group)
        self._generation_group.check()
        with self._transaction.committing(self._optimizer, overflowed=overflowed):
            if not overflowed:
                self._optimizer.step()
        self.position.inspection.check(self._optimizer, lambda: self._state.collect(self.step))
        self._checkpoint()
        acknowledged()

    def _without_gradients(self) -> Sequence[str]:
        """Name the parameters without a gradient, which the optimizer will skip: they must be the
        same on every member. Empty with several models, which train in turn."""
        if self._transaction.training is not None:
            return ()
        parameters = self._state.parameters.items()
        return [name for name, each in parameters if each.grad is None and each.requires_grad]

    def _write_checkpoint(self) -> None:
        self._checkpoints.write(self.step, self._state_shard, lambda _: self._rank == 0)

    def _state_shard(self) -> StateShard:
        return with_registered(self._state.state_shard(self.step), self._registered.current())

    def keep_alone(self) -> None:
        if self._has_state:
            self._checkpoints.write_alone(self.step, self._state_shard)

    def _not_averaged(self, models: Iterable[nn.Module]) -> InvalidSpec:
        """Build the error for gradients that were not averaged: the members would drift apart."""
        names = [
            self._state.name_of(parameter)
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        return not_reduced(self.step, names, type(self).__name__)

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes that this member sent for its gradients, and the compression ratio."""
        return self._traffic.metrics()

    # --- state ---

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the whole model on the host; the same on every member after the same step."""
        return state_dict_on_host(self._model)

    def weights(self) -> HeldWeights:
        world_size = self.group.size()
        self._transaction.snapshot.settle_buffers()
        return replicated_weights(
            self._state.parameters,
            persistent_buffers(self._model),
            step=self.step,
            rank=self._rank,
            world_size=world_size,
            tied=tied(self._model),
        )

    def restore(self, state: State) -> None:
        own, registered = of_state(state)
        self._state.restore(own)
        self._registered.adopt(registered)
        self._checkpoints.samples.adopt(state)
        self._transaction.step = state.step
