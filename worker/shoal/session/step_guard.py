"""Guard against loops for plain torch that do the session's work in a step.

The guard refuses such calls, as no error would show that

- a step of the optimizer applies every gradient twice;
- a scaler that is not registered leaves the gradients scaled;
- gradients dropped after the backward pass are missing in the session's step;
- parameters added to the optimizer are missing on members that join later.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.gradients import scaled_by_frequency, scaled_down
from shoal.model.module_proxy import ModuleProxy
from shoal.model.other_parameters import OtherParameters, References, nodes_of
from shoal.model.script_attributes import ScriptModes
from shoal.model.trained_parameters import TRAINED_LATER, TrainedParameters, are_same
from shoal.session.micro_batches import MicroBatches
from shoal.state.registered.objects import RegisteredState
from shoal.step_context import current, set_current
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.modules import watch_wrapping
from shoal.torch_private.tensors import (
    divides_by_frequency,
    pytree,
    watch_clipping,
    watch_scaling_down,
)
from shoal_proto.errors import InvalidSpec

EARLY_STEPS = 10
"""Number of a member's first steps in which its losses are checked to be means."""
_MARK = "_shoal_watched"
_MADE_MEANS = (
    "Code of your own that reads or changes gradients goes after"
    " session.clip_grad_norm(math.inf), which makes them those of the mean and clips nothing."
    " Under zero1, gradients of parameters that another member steps are None from then on."
)


class _Within:
    """Calls `set_active` with True and False around a block, and `after` if the block raised
    nothing. A class, as a context made of a generator takes ten times as long."""

    def __init__(
        self, set_active: Callable[[bool], None], after: Callable[[], None] = lambda: None
    ) -> None:
        self._set_active, self._after = set_active, after

    def __enter__(self) -> None:
        self._set_active(True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._set_active(False)
        if error is None:
            self._after()


class StepGuard:
    """Watches the optimizers and losses of one session."""

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        registered: RegisteredState,
        trained: TrainedParameters,
        strategy: Strategy,
        given: References,
    ) -> None:
        """`given`: the parameters of the script's model, which the strategy may have replaced."""
        self._strategy = strategy
        self._clips = False
        self._trained = trained
        self._registered = registered
        self._is_scaled = False
        self._commits = False
        self._computes = False
        self._first_step: int | None = None
        """Number of committed steps before this member's first step."""
        self._last_checked = 0
        """Number of committed steps before the last step with checks of the losses' graphs."""
        self._group_parameters: list[list[Tensor]] = []
        self._modules: list[nn.Module] = []
        self.modes = ScriptModes()
        self._emptied: list[tuple[Optimizer, bool]] = []
        """Optimizers of which the script has dropped all gradients in this step, each with True if
        they were set to None, False if to zeros."""
        self._optimizers = list(optimizers)
        self._others = OtherParameters(
            trained.parameters,
            given,
            self._optimizers,
            commits=lambda: self._commits,
            begins=self._check_next_step,
        )
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        for each in self._optimizers:
            vars(each)["add_param_group"] = self._refuse_group
        _watch_scalers()
        _watch_zeroing()
        watch_clipping(_look_at_clipping)
        watch_scaling_down(_look_at_scaling_down)
        watch_wrapping(_look_at_wrapping)

    def note_generation(self) -> None:
        """Note the model's parameters in a new generation, whose first losses are checked again."""
        former = self._trained.recorded
        self._trained.record_parameters()
        self._others.note_former(former)
        self._last_checked = max(self._last_checked, self._step())

    def check(self) -> None:
        """Raise InvalidSpec if the next step would train other parameters than the last step."""
        step = self._step()
        if self._first_step is None:
            self._first_step = self._last_checked = step
        self._check_groups(self._trained.check(step))

    def _check_groups(self, modules: list[nn.Module]) -> None:
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        if modules is not self._modules:
            self._group_parameters, self._modules = list(map(list, groups)), modules
            self.modes.watch_models(modules)
        elif len(groups) != len(self._group_parameters) or not all(
            map(are_same, groups, self._group_parameters)
        ):
            raise self._refusal("other parameters in param_groups")

    def open(self) -> None:
        """Note that a step of the session begins."""
        self._emptied.clear()
        self.modes.note()

    def release(self) -> None:
        """Remove the guard's hooks when the session ends. May be called twice."""
        self._others.release()
        for hook in self._hooks:
            hook.remove()
        for each in self._optimizers:
            vars(each).pop("add_param_group", None)

    def committing(self) -> AbstractContextManager[None]:
        """Return a context in which the session may step the optimizer."""
        return _Within(self._set_commits)

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the session computes gradients. Raises InvalidSpec at its end
        if a registered scaler did not scale the loss."""
        return _Within(self._set_computes, self._check_scaled)

    def check_loss_graph(self, loss: Tensor) -> None:
        """Check the graph of a loss before its backward pass: in the first step of each generation,
        and in the step after the first one of each optimizer that was not distributed. Raises
        InvalidSpec for functions that train differently on several members."""
        if self._step() <= self._last_checked:
            self._others.note_loss(loss)
            strategy = self._strategy
            shares_passes = strategy.synchronous and strategy.passes_meet
            if shares_passes and any(map(divides_by_frequency, nodes_of(loss))):
                raise scaled_by_frequency(strategy.name, "an embedding function")

    def _check_next_step(self) -> None:
        self._last_checked = self._step() + 1

    @property
    def is_early(self) -> bool:
        """True in the member's first EARLY_STEPS steps."""
        return self._first_step is None or self._step() < self._first_step + EARLY_STEPS

    def _set_commits(self, commits: bool) -> None:
        self._commits = commits
        set_current(replace(current(), committing=self if commits else None))

    def _set_clips(self, clips: bool) -> None:
        self._clips = clips

    def _set_computes(self, computes: bool) -> None:
        self._computes = computes
        if computes:
            self._is_scaled = False
            self._emptied = [(each, to_none) for each, to_none in self._emptied if to_none]

    def _check_scaled(self) -> None:
        if self._registered.scaler is not None and not self._is_scaled:
            raise InvalidSpec(
                f"a loss that the registered GradScaler did not scale, in step {self._step()}",
                seen="session.backward(loss)",
                expected="session.backward(scaler.scale(loss)): the session unscales the gradients",
            )

    def note_zero_grad(self, owner: Optimizer | nn.Module, *, to_none: bool) -> None:
        """Note that the script drops the gradients of the owner's parameters. Raises InvalidSpec
        between two parts of a batch: members have other samples in each part."""
        if self._commits or self._computes:
            return
        is_ours = isinstance(owner, Optimizer) and any(each is owner for each in self._optimizers)
        parameters = list(
            _parameters_of(owner) if isinstance(owner, Optimizer) else owner.parameters()
        )
        parts = current().parts
        if isinstance(parts, MicroBatches) and (is_ours or self._trained.has_any(parameters)):
            parts.check_dropping()
        if is_ours and isinstance(owner, Optimizer):
            self._strategy.drop_gradients(owner)
        dropped = {id(each) for each in parameters}
        for optimizer in self._optimizers:
            held = {id(each) for each in _with_gradient(optimizer)}
            if held and held <= dropped:
                self._emptied.append((optimizer, to_none))

    def check_gradients(self) -> None:
        """Raise InvalidSpec if the script has dropped all gradients of an optimizer, and no later
        pass computed any."""
        for optimizer, to_none in self._emptied:
            if not to_none or next(iter(_with_gradient(optimizer)), None) is None:
                raise InvalidSpec(
                    f"the script dropped the gradients of step {self._step()} before the optimizer"
                    " applied them",
                    seen="zero_grad() after session.backward, within session.step()",
                    expected="gradients at the end of the block of session.step()",
                    fix="Leave out the call: each step begins without gradients. To train on"
                    " nothing in this step on purpose, set each parameter's grad to None.",
                )

    def check_weight_rescaling(self, weight: Tensor) -> None:
        """Raise InvalidSpec for a pass that rescales those rows of a weight that its samples use
        (`max_norm`), if members would get different weights."""
        strategy = self._strategy
        if strategy.synchronous and strategy.passes_meet and self._trained.has_any([weight]):
            raise scaled_down(strategy.name, f"a parameter of shape {tuple(weight.shape)}")

    def trains(self, module: nn.Module) -> bool:
        """True if the module has parameters of the distributed model."""
        return self._trained.has_any(module.parameters())

    def clipping(self, max_norm: float) -> AbstractContextManager[None]:
        """Return a context in which the session clips gradients to this norm by torch's call."""
        self._note_norm(max_norm)
        return _Within(self._set_clips)

    def check_clipping(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        """Raise InvalidSpec for torch's clipping of these parameters if this member has only a part
        of the gradients, or scaled ones. `max_norm`: None if values are clipped, one by one."""
        if self._clips:
            return
        call = "torch's clip_grad_value_" if max_norm is None else "torch's clip_grad_norm_"
        self._others.check_present(parameters, call)
        is_ours = self._trained.has_any(parameters)
        unsettled = self._strategy.unsettled_gradients() if is_ours else ""
        if max_norm is None:
            lack = unsettled
        elif self._commits and self._strategy.state_is_spread:
            lack = "only this member's part of the gradients, within optimizer.step()"
        else:
            lack = self._strategy.gradients_lack() if is_ours else ""
        if lack:
            raise InvalidSpec(
                f"{call} under {self._strategy.name}, in step {self._step()}",
                seen=lack,
                expected="gradients of the mean over the global batch"
                if max_norm is None
                else "session.clip_grad_norm(max_norm), which takes the norm of the whole model's"
                " gradients",
                fix=_MADE_MEANS if unsettled else "",
            )
        if is_ours and not self._commits and max_norm is not None and not math.isinf(max_norm):
            # A script that clips to infinity wants only the norm.
            self._note_norm(max_norm)

    def _note_norm(self, max_norm: float) -> None:
        if isinstance(self._strategy, SynchronousStrategy):
            self._strategy.position.norms.append(float(max_norm))

    def _step(self) -> int:
        return self._strategy.step

    def _before_step(self, *_: Any) -> None:
        if not self._commits:
            raise InvalidSpec(
                f"the script called optimizer.step() itself, after {self._step()} committed steps",
                seen="optimizer.step(), directly or by a call such as GradScaler.step(optimizer)",
                expected="session.step() alone, which steps the optimizer when its block ends",
                fix="Leave out the call (and GradScaler, see docs/loop.md): each gradient"
                " would be applied twice.",
            )

    def _refuse_group(self, *_: Any, **__: Any) -> None:
        raise self._refusal("optimizer.add_param_group")

    def _refusal(self, seen: str) -> InvalidSpec:
        return InvalidSpec(
            f"the script changed the optimizer's parameters, after {self._step()} committed steps",
            seen=seen,
            expected="the groups that it had at session.distribute: a member that joins later"
            " has only these",
            fix=TRAINED_LATER,
        )

    def watch(self, scaled: Any, scaler: object) -> None:
        """Make the session's backward passes through tensors that `scaler` has scaled raise
        InvalidSpec, unless it is the registered one."""
        through = partial(self._through_scaled, scaler)
        for tensor in pytree.tree_leaves(scaled):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(through)  # type: ignore[no-untyped-call]

    def refuse(self, scaler: object, call: str) -> None:
        """Raise InvalidSpec if the script makes this call on the registered scaler: the session
        makes it."""
        if scaler is self._registered.scaler:
            raise InvalidSpec(
                f"the script called scaler.{call}() itself, after {self._step()} committed steps",
                seen=f"GradScaler.{call} of the registered scaler",
                expected="session.step() alone, which unscales the gradients, skips the optimizer's"
                " step if they overflowed on any member, and updates the scale",
                fix="Leave out scaler.unscale_, scaler.step and scaler.update; to clip, call"
                f" session.clip_grad_norm. {_MADE_MEANS}",
            )

    def _through_scaled(self, scaler: object, gradient: Tensor) -> None:
        # A scaled loss of another model does not concern the session.
        if self._computes and scaler is self._registered.scaler:
            self._is_scaled = True
        elif self._computes:
            raise InvalidSpec(
                f"a loss that GradScaler.scale made, in step {self._step()}",
                seen="a scaled loss, with gradients that no call unscales",
                expected="the loss as it is: session.backward(loss)",
                fix='session.register("scaler", scaler) before the first batch, without scaler.step'
                " and scaler.update. Or leave GradScaler out: bfloat16 needs no scaling; a constant"
                " factor of your own is not a problem.",
            )


def _look_at_clipping(parameters: Sequence[Tensor], max_norm: float | None) -> None:
    context = current()
    guard = context.committing or context.guard
    if isinstance(guard, StepGuard):
        guard.check_clipping(parameters, max_norm)


def _look_at_scaling_down(weight: Tensor) -> None:
    if (guard := _guard()) is not None:
        guard.check_weight_rescaling(weight)


def _look_at_wrapping(module: nn.Module) -> None:
    guard = _guard()
    if isinstance(module, ModuleProxy) or (guard is not None and guard.trains(module)):
        raise InvalidSpec(
            "the distributed model in a DistributedDataParallel of the script's own",
            seen=f"DistributedDataParallel of {type(module).__name__}",
            expected="the model that session.distribute returned, as it is: the session combines"
            " its gradients",
            fix="Leave out the wrapper, and `.module` after it (docs/tutorials/ddp.md has a table"
            " for scripts that come from torchrun).",
        )


def _with_gradient(optimizer: Optimizer) -> Iterator[Tensor]:
    groups = optimizer.param_groups
    return (each for group in groups for each in group["params"] if each.grad is not None)


def _guard() -> StepGuard | None:
    guard = current().guard
    return guard if isinstance(guard, StepGuard) else None


def _watch_scalers() -> None:
    """Wrap the methods of GradScaler and its subclasses, once, to report to the guard of the
    thread's open step."""
    kinds: list[type] = [torch.amp.GradScaler]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        scale = vars(kind).get("scale")
        if scale is not None and not hasattr(scale, _MARK):
            kind.scale = _watched(scale)  # type: ignore[attr-defined]
        for call in ("unscale_", "step", "update"):
            plain = vars(kind).get(call)
            if plain is not None and not hasattr(plain, _MARK):
                setattr(kind, call, _left_to_session(plain, call))


def _watch_zeroing() -> None:
    """Wrap `zero_grad` of optimizers and modules, once, to report to the guard of the thread's open
    step."""
    if not hasattr(Optimizer.zero_grad, _MARK):
        Optimizer.zero_grad = _watched_zeroing(Optimizer.zero_grad)  # type: ignore[method-assign]
        nn.Module.zero_grad = _watched_zeroing(nn.Module.zero_grad)  # type: ignore[method-assign]


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _watched_zeroing(plain: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def watched(self: Any, set_to_none: bool = True) -> Any:
        if (guard := _guard()) is not None:
            guard.note_zero_grad(self, to_none=set_to_none)
        return plain(self, set_to_none)

    setattr(watched, _MARK, True)
    return watched


def _watched(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def watched(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        guard = _guard()
        if guard is not None and self.is_enabled():
            guard.watch(scaled, self)
        return scaled

    setattr(watched, _MARK, True)
    return watched


def _left_to_session(plain: Callable[..., Any], call: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (guard := _guard()) is not None:
            guard.refuse(self, call)
        return plain(self, *args, **kwargs)

    setattr(watched, _MARK, True)
    return watched
