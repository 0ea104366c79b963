"""Device that a model is trained on, and properties that its collectives depend on."""

import torch
from torch import nn

from shoal_proto.errors import InvalidSpec


def refuse_default_device() -> None:
    """Raise InvalidSpec if new tensors of the calling thread are not on the CPU, where the session
    needs its own: indices of samples, copies for checkpoints, messages."""
    default = torch.get_default_device()
    if default.type != "cpu":
        raise InvalidSpec(
            "a session trains with the CPU as the default device of new tensors",
            seen=f"torch.get_default_device() is {default}",
            expected="cpu",
            fix="Replace torch.set_default_device(...) by model.to(...), or by"
            " `with torch.device(...):` around the code that makes the model.",
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, by default the CPU. For a model on the meta
    device, return this process's GPU if any, else the CPU."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def devices_of(model: nn.Module, backend: str) -> dict[str, str]:
    """Return the properties that collectives depend on: the kinds of the model's devices. For a
    model on CUDA also the version of NCCL, if `backend` is "nccl" or "" (not known)."""
    kinds = sorted({parameter.device.type for parameter in model.parameters()} - {"meta"})
    kinds = kinds or [device_of(model).type]
    fields = {"device": ",".join(kinds)}
    if "cuda" in kinds and backend in ("nccl", "") and torch.distributed.is_nccl_available():
        fields["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return fields
