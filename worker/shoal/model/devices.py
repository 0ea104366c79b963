"""What the collectives of a model's members depend on."""

import torch
from torch import nn


def devices_of(model: nn.Module) -> dict[str, str]:
    """What the members' collectives depend on: the kind of the model's devices, and NCCL's version
    where that is what they run over."""
    kinds = sorted({parameter.device.type for parameter in model.parameters()})
    fields = {"device": ",".join(kinds)}
    if "cuda" in kinds and torch.distributed.is_nccl_available():
        fields["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return fields
