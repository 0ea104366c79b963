"""The strategy `async-sgd`: every member trains at its own pace against the parameter servers.

A step computes gradients on the values in hand, pushes them, and takes back the values of right
after the push, in one exchange with every server. The optimizer runs there, once for all members;
what the user holds is the model, whose parameters are overwritten in place, and the optimizer
object, whose learning rates (schedules included) travel with every push.

- A parameter without gradient in a step is left alone by the optimizer, as `torch.optim` does: no
  weight decay, no momentum, no step counted. What other members changed in it still comes back.
- Buffers, such as running means, are no parameters: each member keeps its own.
- The values that training starts from are those of rank 0 of the first generation. Should it die
  half-way through, another member creates what is missing, from its own initial values.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from shoal.strategies.base import (
    Context,
    Generation,
    Strategy,
    optimizer_digest,
    schema_digest,
)
from shoal_client.parameters import ParameterClient, PushResult
from shoal_proto.errors import (
    DtypeMismatch,
    GenerationBroken,
    InternalError,
    InvalidSpec,
    NonFiniteGradient,
    ShardNotReady,
    UnsupportedOptimizer,
)
from shoal_proto.v1.parameters_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CREATION_PATIENCE_SHARE = 0.25
"""After this share of the bring-up limit without values, any member creates them."""
LOOK_S = 0.5
"""How often a member that waits for its first values looks whether its generation broke."""


class AsyncSgd(Strategy):
    name: ClassVar[str] = "async-sgd"
    synchronous: ClassVar[bool] = False

    def __init__(self) -> None:
        self._step = 0
        self._has_state = False
        self._cut_generation = 0
        self._client: ParameterClient | None = None
        self._last_push: PushResult | None = None
        self._pushes = 0
        self._lock = threading.Lock()

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self._spec = to_spec(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._parameters = _trained(model, optimizer)
        self._schema = [
            ParameterSpec(
                name=name,
                shape=parameter.shape,
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=group,
            )
            for name, (parameter, group) in self._parameters.items()
        ]
        self._slots = {name: _Slot(p) for name, (p, _) in self._parameters.items()}
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
        }
        return model, optimizer

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def attach(self, context: Context) -> None:
        super().attach(context)
        self._client = ParameterClient(
            context.coordinators, context.token, timeout_s=context.limits.collective_s or 60.0
        )

    def enter(self, generation: Generation) -> None:
        """The first one brings the values; a later one changes nothing, training goes on."""
        if self._has_state:
            return
        client = self._connected()
        client.place(self._schema)
        create_at_s = time.monotonic()
        if generation.rank != 0:
            create_at_s += CREATION_PATIENCE_SHARE * self.context.limits.bring_up_s
        give_up_s = time.monotonic() + self.context.limits.bring_up_s
        wait_s = 0.0
        while not self._pull(client, wait_s, give_up_s):
            if generation.number <= self._cut_generation:
                raise GenerationBroken(
                    f"generation {generation.number} broke before training had its first values"
                )
            wait_s = LOOK_S
            if time.monotonic() >= create_at_s:
                buffers = {name: slot.value_bytes() for name, slot in self._slots.items()}
                client.create(self._spec, buffers)
        self._has_state = True

    def _pull(self, client: ParameterClient, wait_s: float, give_up_s: float) -> bool:
        """Whether the values were there and have been taken."""
        into = {name: slot.writable_bytes() for name, slot in self._slots.items()}
        try:
            client.pull(into, wait_s=wait_s)
        except ShardNotReady:
            if time.monotonic() >= give_up_s:
                raise
            return False
        self._adopt_values()
        return True

    def cut(self, generation: int) -> None:
        self._cut_generation = max(self._cut_generation, generation)

    def abandon(self) -> None:
        """Nothing ties this member to a generation."""

    def begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, weight: float) -> None:
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        return self._model

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        gradients = {
            name: parameter.grad.detach()
            for name, (parameter, _) in self._parameters.items()
            if parameter.grad is not None
        }
        self._check(gradients)
        held = {name: _to_host(gradient) for name, gradient in gradients.items()}
        result = self._connected().push(
            {name: _bytes_of(gradient) for name, gradient in held.items()},
            lr=[float(group["lr"]) for group in self._optimizer.param_groups],
            into={name: slot.writable_bytes() for name, slot in self._slots.items()},
        )
        self._adopt_values()
        # The servers stepped for it; else a learning-rate schedule warns that nobody did.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._step += 1
        with self._lock:
            self._last_push = result
            self._pushes += 1
        acknowledged()

    def finish(self) -> None:
        """Take the values as they are now: once all samples are done, the job's final ones."""
        client = self._connected()
        client.pull({name: slot.writable_bytes() for name, slot in self._slots.items()}, wait_s=0.0)
        self._adopt_values()

    def _check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise for what a server would refuse, before any part of the step has left."""
        for name, gradient in gradients.items():
            parameter = self._parameters[name][0]
            if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
                raise DtypeMismatch(
                    f"the gradient of parameter {name} is of another kind than the parameter",
                    seen=f"{gradient.dtype}, {gradient.layout}",
                    expected=f"{parameter.dtype}, {torch.strided}",
                )
        for name in _non_finite(gradients):
            raise NonFiniteGradient(
                f"the gradient of parameter {name} is not finite in step {self._step}",
                seen="NaN or Inf",
                expected="finite numbers",
                fix="Look for a division by zero, or lower the learning rate.",
                details={"parameter": name, "step": str(self._step)},
            )

    def _adopt_values(self) -> None:
        for slot in self._slots.values():
            slot.adopt()

    @property
    def step(self) -> int:
        return self._step

    @property
    def has_state(self) -> bool:
        return self._has_state

    def state_dict(self) -> Mapping[str, Tensor]:
        """The values this member computes with; the optimizer's state lives on the servers."""
        return {name: t.detach().clone() for name, t in self._model.state_dict().items()}

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            if self._last_push is None:
                return {}
            return {
                "staleness": self._last_push.staleness_mean,
                "staleness_max": float(self._last_push.staleness_max),
                "pushes": float(self._pushes),
            }

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _connected(self) -> ParameterClient:
        if self._client is None:
            raise InternalError("the strategy was not attached", expected="attach() before enter()")
        return self._client


class _Slot:
    """Where a parameter's bytes lie for reading and writing: in place, or staged beside it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._pointer = 0
        self._staged: Tensor | None = None
        self._view = memoryview(b"")

    def writable_bytes(self) -> memoryview:
        """Write the new values here, then call `adopt`."""
        data = self._parameter.detach()
        # A user may have moved the model since: the storage then is another one.
        if data.data_ptr() != self._pointer or not self._view.nbytes:
            in_place = data.device.type == "cpu" and data.is_contiguous()
            self._staged = None if in_place else torch.empty(data.shape, dtype=data.dtype)
            self._view = _bytes_of(data if self._staged is None else self._staged)
            self._pointer = data.data_ptr()
        return self._view

    def value_bytes(self) -> memoryview:
        """The parameter's values as they are now."""
        view = self.writable_bytes()
        if self._staged is not None:
            self._staged.copy_(self._parameter.detach())
        return view

    def adopt(self) -> None:
        """Make what was written the parameter's values."""
        if self._staged is not None:
            with torch.no_grad():
                self._parameter.copy_(self._staged)


def to_spec(optimizer: Optimizer) -> OptimizerSpec:
    """The optimizer for the servers. Raises UnsupportedOptimizer for what they do not have."""
    kinds: Mapping[type[Optimizer], str] = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise UnsupportedOptimizer(
            "async-sgd runs the optimizer on the parameter servers, which do not have this one",
            seen=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            expected="torch.optim.SGD, Adam or AdamW (not a subclass)",
            fix="Choose one of these, or the strategy `ddp`.",
        )
    groups = optimizer.param_groups
    if kind != "sgd":
        decoupled = {kind == "adamw" or bool(g.get("decoupled_weight_decay")) for g in groups}
        if len(decoupled) > 1:
            raise UnsupportedOptimizer(
                "the parameter groups differ in how weight decay is applied",
                seen="decoupled_weight_decay both true and false",
                expected="the same in all groups",
            )
        kind = "adamw" if decoupled.pop() else "adam"
    return OptimizerSpec(kind=kind, groups=[_hyper_parameters(group) for group in groups])


def _hyper_parameters(group: Mapping[str, Any]) -> HyperParameters:
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    return HyperParameters(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group.get("momentum", 0.0)),
        dampening=float(group.get("dampening", 0.0)),
        nesterov=bool(group.get("nesterov", False)),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group.get("eps", 0.0)),
        amsgrad=bool(group.get("amsgrad", False)),
        maximize=bool(group.get("maximize", False)),
    )


def _trained(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[nn.Parameter, int]]:
    """The optimizer's parameters by their names in the model, each with its group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained: dict[str, tuple[nn.Parameter, int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is None:
                raise InvalidSpec(
                    "the optimizer holds a parameter that is not the model's",
                    seen=f"a parameter of shape {tuple(parameter.shape)} in group {index}",
                    expected="parameters of the model that is distributed",
                    fix="Make the optimizer from model.parameters().",
                )
            if parameter.dtype not in DTYPES:
                raise DtypeMismatch(
                    f"parameter {name} has a dtype that no optimizer kernel takes",
                    seen=str(parameter.dtype),
                    expected=", ".join(map(str, DTYPES)),
                )
            trained[name] = (parameter, index)
    return trained


def _non_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients with NaN or Inf.

    A sum is finite only if all of its terms are, and is much cheaper than to ask each of them;
    where it is not, they are asked, since finite numbers may have overflowed.
    """
    suspects = []
    for name, gradient in gradients.items():
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        if not math.isfinite(gradient.sum(dtype=wide).item()):
            suspects.append(name)
    return [name for name in suspects if not torch.isfinite(gradients[name]).all()]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The flat bytes of a contiguous CPU tensor, shared with it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


__all__ = ["AsyncSgd", "to_spec"]
