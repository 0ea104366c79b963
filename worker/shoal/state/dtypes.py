"""The dtypes that tensors may have on their way from member to member, by name."""

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name, as in DTYPES."""
    return str(dtype).removeprefix("torch.")
