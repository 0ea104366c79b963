"""Layout of several models, each laid out by itself; a pass may train only some of them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from shoal.layouts.base import Layout, World
from shoal.model.several import SeveralModels
from shoal.state.shards import MODEL, OPTIM, Chunk, TensorShard
from shoal_proto.errors import InvalidSpec


class SeveralLayouts(Layout):
    """Layouts by the models' names; names of tensors are prefixed with their model's name."""

    def __init__(self, model: SeveralModels, layouts: Mapping[str, Layout], world: World) -> None:
        first = next(iter(layouts.values()))
        self.world = world
        self.module = model
        self.data_index, self.data_count = first.data_index, first.data_count
        self.elementwise = any(each.elementwise for each in layouts.values())
        self.layouts = layouts
        self.active: frozenset[str] = frozenset()

    @property
    def is_replicated(self) -> bool:  # type: ignore[override]
        return all(each.is_replicated for each in self.layouts.values())

    @property
    def exchanges_updates(self) -> bool:  # type: ignore[override]
        return any(each.exchanges_updates for each in self.layouts.values())

    @property
    def _active(self) -> list[Layout]:
        return [each for name, each in self.layouts.items() if name in self.active]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {
            f"{name}.{key}": parameter
            for name, each in self.layouts.items()
            for key, parameter in each.parameters.items()
        }

    @property
    def held(self) -> Mapping[str, Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, each in self.layouts.items()
            for key, tensor in each.held.items()
        }

    def shard(self, name: str, tensor: Tensor) -> TensorShard:
        model, _, own = name.partition(".")
        return self.layouts[model].shard(own, tensor)

    def chunk(self, name: str, tensor: Tensor) -> Chunk:
        model, _, own = name.partition(".")
        return self.layouts[model].chunk(own, tensor)

    def is_counted_here(self, name: str) -> bool:
        model, _, own = name.partition(".")
        return self.layouts[model].is_counted_here(own)

    def replicas(self, name: str) -> Sequence[int]:
        model, _, own = name.partition(".")
        return self.layouts[model].replicas(own)

    def is_lost_with_rank(self, name: str) -> bool:
        kind = MODEL if name.startswith(MODEL) else OPTIM
        model, _, own = name.removeprefix(kind).partition(".")
        return self.layouts[model].is_lost_with_rank(kind + own)

    def watch(self, ours: Callable[[], bool]) -> None:
        for each in self.layouts.values():
            each.watch(ours)

    # --- a step ---

    def open(self) -> nn.Module:
        for each in self.layouts.values():
            each.open()
        return self.plain

    def begin(self) -> None:
        for each in self.layouts.values():
            each.step, each.looks_for_faults = self.step, self.looks_for_faults
            each.begin()

    def note_loss(self, loss: Tensor) -> None:
        for each in self._active:
            each.note_loss(loss)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add gradients to the active models only. Raises InvalidSpec if no model is active."""
        if not self._active:
            raise InvalidSpec(
                "a backward pass that trains no model",
                seen="no active model",
                expected=f"a pass for at least one of {', '.join(self.layouts)}",
            )
        scaled = loss if weight == 1.0 else loss * weight
        for each in self._active:
            each.begin_pass(scaled)
        leaves = [each.leaves for each in self._active]
        if all(each is not None for each in leaves):
            inputs = [leaf for each in leaves if each is not None for leaf in each]
            scaled.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        else:
            with self._set_aside():
                scaled.backward()  # type: ignore[no-untyped-call]
        for each in self._active:
            each.end_pass()

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        others = [each for name, each in self.layouts.items() if name not in self.active]
        kept = [(p, p.grad) for each in others for p in each.parameters.values()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def finish_passes(self) -> None:
        for each in self.layouts.values():
            each.finish_passes()

    def communicates_in_forward(self, *, is_first_step: bool) -> bool:
        """Raise InvalidSpec: several models have no common forward pass."""
        raise InvalidSpec("several models have no forward pass in common")

    def reduce(self) -> None:
        for each in self._active:
            each.reduce()
        self.unreached = [
            f"{name}.{key}"
            for name, each in self.layouts.items()
            if name in self.active
            for key in each.unreached
        ]

    def check(self) -> None:
        for each in self._active:
            each.check()

    def overflowed(self) -> bool:
        # Call `overflowed` of all layouts, even if an earlier one has overflowed.
        found = [each.overflowed() for each in self._active]
        return any(found)

    def share_buffers(self) -> None:
        for each in self.layouts.values():
            each.share_buffers()

    def updated(self) -> None:
        """Call `stepped` of the active models' layouts, after an update within a step."""
        for each in self._active:
            each.stepped()

    def stepped(self) -> None:
        for each in self.layouts.values():
            each.stepped()

    def names_without_gradient(self) -> Sequence[str]:
        return [
            f"{name}.{each}"
            for name, own in self.layouts.items()
            for each in own.names_without_gradient()
        ]

    @property
    def names_stepped_elsewhere(self) -> Collection[str]:
        layouts = self.layouts.items()
        return [f"{name}.{each}" for name, own in layouts for each in own.names_stepped_elsewhere]

    def synchronised(self) -> bool:
        return all(each.synchronised() for each in self._active)

    def release(self) -> None:
        for each in self.layouts.values():
            each.release()

    def cut(self, reason: str) -> None:
        for each in self.layouts.values():
            each.cut(reason)

    @property
    def num_moved(self) -> int:
        return sum(each.num_moved for each in self.layouts.values())

    def groups(self) -> Iterator[dist.ProcessGroup]:
        for each in self.layouts.values():
            yield from each.groups()
