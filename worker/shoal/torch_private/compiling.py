"""Of torch.compile: what it wraps, how that is carried over, and what it leaves alone.

As in torch 2.13. Nothing here imports `torch._dynamo`, which takes seconds: only who compiles has
done so.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch._C import _dynamo as _c_dynamo
from torch.nn.parallel import DistributedDataParallel

_eval_frame: Any = _c_dynamo.eval_frame
P = ParamSpec("P")
R = TypeVar("R")
_IN_PLACE = "_compiled_call_impl"
"""Where `module.compile()` keeps what a call of the module goes to."""


def is_compiled(model: nn.Module) -> bool:
    """True if the model is what `torch.compile(module)` returns."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def forget_ddp_forward() -> None:
    """Take no forward pass of DDP for one that goes on. Each puts back what it found, and of two in
    threads, of which the first to begin is the first to end, the other one puts that back for ever:
    from then on torch.compile would split whatever it compiles as that DDP has its buckets."""
    DistributedDataParallel._active_ddp_module = None


def compiled_in_place(model: Any) -> nn.Module:
    """The module itself, compiled as the wrapper around it is: what `module.compile()` does. Its
    parameters have no prefix, and it may be wrapped anew without being compiled anew."""
    original: nn.Module = model._orig_mod
    original._compiled_call_impl = model.dynamo_ctx(_call_of(original))
    return original


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of the module goes to, if it is compiled in place."""
    call: Callable[..., Any] | None = module.__dict__.get(_IN_PLACE)
    return call


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` was called, or `compiled_in_place` made it so."""
    return compiled_call(module) is not None


def compile_alike(compiled: nn.Module, module: Any) -> None:
    """Compile `module` in place by the very compiler, and with the options, of one that is. What
    was compiled is found again for modules of the same class, shapes and settings."""
    module._compiled_call_impl = compiled_alike(compiled, _call_of(module))


def compiled_alike(compiled: nn.Module, function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled by the very compiler, and with the options, of a module that is."""
    made: Callable[P, R] = _compiler_of(compiled.__dict__[_IN_PLACE])(function)
    return made


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within, the parts of the model run as they are: to be traced, say."""
    parts = [part for part in model.modules() if is_compiled_in_place(part)]
    compiled = [(part, part.__dict__.pop(_IN_PLACE)) for part in parts]
    try:
        yield
    finally:
        for part, call in compiled:
            part.__dict__[_IN_PLACE] = call


def _call_of(module: Any) -> Callable[..., Any]:
    """What is to be compiled of a module. Of torch's own, such as nn.Sequential, torch compiles
    nothing but what is within another function."""
    dynamo = sys.modules["torch._dynamo"]
    call: Callable[..., Any] = module._call_impl
    if dynamo.trace_rules.check(module.forward):
        call = dynamo.external_utils.wrap_inline(call)
    return call


def _compiler_of(call: Any) -> Callable[[Any], Any]:
    """What made this function of another."""
    context = sys.modules["torch._dynamo"].eval_frame._TorchDynamoContext
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    found: Callable[[Any], Any] = next(each for each in cells if isinstance(each, context))
    return found


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile does not look into, nor into what it calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        # No context manager: its frames would be compiled.
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return _left_out(run)


class _Here(threading.local):
    """By thread, as torch's own."""

    callback: Any = None
    """What compiles where `routing` was called; None: nothing does."""


_here = _Here()


def routing(call: Callable[P, R]) -> Callable[P, R]:
    """The function, run as it is also where torch.compile is to compile what it calls: only what it
    calls by `call_compiling` is."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return call(*args, **kwargs)
        before = _eval_frame.set_eval_frame(None)
        outer, _here.callback = _here.callback, before or _here.callback
        try:
            return call(*args, **kwargs)
        finally:
            _here.callback = outer
            _eval_frame.set_eval_frame(before)

    return _left_out(run)


def is_routing_compiled() -> bool:
    """Within `routing`: whether what is called is to be compiled."""
    return bool(_here.callback)


def call_compiling(module: Any, args: Any, kwargs: Any) -> Any:
    """Within `routing`: call the module, compiled if that was asked for. Of DistributedDataParallel
    that is the module within: what is around it talks to other ranks."""
    callback, _here.callback = _here.callback, None
    if not callback:
        return module(*args, **kwargs)
    if not isinstance(module, DistributedDataParallel):
        return _compiling(callback, _call_of(module))(*args, **kwargs)
    inner: Any = module.module
    if is_compiled_in_place(inner):
        return module(*args, **kwargs)
    inner._compiled_call_impl = _compiling(callback, _call_of(inner))
    try:
        return module(*args, **kwargs)
    finally:
        inner._compiled_call_impl = None


def _compiling(callback: Any, function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled by what compiled where `routing` was called."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _eval_frame.set_eval_frame(callback)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return _left_out(run)


def _left_out(function: Callable[P, R]) -> Callable[P, R]:
    """What torch's own `disable` marks: the frame is not compiled, nor taken into a larger one."""
    marked: Any = function
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    _eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shoal runs it as it is"
    marked._torchdynamo_disable_recursive = True
    return function
