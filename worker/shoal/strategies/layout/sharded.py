"""Base of the strategies whose members hold shards of the state: ZeRO, FSDP, tensor, pipeline."""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.optimizer_binding import MetaModel, OptimizerBinding
from shoal.membership.generation import Generation, receivers_of
from shoal.model.module_proxy import copy_modes, retarget
from shoal.model.script_attributes import ScriptAttributes
from shoal.model.script_hooks import ScriptHooks
from shoal.model.several import models_of
from shoal.state.peer_checkpoints import PeerCheckpoints
from shoal.state.registered.objects import of_shard, with_registered
from shoal.state.resharding import reshard
from shoal.state.shards import MODEL, REGISTERED, Chunk, StateShard
from shoal.strategies.layout.strategy import LayoutStrategy
from shoal.strategies.synchronous.generation_group import check_same_step
from shoal.torch_private.dtensor import clear_sharding_cache
from shoal.weights.pieces import HeldWeights, sharded_weights
from shoal_proto.errors import InvalidSpec, StateLost
from shoal_proto.v1 import membership_pb2 as pb


class ShardedStrategy(LayoutStrategy):
    """A strategy whose members hold shards of the state.

    The state of a lost member comes from copies that its peers keep in host memory, each on
    `copies` other members. `copy_every_steps`: number of steps between copies; by default so many
    that copying takes at most a twentieth of the time, but at most 10. After a loss all members
    roll back by at most twice this number. With `copies=0`, training survives a loss only with a
    checkpoint.
    """

    state_is_spread = True
    initialises = True

    def __init__(self, *, copies: int = 1, copy_every_steps: int | None = None) -> None:
        super().__init__()
        self._peer_checkpoints = PeerCheckpoints(copies=copies, every_steps=copy_every_steps)
        self._binding: OptimizerBinding | None = None
        self._filling: Layout | None = None
        self._attributes, self._hooks = ScriptAttributes(), ScriptHooks()
        self._copy_due = False
        self._refusal_due = False
        """True if the members still have to exchange refusals of the latest step's state."""

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        """Raise InvalidSpec if the model cannot be laid out for this size. Quick; thread-safe."""

    def refuses(self, world_size: int) -> str:
        try:
            self.try_lay_out(self._meta_model.model, world_size)
        except InvalidSpec as error:
            return str(error)
        return ""

    # --- before any generation ---

    def _keep_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._meta_model = MetaModel(model, optimizer)

    # --- generations ---

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        world = self._world(generation, group)
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
        self._hooks.carry(self._proxy, binding.layout.plain)
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
        self._filling = layout = super()._lay_out_all(model, world)
        if self._generation_group.has_cut(world.generation):
            layout.cut(f"generation {world.generation} is over")
        return layout

    def _collect(self, binding: OptimizerBinding) -> StateShard:
        self._transaction.snapshot.settle_buffers()
        own = with_registered(binding.collect(self.step), self._registered.current())
        return self._checkpoints.samples.add_position(own)

    def _collect_as_begun(self, binding: OptimizerBinding) -> StateShard:
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
        """Return the newest state that the members hold together, or else the newest checkpoint's.

        A checkpoint also replaces a state of step 0.
        """

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
        self._binding, self._filling = None, None
        self._copy_due = self._refusal_due = False
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

    def drop_gradients(self, optimizer: Optimizer) -> None:
        if self._binding is not None:
            self._binding.drop_gradients(optimizer)

    def _hand_over(self, leaving: Collection[int]) -> None:
        if self._binding is not None:
            self._peer_checkpoints.hand_over(self._collect(self._binding), leaving=leaving)

    # --- steps ---

    def _before_first_pass(self) -> None:
        if self._copy_due and self._binding is not None and not self.position.inspection.refusal:
            self._copy_due = False
            self._peer_checkpoints.offer(self._collect_as_begun(self._binding))

    def _check_buffers(self) -> None:
        self._transaction.snapshot.check_buffers(self.step)

    def _committed(self) -> None:
        binding = self._binding
        assert binding is not None, "after a step"
        self.position.inspection.inspect(self._optimizer, lambda: binding.collect(self.step))
        # Exchanged after the step's block: a member lost meanwhile must not fail a committed step.
        self._refusal_due = self.step == 1 or self._checkpoints.is_due(self.step)
        # The copy is made in the next step, so that the end of this step does not wait for it.
        self._copy_due = self._peer_checkpoints.is_due(self.step)

    def _raise_refusals(self) -> None:
        due, self._refusal_due = self._refusal_due, False
        if due:
            self.position.inspection.raise_on_all(self.group)

    def _write_checkpoint(self) -> None:
        binding, is_first = self._binding, self.group.rank() == 0
        assert binding is not None, "after a step"

        def writes(name: str) -> bool:
            return is_first if name.startswith(REGISTERED) else binding.writes(name)

        self._checkpoints.write(self.step, lambda: self._collect(binding), writes)

    # --- state ---

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
