"""Models that a script has compiled, wholly or in part, before it distributes them or behind."""

from typing import TYPE_CHECKING

from torch import nn

from shoal.model.module_proxy import shown
from shoal.torch_private.compiling import compiled_in_place, is_compiled, is_compiled_in_place
from shoal_proto.errors import InvalidSpec

if TYPE_CHECKING:
    from shoal.strategies.base import Strategy


def in_place(model: nn.Module) -> nn.Module:
    """The user's module, compiled in place where `torch.compile` has wrapped it."""
    return compiled_in_place(model) if is_compiled(model) else model


def check_compiled(model: nn.Module, strategy: "Strategy") -> None:
    """Raise InvalidSpec for modules that are compiled where none of them is called as it is."""
    compiled = [name for name, part in model.named_modules() if is_compiled_in_place(shown(part))]
    if compiled and not strategy.compiles:
        raise not_compiled(strategy.name, compiled[0])


def not_compiled(strategy: str, module: str) -> InvalidSpec:
    """What is told of a module that is to be compiled where a model is cut by what it computes."""
    return InvalidSpec(
        f"strategy {strategy} cuts a model into parts of its own, which are not compiled",
        seen=f"torch.compile of {module or 'the model'}",
        expected="the model as it is; or a strategy that calls whole modules, such as ddp or fsdp",
    )
