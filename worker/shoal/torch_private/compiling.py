"""Of torch.compile: the module that it wraps. As in torch 2.13 and 2.15."""

import sys
from typing import Any

from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether the model is what `torch.compile(module)` returns."""
    # It takes seconds to import: only who compiles has done so.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def compiled_in_place(model: Any) -> nn.Module:
    """The module itself, compiled as the wrapper around it is: what `module.compile()` does. Its
    parameters have no prefix, and it may be wrapped anew without being compiled anew."""
    original: Any = model._orig_mod
    original._compiled_call_impl = model.dynamo_ctx(original._call_impl)
    module: nn.Module = original
    return module
