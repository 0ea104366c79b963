"""Private parts of torch.compile, as of torch 2.13.

Nothing here imports `torch._dynamo`, which takes seconds: a script that compiles has imported it
already.
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


def is_compiled(model: nn.Module) -> bool:
    """True if the model is a wrapper that `torch.compile(module)` returned."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def forget_ddp_forward() -> None:
    """Clear torch's mark of a DDP forward pass in progress.

    If passes of two threads overlap, a mark may stay, and torch.compile would split all later
    graphs.
    """
    DistributedDataParallel._active_ddp_module = None


def compiled_in_place(model: Any) -> nn.Module:
    """Compile the wrapped module in place with the wrapper's compiler; return it."""
    original: nn.Module = model._orig_mod
    original._compiled_call_impl = model.dynamo_ctx(_call_of(original))
    return original


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call of a module that is compiled in place, else None."""
    call: Callable[..., Any] | None = module.__dict__.get(_IN_PLACE)
    return call


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` or `compiled_in_place` compiled the module."""
    return compiled_call(module) is not None


def compile_alike(compiled: nn.Module, module: Any) -> None:
    """Compile `module` in place with the compiler and options of `compiled`."""
    module._compiled_call_impl = compiled_alike(compiled, _call_of(module))


def compiled_alike(compiled: nn.Module, function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, compiled as a compiled module is."""
    compiled_function: Callable[P, R] = _compiler_of(compiled.__dict__[_IN_PLACE])(function)
    return compiled_function


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the parts of the model uncompiled within the block."""
    parts = [part for part in model.modules() if is_compiled_in_place(part)]
    compiled = [(part, part.__dict__.pop(_IN_PLACE)) for part in parts]
    try:
        yield
    finally:
        for part, call in compiled:
            part.__dict__[_IN_PLACE] = call


def _call_of(module: Any) -> Callable[..., Any]:
    """Return the function to compile. torch compiles its own modules only inside another
    function.
    """
    dynamo = sys.modules["torch._dynamo"]
    call: Callable[..., Any] = module._call_impl
    if dynamo.trace_rules.check(module.forward):
        call = dynamo.external_utils.wrap_inline(call)
    return call


def _compiler_of(call: Any) -> Callable[[Any], Any]:
    context = sys.modules["torch._dynamo"].eval_frame._TorchDynamoContext
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    compiler: Callable[[Any], Any] = next(each for each in cells if isinstance(each, context))
    return compiler


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap the function so that torch.compile skips it and all that it calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        # A context manager's frames would be compiled.
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return _excluded(run)


class _ThreadCallback(threading.local):
    """State by thread, as in torch."""

    callback: Any = None


_thread_state = _ThreadCallback()


def routing(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap the function so that torch.compile skips it.

    Of the calls that the function makes, only calls through `call_compiling` are compiled, if the
    caller compiles.
    """

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return call(*args, **kwargs)
        before = _eval_frame.set_eval_frame(None)
        outer, _thread_state.callback = _thread_state.callback, before or _thread_state.callback
        try:
            return call(*args, **kwargs)
        finally:
            _thread_state.callback = outer
            _eval_frame.set_eval_frame(before)

    return _excluded(run)


def is_routing_compiled() -> bool:
    """True if the call in progress of a `routing` function is to be compiled."""
    return bool(_thread_state.callback)


def call_compiling(module: Any, args: Any, kwargs: Any) -> Any:
    """Call the module within `routing`, compiled if the caller compiles.

    In DDP only the inner module is compiled: the wrapper communicates with other ranks.
    """
    callback, _thread_state.callback = _thread_state.callback, None
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
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _eval_frame.set_eval_frame(callback)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return _excluded(run)


def _excluded(function: Callable[P, R]) -> Callable[P, R]:
    """Mark the function as torch's `disable` does: its frame is neither compiled nor inlined."""
    marked: Any = function
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    _eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shoal runs it as it is"
    marked._torchdynamo_disable_recursive = True
    return function
