"""Which GradScalers a session can take over, and under which strategies."""

import torch

from shoal.state.registered.objects import RegisteredState
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec

KNOWN = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


def check_scaler(name: str, registered: RegisteredState, stateful: object) -> None:
    """Raise InvalidSpec for a GradScaler that is to be registered and cannot be taken over."""
    if not isinstance(stateful, torch.amp.GradScaler) or not stateful.is_enabled():
        return
    if type(stateful) not in KNOWN:
        raise InvalidSpec(
            f"{name!r} is an unknown kind of GradScaler",
            seen=type(stateful).__qualname__,
            expected="torch.amp.GradScaler itself, whose scale the session moves on",
        )
    if registered.scaler is not None:
        raise InvalidSpec(f"{name!r} is a second GradScaler", expected="one for the session's loss")


def check_scales(strategy: Strategy, registered: RegisteredState) -> None:
    """Raise InvalidSpec where a scaler is registered for a strategy that cannot unscale."""
    if registered.scaler is not None and not strategy.unscales:
        raise InvalidSpec(
            f"strategy {strategy.name} does not unscale gradients",
            seen="a registered GradScaler",
            expected="ddp or zero1 without compression, zero2, fsdp or tensor without cpu_offload;"
            " or bfloat16, which needs no scaling",
        )
