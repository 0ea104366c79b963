"""Tensors as bytes, with their descriptions."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import CutTensor, TensorImage

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.bool,
    )
}
# Received bytes are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", module=__name__)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, not copied."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()


def from_bytes(data: Buffer, dtype: torch.dtype, shape: Sequence[int], at: int = 0) -> Tensor:
    """A tensor over `data` from position `at` on, not copied."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=at).view(*shape)


def describe(name: str, tensor: Tensor) -> TensorImage:
    return TensorImage(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tensor.shape,
        num_bytes=tensor.nbytes,
    )


def to_message(name: str, tensor: Tensor) -> CutTensor:
    return CutTensor(
        description=describe(name, tensor), data=as_bytes(tensor.contiguous()).numpy().tobytes()
    )


def from_message(message: CutTensor) -> Tensor:
    """Decode what `to_message` encoded, to new memory. Raises MalformedMessage for an unknown
    dtype, or data that do not fit the shape."""
    described = message.description
    dtype = DTYPES.get(described.dtype)
    shape = tuple(described.shape)
    if dtype is None or math.prod(shape) * dtype.itemsize != len(message.data):
        raise MalformedMessage(
            f"tensor {described.name} of a shard does not fit its description",
            seen=f"{described.dtype} {list(shape)} in {len(message.data)} bytes",
            expected=f"one of {', '.join(sorted(DTYPES))}, with as many bytes as its shape needs",
        )
    return from_bytes(bytearray(message.data), dtype, shape)
