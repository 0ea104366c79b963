"""Registered objects of a script, and their state as of the last committed step."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.state.optimizer_state import set_settings
from shoal.state.plain_values import join_state, split_state
from shoal.state.shards import REGISTERED, Json, StateShard, TensorShard, outline_of
from shoal.torch_private.amp import scaler_state
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

MAX_OBJECTS = 32
MAX_TENSOR_BYTES = 4 * 1024**3
"""Limit for all objects together: their state is copied at each step."""
GROUPS = "param_groups"
KINDS = "registered_kinds"
_BLOCK_ELEMENTS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@runtime_checkable
class Stateful(Protocol):
    """Interface of torch's schedulers, averaged models and scalers, and of many metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from `state_dict`."""


@dataclass(frozen=True, kw_only=True)
class CapturedState:
    """The state of all registered objects at one moment."""

    values: Mapping[str, Json] = field(default_factory=dict)
    """Plain values by the object's name, and the optimizer's settings under GROUPS. They refer to
    tensors by path."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors by "<object>/<path in its state>"."""
    kinds: Mapping[str, str] = field(default_factory=dict)

    def copied(self, into: Mapping[str, Tensor] | None = None) -> "CapturedState":
        """Return a copy, in the memory of `into` if it fits."""
        return replace(
            self, tensors={k: _copy(t, (into or {}).get(k)) for k, t in self.tensors.items()}
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def enabled_scaler(registered: object) -> torch.amp.GradScaler | None:
    """Return the object if it is a GradScaler that scales; None otherwise."""
    if isinstance(registered, torch.amp.GradScaler) and registered.is_enabled():
        return registered
    return None


class RegisteredState:
    """Registered objects of one session; false while nothing is registered.

    If a step is undone, each object gets back its state from when the script asked for the step's
    batch.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._optimizer: Optimizer | None = None
        self._committed: CapturedState | None = None
        self._is_attempt = False
        """True from the start of a step to its commit: the valid state is then `_committed`."""
        self._deferred: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, registered: object) -> bool:
        return any(each is registered for each in self._objects.values())

    def add(self, name: str, registered: Stateful) -> None:
        """Register an object. After an error nothing is registered.

        Raises InvalidSpec for an invalid or used name, an object that is registered already, a
        state that cannot be sent, and beyond MAX_OBJECTS or MAX_TENSOR_BYTES. Errors of
        `state_dict()` are raised unchanged.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == GROUPS:
            raise InvalidSpec(
                "state cannot be registered under this name",
                seen=repr(name),
                expected=f"session.register(name, object), with a name of 1 to 64 letters, digits,"
                f" - and _, and not {GROUPS!r}",
            )
        if name in self._objects:
            raise InvalidSpec(
                f"{name!r} is registered already",
                seen=type(self._objects[name]).__name__,
                expected="a different name for each object",
            )
        if registered in self:
            raise InvalidSpec(f"{name!r} is registered already, under another name")
        if not isinstance(registered, Stateful) or isinstance(registered, type):
            raise InvalidSpec(
                f"{name!r} is not an object with a state",
                seen=f"a {type(registered).__name__}",
                expected="an object with state_dict() and load_state_dict(state)",
            )
        if isinstance(registered, nn.Module) and not registered.state_dict():
            raise InvalidSpec(
                f"nothing of {name!r} would be committed: its state_dict() is empty",
                seen=type(registered).__name__,
                expected="a module with parameters, or with persistent buffers",
                fix="For a metric of torchmetrics, set metric.persistent(True) and"
                " sync_on_compute=False, and update it in the same way on all members. Or use"
                " session.evaluate, which sums over members.",
            )
        if len(self._objects) == MAX_OBJECTS:
            raise InvalidSpec("too many registered objects", expected=f"at most {MAX_OBJECTS}")
        self._objects[name] = registered
        try:
            self._capture()
        except BaseException:
            del self._objects[name]
            raise

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The first enabled GradScaler among the objects, if any."""
        return next(filter(None, map(enabled_scaler, self._objects.values())), None)

    def follow(self, optimizer: Optimizer) -> None:
        """Include the settings of this optimizer's groups in the state."""
        self._optimizer = optimizer

    @property
    def description(self) -> str:
        """Names and classes of the objects; must be the same on all members."""
        kinds = (f"{name}: {type(each).__name__}" for name, each in sorted(self._objects.items()))
        return ", ".join(kinds)

    # --- steps ---

    def keep(self) -> None:
        """Copy the objects' current state as the state to restore if the next step is undone."""
        if self._objects:
            before = self._committed.tensors if self._committed is not None else {}
            self._committed = self._capture().copied(before)
        self._is_attempt = False

    def attempt(self) -> None:
        """Note that a step begins."""
        self._deferred.clear()
        self._is_attempt = True

    def defer(self, call: Callable[[], object]) -> None:
        """Defer this call until the optimizer has stepped. If the step is undone, the call is never
        made."""
        self._deferred.append(call)

    def stepped(self) -> None:
        """Make the deferred calls, once the optimizer has stepped."""
        while self._deferred:
            self._deferred.pop(0)()

    def committed(self) -> None:
        """Mark the step committed. The script's changes until the next batch belong to it."""
        self._is_attempt = False

    def undo(self) -> None:
        """Undo the step, and whatever the script changes until the next `restore`."""
        self._deferred.clear()
        self._is_attempt = True
        self.restore()

    def restore(self) -> None:
        """Restore the last committed state, unless the step is committed."""
        if self._is_attempt and self._committed is not None:
            self._load(self._committed)

    # --- from member to member, and to disk ---

    def current(self) -> CapturedState:
        """Return a copy of the last committed state."""
        return self._now().copied()

    def _now(self) -> CapturedState:
        if self._is_attempt and self._committed is not None:
            return self._committed
        return self._capture()

    def adopt(self, captured: CapturedState) -> None:
        """Load this state into the objects.

        Raises InvalidSpec if an object's state is missing or of another class, or if
        `load_state_dict` fails: then some objects may have the new state. A MemoryError or OSError
        of `load_state_dict` is raised unchanged.
        """
        missing = sorted(self._objects.keys() - captured.values.keys())
        if missing:
            raise InvalidSpec(
                "there is no state for an object that the script has registered",
                seen=f"nothing under {', '.join(map(repr, missing))}",
                expected="the state of every registered object, as of the same step",
                fix="A job cannot resume from a checkpoint that was written without the object:"
                " load the checkpoint's weights into the model before session.distribute, and"
                " write to another directory (docs/checkpoints.md).",
            )
        self._check_kinds(captured)
        self._load(captured)
        self._is_attempt = False

    def _check_kinds(self, captured: CapturedState) -> None:
        """Refuse state of another class: torch's schedulers would accept it, and start over."""
        for name, each in self._objects.items():
            kind = captured.kinds.get(name, type(each).__name__)
            if kind != type(each).__name__:
                raise InvalidSpec(
                    f"the state of {name!r} belongs to an object of another class",
                    seen=kind,
                    expected=type(each).__name__,
                    fix="Register it under another name, in a run that begins with the weights of"
                    " the checkpoint and writes to another directory (docs/checkpoints.md).",
                )
        if unregistered := sorted(captured.kinds.keys() - self._objects.keys()):
            log.warning(
                "registered_state_dropped",
                names=", ".join(unregistered),
                seen="state of objects that the script does not register, in the checkpoint",
            )

    def comparable(self, *, with_tensors: bool) -> dict[str, Json]:
        """Return the values that must be the same on all members, by name, with `_figures` of each
        tensor in its place."""
        now = self._now()
        found: dict[str, Json] = {}
        for name in self._objects:
            figures: dict[str, Json] = {}
            if with_tensors:
                own = {k: t for k, t in now.tensors.items() if k.startswith(f"{name}/")}
                figures = {k.removeprefix(f"{name}/"): _figures(t) for k, t in own.items()}
            found[name] = {"values": now.values[name], "tensors": figures}
        return found

    def _capture(self) -> CapturedState:
        values: dict[str, Json] = {}
        tensors: dict[str, Tensor] = {}
        for name, each in self._objects.items():
            self._take(name, _state_of(name, each), values, tensors)
        if self._optimizer is not None and self._objects:
            settings = [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ]
            self._take(GROUPS, settings, values, tensors)
        kinds = {name: type(each).__name__ for name, each in self._objects.items()}
        captured = CapturedState(values=values, tensors=tensors, kinds=kinds)
        if captured.num_bytes > MAX_TENSOR_BYTES:
            raise InvalidSpec(
                "the registered state is too large",
                seen=f"{captured.num_bytes:,} bytes in tensors",
                expected=f"at most {MAX_TENSOR_BYTES:,}",
            )
        self._check_shapes(captured)
        return captured

    def _take(
        self, name: str, state: Any, values: dict[str, Json], tensors: dict[str, Tensor]
    ) -> None:
        values[name], own = split_state(state, name)
        for path, tensor in own.items():
            if tensor.is_meta:
                raise InvalidSpec(
                    f"{name!r} has a tensor on the meta device",
                    seen=path,
                    expected="tensors with memory in all registered state",
                    fix="Make it from a model on the host, or after session.distribute(...).",
                )
        tensors |= {f"{name}/{path}": tensor for path, tensor in own.items()}

    def _check_shapes(self, captured: CapturedState) -> None:
        for key, before in (self._committed.tensors if self._committed is not None else {}).items():
            now = captured.tensors.get(key)
            if now is None or now.shape != before.shape or now.dtype != before.dtype:
                name, _, path = key.partition("/")
                raise InvalidSpec(
                    f"a tensor in the state of {name!r} has changed its shape or dtype, or is gone",
                    seen=f"{path}: {'nothing' if now is None else outline_of(now)}",
                    expected=outline_of(before),
                    fix="Create it with its final size, or use a list of numbers.",
                )

    def _load(self, captured: CapturedState) -> None:
        for name, each in self._objects.items():
            now = split_state(_state_of(name, each), name)[1]
            given = {
                path: tensor.to(now[path].device if path in now else "cpu", copy=True)
                for path, tensor in _of(name, captured.tensors).items()
            }
            try:
                each.load_state_dict(join_state(captured.values[name], given))
            except (MemoryError, OSError) as error:
                # The type is kept: after these errors a retry may succeed.
                error.add_note(f"It was raised by load_state_dict of the registered {name!r}.")
                raise
            except Exception as error:
                raise InvalidSpec(
                    f"{name!r} cannot load the state of an object of its class",
                    seen=f"{type(error).__name__}: {error}",
                    expected="load_state_dict(state) that accepts the result of state_dict()",
                ) from error
        if self._optimizer is not None and GROUPS in captured.values:
            settings = join_state(captured.values[GROUPS], _of(GROUPS, captured.tensors))
            set_settings(self._optimizer, settings)


def _state_of(name: str, registered: Stateful) -> dict[str, Any]:
    try:
        if isinstance(registered, torch.amp.GradScaler):
            return scaler_state(registered)
        return registered.state_dict()
    except Exception as error:
        error.add_note(f"It was raised by state_dict of the registered {name!r}.")
        raise


def with_registered(state_shard: StateShard, captured: CapturedState) -> StateShard:
    """Return the state shard with the registered state added."""
    if not captured.values:
        return state_shard
    shards = {
        REGISTERED + name: TensorShard.whole(tensor) for name, tensor in captured.tensors.items()
    }
    values = {**state_shard.values, **_values_of(captured)}
    return replace(state_shard, shards={**state_shard.shards, **shards}, values=values)


def of_shard(state_shard: StateShard) -> CapturedState:
    """Return the registered state that `with_registered` added."""
    values: Any = state_shard.values
    own = {
        name.removeprefix(REGISTERED): shard.tensor
        for name, shard in state_shard.shards.items()
        if name.startswith(REGISTERED)
    }
    return CapturedState(
        values=values.get("registered", {}), tensors=own, kinds=values.get(KINDS, {})
    )


def _values_of(captured: CapturedState) -> dict[str, Json]:
    return {"registered": dict(captured.values), KINDS: dict(captured.kinds)}


def _of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    fits = into is not None and (into.shape, into.dtype, into.device) == (
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )
    target = into if into is not None and fits else torch.empty_like(tensor)
    return target.copy_(tensor)


def _figures(tensor: Tensor) -> list[Json]:
    """Return outline, sum of magnitudes, and sums that depend on signs and on positions.

    Each sum is about as large as the sum of magnitudes, so rounding is relatively small.
    """
    # Sum in blocks: double precision takes up to eight times the tensor's memory.
    flat = tensor.detach().reshape(-1)
    size = signed = weighted = 0.0
    for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[start : start + _BLOCK_ELEMENTS]
        exact = (block.abs() if block.is_complex() else block).to("cpu", torch.float64)
        positions = torch.arange(start, start + exact.numel(), dtype=torch.float64)
        weights = positions.div_(max(flat.numel() - 1, 1)).add_(0.5)
        size += float(exact.abs().sum())
        signed += float(exact.sum())
        weighted += float(exact @ weights)
    return [outline_of(tensor), size, 2.0 * size + signed, 2.0 * size + weighted]
