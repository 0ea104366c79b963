"""A Keras optimizer as a torch optimizer: its rules, applied to the parts that a member holds.

In each generation a Keras optimizer is built whose variables share memory with the torch
optimizer's state.
"""

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import keras
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.integrations.keras_sharded import check_elementwise
from shoal.model.local_parts import local_part, placed_like
from shoal_proto.errors import UnsupportedOptimizer

_STEPS = "iteration"
_SHARED = "shared_"


class KerasSteps(Optimizer):
    """Torch optimizer that steps as the given Keras optimizer would.

    The learning rate and the step counter stay visible on the Keras optimizer. Raises
    UnsupportedOptimizer for an optimizer that is not elementwise, has taken steps, or has
    `clipnorm`, gradient accumulation or a loss scale. The session clips by `max_norm`.
    """

    elementwise = True
    """See `shoal.model.elementwise_optimizers`."""

    def __init__(self, optimizer: Any, parameters: Sequence[tuple[Any, nn.Parameter]]) -> None:
        """`parameters`: pairs of a variable and its parameter."""
        _refuse(optimizer)
        self._keras_optimizer = optimizer
        self._variables = [variable for variable, _ in parameters]
        self.max_norm: float | None = optimizer.global_clipnorm
        config = optimizer.get_config()
        self._config = {**config, "global_clipnorm": None}
        self._rate = _rate_of(optimizer)
        # A group for each parameter: its index identifies the variable. Members compare groups'
        # settings.
        rate = {} if self._rate is None else {"lr": self._rate}
        groups: list[dict[str, Any]] = [{"params": [p], **rate} for _, p in parameters]
        groups[0]["keras"] = json.dumps({**config, "name": ""}, sort_keys=True, default=str)
        super().__init__(groups, {})
        self._bound: list[Tensor] = []
        self._bound_optimizer: Any = None
        self._parts: dict[nn.Parameter, Any] = {}
        # Keras would make state for whole weights.
        optimizer.built = True

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of every parameter with a gradient. `closure` is not called."""
        held = {
            group["params"][0]: variable
            for group, variable in zip(self.param_groups, self._variables, strict=True)
            if group["params"]
        }
        self._update_rate()
        self._bind(held)
        live = [parameter for parameter in held if parameter.grad is not None]
        if live:
            gradients = [local_part(parameter.grad) for parameter in live]
            self._bound_optimizer.apply(gradients, [self._parts[parameter] for parameter in live])
            self._keep(live)
        return None

    def _update_rate(self) -> None:
        """Use the rate of the parameter groups, which joining members receive, unless the script
        has set another one on the Keras optimizer."""
        if self._rate is None:
            return
        now = _rate_of(self._keras_optimizer)
        if now == self._rate:
            self._keras_optimizer.learning_rate = self.param_groups[0]["lr"]
        for group in self.param_groups:
            group["lr"] = _rate_of(self._keras_optimizer)
        self._rate = _rate_of(self._keras_optimizer)

    def _bind(self, held: Mapping[nn.Parameter, Any]) -> None:
        """Build a Keras optimizer, once for each generation."""
        memory = self._memory(held)
        if len(memory) == len(self._bound) and all(map(operator.is_, memory, self._bound)):
            self._load_shared(held)
            return
        plain = type(self._keras_optimizer)
        kind: Any = type(plain.__name__, (_Bindable, plain), {"__module__": plain.__module__})
        bound_optimizer = kind.from_config(self._config)
        self._parts = {p: _part(p, variable) for p, variable in held.items()}
        bound_optimizer.__dict__["shoal_slots"] = []
        bound_optimizer.__dict__["shoal_decays"] = {
            id(self._parts[p]): self._keras_optimizer._use_weight_decay(v) for p, v in held.items()
        }
        if self._rate is not None:
            bound_optimizer.__dict__["_learning_rate"] = self._keras_optimizer._learning_rate
        bound_optimizer.build(list(self._parts.values()))
        owners = {id(part): parameter for parameter, part in self._parts.items()}
        for part, name, slot in bound_optimizer.__dict__["shoal_slots"]:
            self._give_memory(owners[id(part)], name, slot)
        self._bound_optimizer = bound_optimizer
        self._load_shared(held)
        self._bound = self._memory(held)

    def _memory(self, held: Iterable[nn.Parameter]) -> list[Tensor]:
        return [
            each
            for parameter in held
            for each in (parameter, *self.state.get(parameter, {}).values())
            if isinstance(each, Tensor)
        ]

    def _give_memory(self, parameter: nn.Parameter, name: str, slot: Any) -> None:
        state = self.state[parameter]
        if name in state:
            slot._value = nn.Parameter(local_part(state[name]), requires_grad=False)
        else:
            state[name] = placed_like(parameter, slot.value.detach())

    def _load_shared(self, held: Mapping[nn.Parameter, Any]) -> None:
        stepped = [self.state[p] for p in held if _STEPS in self.state.get(p, {})]
        # A parameter without a gradient keeps the values of its own last step.
        state: Mapping[str, Any] = max(stepped, key=lambda each: each[_STEPS], default={})
        self._bound_optimizer._iterations.assign(state.get(_STEPS, 0))
        for index, variable in enumerate(self._shared()):
            if f"{_SHARED}{index}" in state:
                variable.assign(state[f"{_SHARED}{index}"])

    def _keep(self, live: list[nn.Parameter]) -> None:
        steps = int(self._bound_optimizer._iterations)
        self._keras_optimizer._iterations.assign(steps)
        for parameter in live:
            self.state[parameter][_STEPS] = steps
            for index, variable in enumerate(self._shared()):
                self.state[parameter][f"{_SHARED}{index}"] = float(variable)

    def _shared(self) -> list[Any]:
        bound_optimizer = self._bound_optimizer
        known = {id(slot) for _, _, slot in bound_optimizer.__dict__["shoal_slots"]}
        known |= {id(bound_optimizer._iterations), id(bound_optimizer._learning_rate)}
        return [
            v for v in bound_optimizer.variables if id(v) not in known and v.name != "learning_rate"
        ]


class _Bindable:
    """Mixin for a Keras optimizer that records each part's state variables."""

    def add_variable_from_reference(
        self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        variable = super().add_variable_from_reference(reference_variable, name, initializer)  # type: ignore[misc]
        self.__dict__["shoal_slots"].append((reference_variable, name or "var", variable))
        return variable

    def _use_weight_decay(self: Any, variable: Any) -> bool:
        decays: bool = self.__dict__["shoal_decays"][id(variable)]
        return decays


def _refuse(optimizer: Any) -> None:
    check_elementwise(optimizer)
    for option, fix in (
        ("clipnorm", "Use global_clipnorm, or clipvalue."),
        ("gradient_accumulation_steps", "Raise global_batch_size."),
        ("loss_scale_factor", "Leave it out: gradients are of full precision."),
    ):
        if getattr(optimizer, option):
            raise UnsupportedOptimizer(
                f"a session does not keep {option} exact",
                seen=f"{option}={getattr(optimizer, option)}",
                expected="None",
                fix=fix,
            )
    if int(optimizer._iterations):
        raise UnsupportedOptimizer(
            "the optimizer has state already",
            seen=f"{int(optimizer._iterations)} steps",
            expected="an optimizer that has taken no step",
            fix="Distribute the model between compile() and the first step.",
        )


def _rate_of(optimizer: Any) -> float | None:
    """Return the learning rate; None for a schedule."""
    rate = optimizer._learning_rate
    return float(rate) if isinstance(rate, keras.Variable) else None


def _part(parameter: nn.Parameter, variable: Any) -> Any:
    memory = nn.Parameter(local_part(parameter), requires_grad=False)
    part = keras.Variable(memory, dtype=variable.dtype, name=variable.name)
    part._value = memory
    part._path = variable.path
    return part
