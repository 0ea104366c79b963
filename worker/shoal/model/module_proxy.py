"""Proxy that a script uses as its model; the module behind it is new in each generation."""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.torch_private.compiling import (
    call_compiling,
    compile_alike,
    is_compiled_in_place,
    routing,
)
from shoal.torch_private.modules import share_tables
from shoal_proto.errors import InvalidSpec


class ModuleProxy(nn.Module):
    """Proxy of the user's model, which runs the module that `route` returns.

    Parameters, names, `state_dict` keys and attributes are the model's. A copy or pickle of the
    proxy holds the model, without a proxy. If a member has only a part of the model, `state_dict`,
    copies and pickles are refused.
    """

    def __init__(self, module: nn.Module, route: Callable[[], nn.Module]) -> None:
        # Not super(), which may be the model's own constructor.
        nn.Module.__init__(self)
        attributes = self.__dict__
        attributes["_route"] = route
        attributes["_names"] = _names(module)
        retarget(self, module)
        # Without this attribute, __getattr__ reads the model's own flag.
        del attributes["training"]

    # `routing`: torch.compile compiles the module behind the proxy instead.
    @routing
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return nn.Module.__call__(self, *inputs, **options)

    @routing
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return call_compiling(self.__dict__["_route"](), inputs, options)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile calls of the module, as torch does, and of the modules that replace it later."""
        module = unwrap_proxy(self)
        module.compile(*arguments, **options)
        compile_alike(module, module)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None:
            raise AttributeError(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_module")
        if module is None:
            nn.Module.__setattr__(self, name, value)
        else:
            setattr(module, name, value)

    def state_dict(self, *positional: Any, **options: Any) -> Any:
        _refuse_parts(self, "model.state_dict()")
        return self.__dict__["_module"].state_dict(*positional, **options)

    def load_state_dict(self, *positional: Any, **options: Any) -> Any:
        return self.__dict__["_module"].load_state_dict(*positional, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _refuse_parts(self, "a copy or pickle of the model")
        return (_same, (self.__dict__["_module"],))


def proxy_of(module: nn.Module, route: Callable[[], nn.Module]) -> nn.Module:
    """Return a proxy that is also an instance of the model's class. For a ScriptModule, return a
    plain ModuleProxy."""
    kind = type(module)
    if kind is nn.Module or isinstance(module, torch.jit.ScriptModule):
        return ModuleProxy(module, route)

    def make(self: nn.Module, *arguments: Any, **options: Any) -> None:
        # `type(model)(...)`, as in a slice of an nn.Sequential, makes a plain module of the model's
        # class.
        self.__class__ = kind
        kind.__init__(self, *arguments, **options)

    members: dict[str, Any] = {"__module__": kind.__module__, "__init__": make}
    if isinstance(kind.forward, FunctionType):
        members["forward"] = _forward_like(kind.forward)
    mixed: Any = type(kind.__name__, (ModuleProxy, kind), members)
    proxy: nn.Module = mixed.__new__(mixed)
    ModuleProxy.__init__(proxy, module, route)  # type: ignore[arg-type]
    return proxy


def _forward_like(forward: FunctionType) -> Callable[..., Any]:
    """Return the proxy's `forward`, with the signature of the model's: frameworks choose the
    arguments by it."""

    @routing
    def routed(self: ModuleProxy, *inputs: Any, **options: Any) -> Any:
        return call_compiling(self.__dict__["_route"](), inputs, options)

    routed.__dict__["__signature__"] = inspect.signature(forward)
    return routed


def unwrap_proxy(proxy: nn.Module) -> nn.Module:
    """Return the present module behind a proxy; a module that is not a proxy is returned itself."""
    module = proxy
    while isinstance(module, ModuleProxy):
        module = module.__dict__["_module"]
    return module


def unwrapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, with the module behind it in place of each proxy."""
    return {name: unwrap_proxy(each) for name, each in model.named_modules()}


def retarget(proxy: nn.Module, module: nn.Module) -> None:
    """Put another module of the same structure behind a proxy."""
    proxy.__dict__["_module"] = module
    share_tables(proxy, module)


def copy_modes(model: nn.Module, module: nn.Module) -> None:
    """Copy the modes of the script's model to a new generation's module: training or evaluation,
    and compiled or not."""
    parts = {name: unwrap_proxy(part) for name, part in model.named_modules()}
    for name, part in module.named_modules():
        if name in parts:
            part.training = parts[name].training
            if is_compiled_in_place(parts[name]):
                compile_alike(parts[name], part)


def _same(module: nn.Module) -> nn.Module:
    return module


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))


def _refuse_parts(proxy: ModuleProxy, what: str) -> None:
    """Raise InvalidSpec if the module behind the proxy is only a part of the model."""
    module = proxy.__dict__["_module"]
    elsewhere = sorted(proxy.__dict__["_names"] - _names(module))
    cut = [name for name, each in module.named_parameters() if isinstance(each, DTensor)]
    if not elsewhere and not cut:
        return
    raise InvalidSpec(
        f"{what} would be a part of the model",
        seen=f"{(elsewhere or cut)[0]}, which {'another member has' if elsewhere else 'is cut'}",
        expected="a strategy whose members have the whole model, such as ddp or zero1",
        fix="Call session.state_dict() on every member (without a session:"
        " shoal.state_dict(model)). It gathers the whole model, which one member may then save.",
    )
