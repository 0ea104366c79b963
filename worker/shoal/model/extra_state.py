"""State of modules other than parameters and buffers: torch's `get_extra_state`."""

from torch import nn

from shoal_proto.errors import InvalidSpec


def refuse_extra_state(model: nn.Module) -> None:
    """Raise InvalidSpec for modules with extra state. Members hand over only tensors: a joiner, and
    a new generation, would have the extra state with which the script made the module."""
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if names:
        raise InvalidSpec(
            "modules have a state that is neither parameter nor buffer",
            seen=f"get_extra_state of {', '.join(names[:5])}",
            expected="tensors, which members can hand over",
            fix="Keep it in a persistent buffer: register_buffer(name, tensor).",
        )
