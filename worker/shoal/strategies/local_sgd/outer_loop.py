"""The end of a round in which each member trained its own copy of the model.

The members' changes since the start of the round are averaged, and an outer step applies the mean
to the parameters from that start.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.backends.abortable.waiter import AbortableWaiter
from shoal.compression.base import Compressor, PackedTensors
from shoal.compression.wire import Traffic, Wire
from shoal.model.gradients import are_finite, is_finite
from shoal.state.host_copies import as_bytes
from shoal.state.optimizer_state import SLOTS
from shoal.state.replicated import ReplicatedState
from shoal.state.shards import MODEL, OPTIM, TRANSIENT, StateShard, TensorShard
from shoal.strategies.outer_step import OuterStep
from shoal_proto.errors import InternalError, NonFiniteGradient

BUCKET_BYTES = 32 * 1024 * 1024
_VELOCITY = "/outer_velocity"


class OuterLoop:
    """A member's side of its rounds, and the state agreed on at the end of the last round.

    Changes are computed relative to that state, a broken round is rolled back to it, and a joining
    member receives it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        outer: OuterStep,
        compressor: Compressor | None,
    ) -> None:
        self.waiter = AbortableWaiter()
        self.state = ReplicatedState(model, optimizer)
        self.traffic = Traffic()
        self._model, self._optimizer, self._outer = model, optimizer, outer
        self._compressor = compressor
        self._agreed: StateShard | None = None
        self._velocity: dict[str, Tensor] = {}
        self._set_aside: StateShard | None = None

    # --- the state agreed on ---

    @property
    def has_agreed(self) -> bool:
        return self._agreed is not None

    @property
    def agreed(self) -> StateShard:
        """The last state agreed on. Raises InternalError if there is none.

        The optimizer state in it is each member's own.
        """
        if self._agreed is None:
            raise InternalError("no state was agreed on yet", expected="a generation entered")
        return self._agreed

    def agree(self, step: int) -> None:
        """Copy this member's present state over the last state agreed on."""
        self._agreed = self.state.capture(step, self._agreed)

    def roll_back(self) -> None:
        """Roll back to the last state agreed on."""
        self.state.restore(self.agreed)

    def save_optimizer_state(self, step: int) -> None:
        """Keep this member's own optimizer state at the end of a round, in host memory.

        If the round ends on another member but breaks here, `take` restores this state with that
        member's weights. Valid until the next `regroup`.
        """
        now = self.state.collect(step)
        own = {name: shard for name, shard in now.shards.items() if name.startswith(OPTIM)}
        self._set_aside = replace(now, shards=own).copied()

    def regroup(self) -> None:
        """Discard the saved optimizer state, and the compressor's state of the group."""
        self._set_aside = None
        if self._compressor is not None:
            self._compressor.regroup()

    def outgoing(self) -> StateShard:
        """Return the state for members that lack it, not copied; valid until a round ends."""
        # The present parameter groups: a schedule may have changed them since the round ended.
        groups = self.state.collect(self.agreed.step).values["groups"]
        values = {**self.agreed.values, "groups": groups}
        return self._with_velocity(replace(self.agreed, values=values))

    def take(self, given: StateShard) -> None:
        """Restore another member's `outgoing` state, with the optimizer state saved at the same
        step.

        Raises ShapeMismatch or DtypeMismatch if the state does not fit.
        """
        kept = self._set_aside
        if kept is not None and kept.step == given.step:
            others = {
                name: shard
                for name, shard in given.shards.items()
                if not name.startswith(OPTIM) or name.endswith(_VELOCITY)
            }
            values = {**given.values, SLOTS: kept.values.get(SLOTS)}
            given = replace(given, shards={**others, **kept.shards}, values=values)
        self.adopt(given)

    def state_shard(self) -> StateShard:
        """Return the state just agreed on, for a checkpoint; not copied."""
        return self._with_velocity(self.state.state_shard(self.agreed.step))

    def _with_velocity(self, state_shard: StateShard) -> StateShard:
        velocity = {}
        for path, tensor in self._velocity.items():
            shaped = tensor.view_as(_real(self.agreed.shards[path].tensor))
            velocity[_velocity_path(path)] = TensorShard.whole(shaped)
        return replace(state_shard, shards={**state_shard.shards, **velocity})

    def adopt(self, state_shard: StateShard) -> None:
        """Restore a whole state shard, also one that another strategy wrote, and agree on it.

        Raises ShapeMismatch or DtypeMismatch if it does not fit. After an error the state last
        agreed on is restored, if there is one.
        """
        own = {n: shard for n, shard in state_shard.shards.items() if not n.endswith(_VELOCITY)}
        velocity = {
            path: state_shard.shards[_velocity_path(path)]
            .tensor.reshape(-1)
            .to(parameter.device, copy=True)
            for path, parameter in self._parameters().items()
            if _velocity_path(path) in state_shard.shards
        }
        try:
            self.state.restore(replace(state_shard, shards=own))
        except Exception:
            if self._agreed is not None:
                self.roll_back()
            raise
        self.agree(state_shard.step)
        self._velocity = velocity

    # --- the end of a round ---

    @torch.no_grad()
    def synchronise(
        self,
        step: int,
        weight: float,
        group: dist.ProcessGroup,
        check: Callable[[], None],
    ) -> None:
        """End a round at `step`; all members have the same model afterwards. Collective.

        `weight`: this member's share of the mean, times the number of members. `check` raises
        GenerationBroken if a collective may be incomplete. After a failure the caller can roll
        back. Raises NonFiniteGradient on the member at fault, or on all if only the sum is not
        finite.
        """
        if self._compressor is not None:
            # The compressor keeps the residual of the last round only if that round was agreed on.
            self._compressor.begin(self.agreed.step)
        wire = Wire(group, self.traffic)
        parameters = self._parameters()
        # Parameters that are not in the optimizer get no outer step either.
        others = {**self._buffers(), **self._written(parameters, group)}
        means = {
            **self._means_of(self._changes(parameters, step, weight), wire, self._compressor),
            **self._means_of(self._changes(others, step, weight), wire, None),
        }
        self._share_counters(group)
        # Agree on nothing before this: an incomplete mean would make this member differ for good,
        # as members that have agreed on the same step exchange no state.
        check()
        _check_finite(means, step, "the mean of all members' changes")
        velocity = self._apply(parameters, others, means)
        self.traffic.end_step()
        self.traffic.begin_step()
        self.agree(step)
        # Advanced last: if this member fails before, it rolls back, and the round is repeated.
        self._velocity |= velocity

    def _parameters(self) -> dict[str, Tensor]:
        stepped = {p for group in self._optimizer.param_groups for p in group["params"]}
        named = self._model.named_parameters()
        return {MODEL + name: p.detach() for name, p in named if p in stepped}

    def _buffers(self) -> dict[str, Tensor]:
        named = self.state.buffers()
        return {name: buffer for name, buffer in named.items() if has_mean(buffer)}

    def _written(
        self, stepped: Mapping[str, Tensor], group: dist.ProcessGroup
    ) -> dict[str, Tensor]:
        """Return parameters outside the optimizer that the script wrote to on any member.

        Collective if any parameter is outside the optimizer.
        """
        named = ((MODEL + name, p.detach()) for name, p in self._model.named_parameters())
        others = {name: p for name, p in named if name not in stepped and has_mean(p)}
        if not others:
            return {}
        # Most are frozen, and not sent. Bytes are compared, because a NaN differs from itself.
        flags = torch.tensor(
            [not as_bytes(p).equal(as_bytes(self._before(name))) for name, p in others.items()]
        )
        written = flags.to(torch.uint8)
        self.waiter.wait(dist.all_reduce(written, op=dist.ReduceOp.MAX, group=group, async_op=True))
        return {
            name: p for (name, p), one in zip(others.items(), written.tolist(), strict=True) if one
        }

    def _share_counters(self, group: dist.ProcessGroup) -> None:
        """Broadcast integer buffers, which have no mean, from rank 0: its shares of the batches are
        never smaller than those of another rank."""
        for buffer in self._model.buffers():
            if not has_mean(buffer):
                self.waiter.wait(
                    dist.broadcast(buffer.detach(), group=group, group_src=0, async_op=True)
                )

    def _changes(
        self, tensors: Mapping[str, Tensor], step: int, weight: float
    ) -> Iterator[PackedTensors]:
        for names in buckets(tensors):
            changes = [_change(tensors[name], self._before(name)) * weight for name in names]
            _check_finite(dict(zip(names, changes, strict=True)), step, "this member's own change")
            flat = torch.cat([change.reshape(-1) for change in changes])
            yield PackedTensors(flat, names, [change.shape for change in changes])

    def _means_of(
        self, changes: Iterator[PackedTensors], wire: Wire, compressor: Compressor | None
    ) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for packed in changes:
            self._average(packed, wire, compressor)
            means |= {name: packed.flat[span] for name, span in packed.slots()}
        return means

    def _average(self, packed: PackedTensors, wire: Wire, compressor: Compressor | None) -> None:
        if compressor is not None:
            for work in compressor.averaging(packed, wire):
                self.waiter.wait(work)
            return
        wire.traffic.count_plain(packed.flat, wire.world_size)
        packed.flat.div_(wire.world_size)
        self.waiter.wait(wire.all_reduce(packed.flat))

    def _apply(
        self,
        parameters: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        means: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Move the model by the mean changes; return the new velocity. The changes of `parameters`
        are removed from `means`.
        """
        velocity = {}
        for name, parameter in parameters.items():
            # Removed: the new velocity needs as much memory, and the old one is kept meanwhile.
            change, advanced = self._outer.change(means.pop(name), self._velocity.get(name))
            if advanced is not None:
                velocity[name] = advanced
            _move(parameter, self._before(name), change)
        for name, other in others.items():
            _move(other, self._before(name), means[name])
        return velocity

    def _before(self, name: str) -> Tensor:
        return self.agreed.shards[name].tensor


def _velocity_path(path: str) -> str:
    return f"{OPTIM}{path.removeprefix(MODEL)}{_VELOCITY}"


def has_mean(tensor: Tensor) -> bool:
    """True if tensors of this dtype can be averaged: integers cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def summing_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which changes are summed: half precision would lose small ones."""
    doubles = (torch.float64, torch.complex128)
    return torch.float64 if tensor.dtype in doubles else torch.float32


def _change(now: Tensor, before: Tensor) -> Tensor:
    wide = summing_dtype(now)
    change = _real(now).to(wide) - _real(before).to(wide)
    # Equal infinities, as in a mask, have not changed: their difference would be NaN.
    return change.masked_fill_(_real(now) == _real(before), 0.0)


def _move(tensor: Tensor, before: Tensor, change: Tensor) -> None:
    own = _real(tensor)
    own.copy_(_real(before).to(change.dtype) + change.view_as(own))


def buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield runs of names, in order.

    The tensors of a run are on one device, are summed in one dtype, and have at most `BUCKET_BYTES`
    together, unless the run is a single tensor.
    """
    run: list[str] = []
    size, kind = 0, None
    for name, tensor in tensors.items():
        wide = summing_dtype(tensor)
        num_bytes = _real(tensor).numel() * wide.itemsize
        if run and ((tensor.device, wide) != kind or size + num_bytes > BUCKET_BYTES):
            yield run
            run, size = [], 0
        kind = (tensor.device, wide)
        run.append(name)
        size += num_bytes
    if run:
        yield run


def _check_finite(changes: Mapping[str, Tensor], step: int, what: str) -> None:
    if not are_finite(list(changes.values())):
        for name, change in changes.items():
            if not is_finite(change):
                raise _not_finite(name, step, what)


def _not_finite(name: str, step: int, what: str) -> NonFiniteGradient:
    own = name.removeprefix(MODEL).removeprefix(TRANSIENT)
    return NonFiniteGradient(
        f"{own} is not finite at the end of the round, at step {step}",
        seen=f"NaN or Inf in {what}",
        expected="finite numbers",
        fix="Lower the learning rate, clip gradients, or look at the samples.",
        details={"parameter": own, "step": str(step)},
    )
