"""Base of the strategies that make a new layout in each generation, filled from members' state."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.order import Order
from shoal.layouts import local_step
from shoal.layouts.base import Layout, LossFunction, World
from shoal.layouts.clipping import clip, scale
from shoal.layouts.gradients import not_reduced
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.optimizer_binding import MetaModel, OptimizerBinding
from shoal.layouts.several import SeveralLayouts
from shoal.membership.generation import Generation, receivers_of
from shoal.model.devices import device_of
from shoal.model.digests import optimizer_digest, schema_digest
from shoal.model.elementwise_optimizers import refuse_further_state, refuse_lbfgs
from shoal.model.gradients import is_on_host, refuse_layers, refuse_parameter_hooks
from shoal.model.losses import check_loss
from shoal.model.module_proxy import copy_modes, retarget
from shoal.model.script_attributes import ScriptAttributes
from shoal.model.several import SeveralModels, models_of, proxies_of
from shoal.model.trained_parameters import refuse_extra_state
from shoal.state.peer_checkpoints import PeerCheckpoints
from shoal.state.registered.objects import of_shard, with_registered
from shoal.state.resharding import reshard
from shoal.state.shards import MODEL, REGISTERED, Chunk, StateShard
from shoal.strategies.compiled_models import not_compiled
from shoal.strategies.synchronous.generation_group import check_same_step
from shoal.strategies.synchronous.loss_scale import reduce_found_inf
from shoal.strategies.synchronous.step_vote import OptimizerAction
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.compiling import is_routing_compiled
from shoal.torch_private.dtensor import clear_sharding_cache
from shoal.weights.pieces import HeldWeights, sharded_weights
from shoal_proto.errors import GenerationBroken, InvalidSpec, StateLost
from shoal_proto.v1 import membership_pb2 as pb


class LayoutStrategy(SynchronousStrategy):
    """A synchronous strategy defined by how it lays a model over the ranks of a generation.

    The state of a lost member comes from copies that its peers keep in host memory. They are made
    after the first step of each generation, and every `copy_every_steps` steps, each on `copies`
    other members, while training continues. After a loss all members roll back by at most twice
    `copy_every_steps` steps, and train on the same samples again. With `copies=0`, only a
    checkpoint makes sure that training survives a loss.
    """

    state_is_spread = True
    carries = True
    changes_batch_size = True
    initialises = True

    def __init__(self, *, copies: int = 1, copy_every_steps: int = 10) -> None:
        super().__init__()
        self._peer_checkpoints = PeerCheckpoints(copies=copies, every_steps=copy_every_steps)
        self._binding: OptimizerBinding | None = None
        self._filling: Layout | None = None
        self._attributes = ScriptAttributes()
        self._begun = self._reduced = False
        self._copy_due = False

    @abstractmethod
    def lay_out(self, model: nn.Module, world: World) -> Layout:
        """Lay the model out for a new generation. See `shoal.layouts.base.LayOut`."""

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise an error if the strategy cannot train this model with this optimizer. `distribute`
        calls it after checks of layers, optimizer and hooks; a plan calls it without those checks.
        """

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        """Raise InvalidSpec if the model cannot be laid out for this size. Quick; thread-safe."""

    def refuses(self, world_size: int) -> str:
        try:
            self.try_lay_out(self._meta_model.model, world_size)
        except InvalidSpec as error:
            return str(error)
        return ""

    def options(self) -> Mapping[str, str]:
        """Options of the strategy that all members must have in common, for the proposal."""
        return {}

    # --- before any generation ---

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_lbfgs(self.name, optimizer)
        refuse_further_state(self.name, optimizer)
        refuse_extra_state(model)
        refuse_layers(self.name, model)
        refuse_parameter_hooks(model)
        self._meta_model = MetaModel(model, optimizer)
        self.check(model, optimizer)
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "backend": self._backend.name,
            **self.options(),
        }
        self._device = device_of(model)
        self._optimizer = optimizer
        self._registered.follow(optimizer)
        self._transaction.train(model, optimizer)
        self._proxy = proxies_of(model, self._module_of)
        return self._proxy, optimizer

    def lay_out_static(self, meta_model: MetaModel, optimizer: Optimizer, world: World) -> Layout:
        """Lay the model out for a fixed world, without a session. Raises what `distribute` raises;
        but state that only a session would have to send to members is not refused."""
        refuse_lbfgs(self.name, optimizer)
        refuse_layers(self.name, meta_model.model)
        refuse_parameter_hooks(meta_model.model)
        self.check(meta_model.model, optimizer)
        return self.lay_out(meta_model.copy(), world)

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def trains_on(self, samples: Mapping[str, str], order: Order) -> None:
        # Check before the parameters of a layout replace the script's own.
        refuse_parameter_hooks(self._meta_model.model)
        super().trains_on(samples, order)

    # --- generations ---

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        world = World(
            rank=generation.rank,
            world_size=generation.world_size,
            device=self._device,
            group=group,
            generation=generation.number,
            kept_regions=self._generation_group.kept_regions,
            completes_passes=True,
            makes_passes=True,
            exchanges=self.position.exchanges,
        )
        # DTensor's cache entries for the meshes of old generations are useless now.
        clear_sharding_cache()
        self._attributes.copy_to(self._proxy, self._meta_model.model)
        layout = self._lay_out_all(self._meta_model.copy(), world)
        self._generation_group.kept_regions.clear()
        binding = OptimizerBinding(self._meta_model, self._optimizer, layout)
        members = frozenset(entry.member_id for entry in generation.entries)
        held = self._peer_checkpoints.held(
            frozenset(e.member_id for e in generation.entries if e.state == pb.STATE_ACTION_KEEP)
        )
        source, _ = receivers_of(generation)
        if not held and not self._has_state and world.rank == source:
            held.append(with_registered(self._meta_model.initial(), self._registered.current()))
        state_shard = self._newest_state(generation, group, held, binding)
        binding.fill(state_shard)
        self._registered.adopt(of_shard(state_shard))
        copy_modes(self._proxy, binding.layout.plain)
        binding.layout.watch(self._transaction.expects_gradient)
        self._binding, self._filling, self._transaction.step = binding, None, state_shard.step
        for name, module in models_of(binding.layout.plain).items():
            retarget(models_of(self._proxy)[name], module)
        self._attributes.note(self._proxy)
        own = self._collect(binding)
        self._peer_checkpoints.start(
            replace(own, elsewhere=binding.known | own.shards.keys()),
            members,
            dist.new_group,
            # Registered state is whole on every member.
            lambda name: not name.startswith(REGISTERED) and binding.layout.is_lost_with_rank(name),
            binding.layout.failure_domains([entry.host for entry in generation.entries]),
        )
        self._checkpoints.select_writers(world.world_size)
        check_same_step(generation.number, self.step, group, binding.layout.shared_memory)
        self._meta_model.forget_weights()

    def _lay_out_all(self, model: nn.Module, world: World) -> Layout:
        """Lay out the model or models. Once this has returned, `cut` reaches the layout."""
        if isinstance(model, SeveralModels):
            layouts = {name: self.lay_out(each, world) for name, each in model.items()}
            layout: Layout = SeveralLayouts(model, layouts, world)
        else:
            layout = self.lay_out(model, world)
        self._filling = layout
        if self._generation_group.has_cut(world.generation):
            layout.cut(f"generation {world.generation} is over")
        return layout

    def _collect(self, binding: OptimizerBinding) -> StateShard:
        """Return this member's state after the last committed step."""
        self._transaction.snapshot.settle_buffers()
        own = with_registered(binding.collect(self.step), self._registered.current())
        return self._checkpoints.samples.add_position(own)

    def _collect_as_begun(self, binding: OptimizerBinding) -> StateShard:
        """Return, within a step, the state of `_collect` without the script's changes in the step.
        Raises GenerationBroken if `StepSnapshot.state_at_step_start` does."""
        with self._transaction.snapshot.state_at_step_start(binding.held) as changed:
            own = self._collect(binding)
        paths = ((MODEL + name, tensor) for name, tensor in changed.items())
        shards = {key: replace(own.shards[key], tensor=t) for key, t in paths if key in own.shards}
        return replace(own, shards={**own.shards, **shards})

    def _newest_state(
        self,
        generation: Generation,
        group: dist.ProcessGroup,
        held: list[StateShard],
        binding: OptimizerBinding,
    ) -> StateShard:
        """Return the newest state that the members hold together, or else a checkpoint's."""

        def needs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
            if not name.startswith(REGISTERED):
                return binding.needed_chunk(name, shape, dtype)
            return Chunk.whole(shape) if self._registered else None

        def target(name: str, chunk: Chunk) -> Tensor | None:
            return None if name.startswith(REGISTERED) else binding.target_of(name, chunk)

        try:
            # Everything is copied once, into the layout, even if the layout is on a device.
            memory = binding.layout.shared_memory
            state_shard = reshard(group, held, needs, borrow=True, target=target, memory=memory)
        except StateLost:
            kept = self._checkpoints.newest(generation, group)
            if kept is None:
                raise
        else:
            kept = None if state_shard.step else self._checkpoints.newest(generation, group)
            if kept is None:
                self._checkpoints.samples.adopt(state_shard)
                return state_shard
        return self._checkpoints.read(kept, needs, None if self._has_state else self._optimizer)

    def cut(self, generation: int) -> None:
        super().cut(generation)
        if self._generation_group.has_cut(self._generation_group.number):
            # Gloo may keep a message of a cut group until its time limit: do not wait for it.
            self._peer_checkpoints.interrupt()
            # Read in this order: the trainer sets `_binding` before it clears `_filling`.
            filling, binding = self._filling, self._binding
            for layout in (filling, binding.layout if binding is not None else None):
                if layout is not None:
                    layout.cut(f"generation {generation} is over")

    def _release_training(self) -> None:
        binding, filling = self._binding, self._filling
        self._binding, self._filling, self._copy_due = None, None, False
        with ExitStack() as releases:
            releases.callback(self._meta_model.give_back, self._optimizer)
            if binding is not None:
                releases.callback(binding.layout.release)
                releases.callback(self._keep, binding)
                releases.callback(binding.gradients.forget)
            if filling is not None:
                releases.callback(filling.release)
                releases.callback(filling.cut, "its bring-up has failed")

    def _keep(self, binding: OptimizerBinding) -> None:
        snapshot = self._transaction.snapshot
        is_whole, snapshot.is_whole = snapshot.is_whole, True
        if is_whole:
            others = binding.layout.names_stepped_elsewhere
            self._peer_checkpoints.stop(lambda: self._collect(binding), stepped_by_others=others)
        else:
            self._peer_checkpoints.drop_live_state(self.step, binding.collected_names)

    def num_moved(self) -> int:
        filling, binding = self._filling, self._binding
        memory = filling.shared_memory if filling is not None else None
        moved = self._peer_checkpoints.num_moved + (
            memory.num_barriers if memory is not None else 0
        )
        return moved + (binding.layout.num_moved if binding is not None else 0)

    def _hand_over(self, leaving: Collection[int]) -> None:
        if self._binding is not None:
            self._peer_checkpoints.hand_over(self._collect(self._binding), leaving=leaving)

    # --- steps ---

    @property
    def local_model(self) -> nn.Module:
        return self._layout().plain

    @property
    def module(self) -> nn.Module:
        return self._module_of("")

    def _module_of(self, name: str) -> nn.Module:
        if is_routing_compiled() and not self.compiles:
            raise not_compiled(self.name, name)
        layout = self._layout()
        if isinstance(layout, SeveralLayouts):
            layout = layout.layouts[name]
        if not self._transaction.in_step or not torch.is_grad_enabled():
            return layout.plain
        self._begin()
        votes = self._transaction.votes
        votes.exchange_parts()
        if layout.communicates_in_forward(is_first_step=votes.is_first_step):
            votes.announce()
        return layout.module

    def _layout(self) -> Layout:
        if self._binding is None:
            raise InvalidSpec(
                f"a model of strategy {self.name} has no weights outside a generation",
                expected="forward passes on all members, from the first batch on",
            )
        return self._binding.layout

    def begin_step(self) -> None:
        layout, binding = self._layout(), self._binding
        assert binding is not None, "it holds the layout"
        binding.gradients.forget()
        layout.step = self.step
        layout.looks_for_faults = self._registered.scaler is None
        self._open_step(layout.open(), binding.held_parameters)
        self._begun = self._reduced = False

    def _begin(self) -> None:
        """Begin the layout's step, at the first forward pass: errors of the group are raised
        there."""
        if self._begun:
            return
        self._begun, layout = True, self._layout()
        if self._copy_due and self._binding is not None and not self.position.inspection.refusal:
            self._copy_due = False
            self._peer_checkpoints.offer(self._collect_as_begun(self._binding))
        layout.begin()

    def _reduce_in_backward(self, reduces: bool) -> None:
        self._layout().reduce_in_backward(reduces)

    def backward(self, loss: Tensor, weight: float) -> None:
        layout = self._layout()
        waits = not is_on_host(loss)
        if layout.looks_for_faults and not waits:
            check_loss(loss, self.step)
        with self._transaction.weighted_backward():
            self._activate(self._transaction.chosen)
            if layout.looks_for_faults and waits:
                layout.note_loss(loss)
            layout.backward(loss, weight)

    def _activate(self, optimizers: frozenset[str]) -> Layout:
        """Activate these optimizers' models, if there are several; return the layout."""
        layout = self._layout()
        if isinstance(layout, SeveralLayouts):
            layout.active = self._transaction.models(optimizers)
        return layout

    def update(self) -> None:
        if self._transaction.training is None:
            super().update()
        optimizers = self._transaction.take("session.update")
        layout = self._gradients_of(optimizers)
        self._transaction.agree_on(OptimizerAction.UPDATE)
        self._generation_group.check()
        stepped = self._transaction.models(optimizers)
        held = [t for name, t in layout.held.items() if name.partition(".")[0] in stepped]
        with self._transaction.updating(self._optimizer, held):
            local_step.step(self._optimizer)
            layout.updated()

    def _gradients_of(self, optimizers: frozenset[str]) -> SeveralLayouts:
        """Reduce and check the gradients that these optimizers use; return the layouts. Raises
        InvalidSpec if some gradients are not reduced, and what `Layout.check` raises."""
        layout = self._activate(optimizers)
        assert isinstance(layout, SeveralLayouts), "only several optimizers are updated early"
        layout.reduce()
        if not layout.synchronised():
            raise not_reduced(self.step, layout.unreached, type(self).__name__)
        layout.check()
        return layout

    def backward_by_weight(self, loss: Tensor, weight: float) -> None:
        self._refuse_weights()
        self.backward(loss, self._transaction.add_weight(weight))

    def _refuse_weights(self) -> None:
        """Raise InvalidSpec if losses cannot have weights of their own."""

    def _scale_gradients(self, factor: float) -> None:
        scale(self._layout(), factor)

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        self._begin()
        layout = self._layout()

        def noted(outputs: Any, expected: Any) -> Tensor:
            loss = loss_function(outputs, expected)
            if layout.looks_for_faults and not is_on_host(loss):
                layout.note_loss(loss)
            return loss

        given = loss_function if layout.shares_loss else noted
        with self._transaction.weighted_backward():
            loss = layout.forward_backward(inputs, targets, given, weight)
        if layout.looks_for_faults and (layout.shares_loss or is_on_host(loss)):
            check_loss(loss, self.step)
        return loss

    def _reduce(self) -> Layout:
        layout = self._activate(self._transaction.due)
        if not self._reduced:
            check = layout.non_finite_check
            if check is None:
                self._transaction.votes.propose(idle=layout.idle())
            else:
                # Vote first: a reduction waits for all members, and some may never reach it.
                self._settle_with(check, layout)
            with self._generation_group.judging():
                layout.reduce()
            self._reduced = True
        return layout

    def _settle_with(self, check: NonFiniteCheck, layout: Layout) -> None:
        """Settle as `_settle`. If possible, a member's vote also says if its gradients are
        finite."""
        votes = self._transaction.votes
        may_vote = layout.faults_are_own and layout.looks_for_faults
        # Not possible if the gradients of weighted losses still have to be scaled.
        if not may_vote or votes.weights.are_own:
            self._settle()
            return
        check.scan(layout.parameters)
        votes.propose(is_faulty=check.is_own, idle=layout.idle())
        self._settle()
        check.note_faults(votes.faults)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._transaction.training is not None:
            return self._clip_chosen(max_norm)
        layout = self._reduce()
        self._settle()
        return clip(layout, max_norm)

    def _clip_chosen(self, max_norm: float) -> Tensor:
        """Clip the gradients of the chosen optimizers' parameters, if there are several."""
        layout = self._gradients_of(self._transaction.take("session.clip_grad_norm"))
        self._transaction.agree_on(OptimizerAction.CLIP)
        own = {id(each) for each in self._transaction.parameters(self._optimizer)}
        among = [name for name, each in layout.parameters.items() if id(each) in own]
        return clip(layout, max_norm, among)

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        binding = self._binding
        if binding is None:
            raise GenerationBroken(f"step {self.step} was begun outside any generation")
        self._transaction.check_weighted()
        self._transaction.snapshot.check_buffers(self.step)
        layout = self._reduce()
        if not layout.synchronised():
            raise not_reduced(self.step, layout.unreached, type(self).__name__)
        overflowed = False
        if layout.looks_for_faults:
            with self._generation_group.judging():
                layout.check()
        elif self._process_group is not None:
            overflowed = reduce_found_inf(layout.overflowed(), self._process_group, self._device)
        self._settle()
        self._generation_group.check()
        with self._transaction.committing(self._optimizer, overflowed=overflowed):
            if not overflowed:
                local_step.step(self._optimizer)
            layout.stepped()
            # Check again, for the layout's own messages: half an update is no valid state.
            self._generation_group.check()
        self.position.inspection.inspect(self._optimizer, lambda: binding.collect(self.step))
        if self.step == 1 or self._checkpoints.is_due(self.step):
            self.position.inspection.raise_on_all(self.group)
        # The copy is made in the next step, so that the report of this step does not wait for it.
        self._copy_due = self._peer_checkpoints.is_due(self.step)
        self._checkpoint()
        acknowledged()

    def _write_checkpoint(self) -> None:
        binding, is_first = self._binding, self.group.rank() == 0
        assert binding is not None, "after a step"

        def writes(name: str) -> bool:
            return is_first if name.startswith(REGISTERED) else binding.writes(name)

        self._checkpoints.write(self.step, lambda: self._collect(binding), writes)

    # --- state ---

    def finish_passes(self) -> None:
        self._layout().finish_passes()

    def data_share(self, generation: Generation) -> tuple[int, int]:
        layout = self._layout()
        return layout.data_index, layout.data_count

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on the host, the same on every member. Collective."""
        binding, group = self._binding, self.group
        assert binding is not None, "there is a generation"
        self._transaction.snapshot.settle_buffers()
        return binding.whole_model(self.step, group)

    def weights(self) -> HeldWeights:
        binding, _ = self._binding, self.group
        assert binding is not None, "there is a generation"
        self._transaction.snapshot.settle_buffers()
        return sharded_weights(
            binding.layout,
            step=self.step,
            tied=self._meta_model.tied,
            without_elements=binding.without_elements,
        )

    def close(self) -> None:
        # No later generation needs the state that is held here.
        self._transaction.snapshot.is_whole = False
        with ExitStack() as releases:
            releases.callback(self._generation_group.kept_regions.clear)
            releases.callback(self._peer_checkpoints.close)
            releases.callback(super().close)
