"""Images of dense shards. A push may change any part of such a shard."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import TensorImage
from shoal_server.parameters.images.image import TensorStream
from shoal_server.parameters.images.shard_image import CHUNK_BYTES, Locked, released
from shoal_server.parameters.images.tensor_bytes import DTYPES, as_bytes, describe, from_bytes


class FlatTensors:
    """Tensors as chunks of bytes; no chunk spans two tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], chunk_bytes: int) -> None:
        self.tensors = tensors
        self.described: Sequence[TensorImage] = [describe(*item) for item in tensors.items()]
        self._chunks = [
            (name, at, min(at + chunk_bytes, tensor.nbytes))
            for name, tensor in tensors.items()
            for at in range(0, tensor.nbytes, chunk_bytes)
        ]

    def __len__(self) -> int:
        return len(self._chunks)

    def size_of(self, index: int) -> int:
        _, start, stop = self._chunks[index]
        return stop - start

    def chunks_of(self, name: str) -> Sequence[int]:
        return [index for index, chunk in enumerate(self._chunks) if chunk[0] == name]

    def chunk_bytes_of(self, index: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """A chunk of `tensors`, which must have the same names and sizes."""
        name, start, stop = self._chunks[index]
        return as_bytes(tensors[name])[start:stop]

    def write(self, index: int, data: Buffer) -> None:
        """Raises MalformedMessage if the length is wrong."""
        target = self.chunk_bytes_of(index, self.tensors)
        if len(data) != len(target):
            raise MalformedMessage(
                "a chunk of a shard has another length",
                seen=f"{len(data)} bytes",
                expected=f"{len(target)} bytes",
            )
        target.copy_(from_bytes(data, torch.uint8, (len(data),)))


class FlatImage:
    """An image of tensors. Call `preserve` before each change of them, under their lock."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._flat = flat = FlatTensors(tensors, CHUNK_BYTES)
        self._copies: Mapping[str, Tensor] | None = None
        self._wanted = set(range(len(flat)))
        self.described = flat.described

    def __len__(self) -> int:
        return len(self._flat)

    def size_of(self, index: int) -> int:
        return self._flat.size_of(index)

    def preserve(self) -> None:
        """Copy all tensors, once, unless all chunks are released."""
        if self._copies is None and self._wanted:
            self._copies = {name: each.clone() for name, each in self._flat.tensors.items()}
            if not self._wanted:
                self._copies = {}

    def read(self, index: int) -> Buffer:
        if index not in self._wanted:
            raise released(index)
        copies = self._copies
        tensors = self._flat.tensors if copies is None else copies
        data: Buffer = self._flat.chunk_bytes_of(index, tensors).clone().numpy().data
        return data

    def release(self, index: int) -> None:
        self._wanted.discard(index)
        if not self._wanted:
            self._copies = {}

    def close(self) -> None:
        self._wanted = set()
        self._copies = {}

    @property
    def held_bytes(self) -> int:
        copies = self._copies or {}
        return sum(tensor.nbytes for tensor in copies.values())

    def streams(self, locked: Locked) -> Sequence[TensorStream]:
        return [TensorStream(each, self._pieces(each, locked)) for each in self.described]

    def _pieces(self, described: TensorImage, locked: Locked) -> Iterator[Tensor]:
        dtype = DTYPES[described.dtype]
        for index in self._flat.chunks_of(described.name):
            data = locked(partial(self.read, index))
            yield from_bytes(data, dtype, (len(data) // dtype.itemsize,))
