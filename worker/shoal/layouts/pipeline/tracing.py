"""Trace of a model's forward pass by torch.fx, down to the layers that it calls."""

import dis
import inspect
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.torch_private.compiling import uncompiled
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import InvalidSpec

# fx replaces nn.Module's methods for the whole process while it traces.
_tracing = threading.Lock()
_TRACER_ATTRIBUTES = re.compile(
    r"_(tensor_constant|torchbind_obj|opaque_obj|script_object|\w+_constant_)"
)
# Functions that take sizes. torch does not dispatch a call to a proxy among these arguments.
_CREATORS = ("arange", "empty", "full", "ones", "zeros")


def trace(model: nn.Module, opened: Collection[str], training: bool) -> fx.Graph:
    """Trace the forward pass of training or of evaluation, into the `opened` modules.

    Raises InvalidSpec if the pass depends on values or shapes, or assigns attributes of modules.
    """
    tracer = _Tracer(opened)
    with _tracing, _creators_traced(), _mode(model, training), uncompiled(model):
        try:
            with _assignments_refused(model):
                return tracer.trace(model)
        except InvalidSpec:
            raise
        except Exception as error:
            raise InvalidSpec(
                f"the forward pass of {type(model).__name__} cannot be cut into stages",
                seen=f"{type(error).__name__}: {error}",
                expected="a forward pass that calls its layers one after the other, for all"
                " values and shapes of its inputs",
                fix="Move code that depends on values or shapes into a layer, or make the model an"
                " nn.Sequential.",
            ) from error


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[str]) -> None:
        super().__init__()
        self._opened = opened
        self._thread = threading.get_ident()
        self._names: dict[int, tuple[str, Tensor]] = {}
        """Tensors by id: fx would search all of them for each one."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        name, tensor = self._names.get(id(attr_val), ("", None))
        if tensor is attr_val and isinstance(tensor, Tensor):
            if name not in parameter_proxy_cache:
                parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
            return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[], Any], list[Any]]:
        given = {}
        assert isinstance(self.root, nn.Module)
        tensors = [*self.root.named_buffers(), *self.root.named_parameters()]
        self._names = {id(tensor): (name, tensor) for name, tensor in tensors}
        for name, default in signature(self.root).items():
            is_input = default is inspect.Parameter.empty
            given[name] = self.create_proxy("placeholder", name, (), {}) if is_input else default
        positional = _positional(self.root)
        args = [given.pop(name) for name in positional]
        return lambda: root_fn(self.root, *args, **given), []

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = sys._getframe(2)
        if _is_assertion(frame.f_code, frame.f_lasti):
            return True
        return bool(super().to_bool(obj))


def _is_assertion(code: Any, offset: int) -> bool:
    """True if the truth value taken at this offset only decides if an assertion fails."""
    after = [step.opname for step in dis.get_instructions(code) if step.offset >= offset][:3]
    return "LOAD_ASSERTION_ERROR" in after


def signature(model: nn.Module) -> dict[str, Any]:
    """Return the model's inputs by name, each with its default, to which the trace fixes it. The
    first input and those without a default have `inspect.Parameter.empty`."""
    inputs: dict[str, Any] = {}
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        inputs[parameter.name] = parameter.default if inputs else inspect.Parameter.empty
    return inputs


def _positional(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


@contextmanager
def _creators_traced() -> Iterator[None]:
    # The first `with torch.device(...)` of the process collects these functions. This one makes
    # sure that the originals are collected, not their replacements.
    with torch.device("cpu"):
        torch.empty(0)
    originals = {name: getattr(torch, name) for name in _CREATORS}

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            proxies = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Proxy)]
            if not proxies:
                return original(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", original, args, kwargs)

        return create

    for name, original in originals.items():
        setattr(torch, name, traced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


@contextmanager
def _assignments_refused(model: nn.Module) -> Iterator[None]:
    """Undo assignments of the traced forward pass to attributes of modules. Raises InvalidSpec if
    there were any: a stage's passes would not repeat them."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [
        (f"{name}." if name else "", table, dict(table))
        for name, part in model.named_modules()
        for table in (vars(part), *(vars(part)[each] for each in tables))
    ]
    assigned: list[str] = []
    try:
        yield
    finally:
        for prefix, table, kept in before:
            kept |= {k: each for k, each in table.items() if _TRACER_ATTRIBUTES.match(k)}
            changed = [k for k in table.keys() | kept.keys() if table.get(k) is not kept.get(k)]
            if changed:
                assigned += (prefix + key for key in sorted(changed))
                table.clear()
                table.update(kept)
    if assigned:
        raise InvalidSpec(
            f"the forward pass of {type(model).__name__} cannot be cut into stages",
            seen=f"it assigns {', '.join(assigned[:5])}",
            expected="attributes and buffers that only layers assign, in their own forward: stages"
            " send each other nothing but the values between layers",
            fix="Move code that counts or keeps something into a layer: the layer runs it once for"
            " each micro-batch.",
        )


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {part: part.training for part in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
