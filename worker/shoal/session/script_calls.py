"""Watch on a script's calls of learning rate schedulers and averaged models in a session.

If the strategy carries registered objects, calls within the `with session.step()` block are
deferred to its end. Objects that are not registered are refused then: their counts would differ on
a joiner and after failed steps. Under other strategies calls are made at once; strategies with a
schedule option log a warning (`SchedulerWarnings`).
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from shoal.state.registered.objects import RegisteredState
from shoal.strategies.base import Strategy
from shoal.torch_private.schedulers import is_in_constructor
from shoal_proto.errors import InvalidSpec

_MARK = "_shoal_watched"


log = structlog.get_logger(__name__)


class SchedulerWatch:
    """Watch on schedulers that a script steps under a strategy that carries no registered state.

    Such a scheduler counts only its member's steps, and from 0 after a restart: a synchronous
    strategy, whose members compare their rates, refuses it; an asynchronous one warns of it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
        self._optimizers = optimizers
        self._strategy = strategy
        self._is_warned = False

    def watch(self) -> None:
        for each in self._optimizers:
            _watching[each] = self
        _watch(LRScheduler, "step", lambda scheduler, _: _optimizer_of(scheduler))

    def release(self) -> None:
        """End the watch when the session ends. May be called twice."""
        _forget(self._optimizers, self)

    def make_call(self, stateful: Any, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Make the script's call on its scheduler. Logs a warning the first time, or raises
        InvalidSpec, unless it is the strategy's own schedule."""
        strategy = self._strategy
        if strategy.synchronous:
            raise InvalidSpec(
                f"a {type(stateful).__name__} is stepped under strategy {strategy.name}",
                seen="a schedule that counts its own steps: it would count a repeated round twice,"
                " and begin at 0 on a member that joins",
                expected="a rate that follows from batch.step",
                fix="Set it before each step: group['lr'] = rate(batch.step) for each group of"
                " optimizer.param_groups.",
            )
        if stateful is not strategy.given_schedule and not self._is_warned:
            self._is_warned = True
            log.warning(
                "schedule_counts_own_steps",
                schedule=type(stateful).__name__,
                seen="a schedule that the script steps, and that counts this member's own steps",
                fix=f"Pass it as {strategy.schedule_option}, and leave out its step().",
            )
        return call()


class ScriptCalls:
    """Handles the script's calls for the optimizers and the models of one session."""

    def __init__(
        self,
        owners: Sequence[Optimizer | nn.Module],
        registered: RegisteredState,
        in_step: Callable[[], bool],
    ) -> None:
        """`in_step` returns True if a step of the session is open."""
        self._owners: Sequence[Any] = owners
        self._registered = registered
        self._in_step = in_step

    def watch(self) -> None:
        for owner in self._owners:
            _watching[owner] = self
        _watch(LRScheduler, "step", lambda scheduler, _: _optimizer_of(scheduler))
        _watch(AveragedModel, "update_parameters", _model_of_average)

    def release(self) -> None:
        """End the watch when the session ends. May be called twice."""
        _forget(self._owners, self)

    def make_call(self, stateful: Any, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Make the script's call on its object; if a step is open, after the optimizer's step.
        Raises InvalidSpec for an object that is not registered, and for an average of a model that
        is divided among members."""
        if stateful not in self._registered:
            kind = type(stateful).__name__
            raise InvalidSpec(
                f"{kind} is used in a session, and not registered with it",
                seen=f"a {kind} whose count is lost at the first loss or join",
                expected=f'session.register("a name", the {kind}) before the first batch',
            )
        if isinstance(stateful, AveragedModel):
            _check_whole(stateful, *arguments)
        if not self._in_step():
            return call()
        self._registered.defer(call)
        return None


_watching: WeakKeyDictionary[Any, ScriptCalls | SchedulerWatch] = WeakKeyDictionary()


def _forget(owners: Sequence[Any], calls: ScriptCalls | SchedulerWatch) -> None:
    for owner in owners:
        if _watching.get(owner) is calls:
            del _watching[owner]


class _Depth(threading.local):
    calls = 0


_depth = _Depth()


def _optimizer_of(scheduler: Any) -> Any:
    return None if is_in_constructor(scheduler) else getattr(scheduler, "optimizer", None)


def _model_of_average(_: Any, arguments: tuple[Any, ...]) -> Any:
    model = arguments[0] if arguments else None
    if model is None or model in _watching:
        return model
    # The script may average a part of the model, such as a backbone.
    for reference in _watching.keyrefs():
        owner = reference()
        if isinstance(owner, nn.Module) and any(part is model for part in owner.modules()):
            return owner
    return None


def _check_whole(average: AveragedModel, model: nn.Module) -> None:
    """Raise InvalidSpec if this member's model has other parameters than the average: torch pairs
    parameters by order."""
    averaged, present = _shapes(average.module), _shapes(model)
    if averaged != present:
        raise InvalidSpec(
            "an average of weights that this strategy divides among members",
            seen=f"{len(averaged)} parameters in the average, {len(present)} here"
            if len(averaged) != len(present)
            else "parameters that are sharded over the members",
            expected="a strategy that leaves parameters whole on each member: ddp or zero1",
        )


def _shapes(module: nn.Module) -> list[tuple[bool, torch.Size]]:
    return [(isinstance(each, DTensor), each.shape) for each in module.parameters()]


def _watch(root: type, method: str, owner_of: Callable[[Any, tuple[Any, ...]], Any]) -> None:
    """Wrap this method of a class and its present subclasses, once: calls on an object with a
    watched owner go to that watch."""
    kinds = [root]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        plain = vars(kind).get(method)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(kind, method, _watched(plain, owner_of))


def _watched(
    plain: Callable[..., Any], owner_of: Callable[[Any, tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            # Nested calls, of other schedulers or a base class, are part of the script's one call.
            _depth.calls += 1
            try:
                return plain(self, *args, **kwargs)
            finally:
                _depth.calls -= 1

        given = (*args, *kwargs.values())
        owner = None if _depth.calls else owner_of(self, given)
        calls = _watching.get(owner) if owner is not None else None
        return call() if calls is None else calls.make_call(self, given, call)

    setattr(watched, _MARK, True)
    return watched
