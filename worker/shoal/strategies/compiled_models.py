"""Models that a script has compiled, wholly or in part."""

from torch import nn

from shoal.torch_private.compiling import compiled_in_place, is_compiled
from shoal_proto.errors import InvalidSpec


def in_place(model: nn.Module) -> nn.Module:
    """Return the user's module, compiled in place if `torch.compile` has wrapped it."""
    return compiled_in_place(model) if is_compiled(model) else model


def not_compiled(strategy: str, module: str) -> InvalidSpec:
    """Build the error for a compiled wrapper of a model that is never called as a whole."""
    return InvalidSpec(
        f"strategy {strategy} cuts a model into parts: a wrapper around the model compiles"
        " none of them",
        seen=f"torch.compile of {module or 'the distributed model'}",
        expected="torch.compile(model) before distribute, or model.compile() after it",
    )
