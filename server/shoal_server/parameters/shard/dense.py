"""Dense shards: parameters with their optimizer state and update rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import numpy as np
import torch
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError, InvalidSpec, ShapeMismatch, UnsupportedOptimizer
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.replication_pb2 import DenseSpec, PushRecord, SessionImage
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.codecs.codec import GradientDecoder, new_decoder
from shoal_server.parameters.images.flat_image import FlatImage, FlatTensors
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.images.shard_image import OpenImages
from shoal_server.parameters.optimizers.checks import check_spec
from shoal_server.parameters.shard.gradients import DTYPES, BlockSplitter
from shoal_server.parameters.shard.reply_writer import SHARD_DATA, CopyOut
from shoal_server.parameters.shard.update_rule import UpdateRule
from shoal_server.parameters.shard.versioned import AnyShard, Push, SmallTensors, VersionedShard

VALUES = "values"


@dataclass(frozen=True, kw_only=True)
class DensePush(Push):
    """A push to a dense shard. `gradient` holds the present blocks, then the base values if the
    body `needs_base`. With a codec, `gradient` is encoded, and `batch` has the decoded gradient."""

    blocks: Sequence[int]
    codec: GradientCodec | None = None


@dataclass(frozen=True, kw_only=True)
class DenseValues:
    """Values as of one version, in the writer's messages or frames."""

    version: int
    num_bytes: int
    messages: Sequence[Message | bytes]


class DenseBody:
    kind = "dense"

    def __init__(self, spec: Shard, optimizer: OptimizerSpec, values: bytearray) -> None:
        """Takes ownership of `values`."""
        self.optimizer_spec = optimizer
        self.num_bytes = len(values)
        self._shard_id = spec.shard_id
        self._bytes = memoryview(values)
        self._values = torch.frombuffer(values, dtype=DTYPES[spec.dtype])
        self._block_sizes = [block.num_elements for block in spec.blocks]
        blocks = torch.split(self._values, self._block_sizes)
        self._rule = UpdateRule(optimizer, spec.group, blocks, BlockSplitter(spec))
        self.images = OpenImages[FlatImage]()

    @property
    def needs_base(self) -> bool:
        """True if a push must carry the values that its gradient was computed on."""
        return self._rule.needs_base

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        return sum(tensor.nbytes for tensor in self.flat_tensors().values())

    def regrown_bytes(self, num_rows: int) -> int:
        """Return 0: a dense shard never grows."""
        return 0

    def describe_push(self, push: DensePush, record: PushRecord) -> None:
        gradient = push.gradient
        if push.codec is not None:
            record.codec.CopyFrom(push.codec)
            assert isinstance(push.batch, memoryview)
            gradient = push.batch
        self._rule.check(push.blocks, gradient, record.staleness, self._shard_id)
        record.blocks.extend(push.blocks)
        record.lr = self._rule.lr(push.lr, record.staleness)

    def read_batch(self, record: PushRecord, data: Buffer) -> Buffer:
        if not record.HasField("codec"):
            return data
        return self.decode(self.decoder(record.codec, record.blocks), data)

    def decoder(self, codec: GradientCodec, blocks: Sequence[int]) -> GradientDecoder:
        """Return the decoder for a compressed gradient. Raises InvalidSpec or ShapeMismatch."""
        if self.needs_base:
            raise InvalidSpec(
                f"compressed gradients of shard {self._shard_id} cannot be corrected for delay",
                seen=f"codec {codec.kind!r} in a job that compensates for delay",
                expected="uncompressed gradients, with the values that they were computed on",
                fix="Train without compression, or with another staleness policy.",
            )
        sizes = [self._block_sizes[b] for b in blocks]
        plain_bytes = sum(sizes) * self._values.itemsize
        return new_decoder(codec, sizes, plain_bytes=plain_bytes, shard_id=self._shard_id)

    def decode(self, decoder: GradientDecoder, data: Buffer) -> memoryview:
        """Decode a gradient, in any thread. Raises ShapeMismatch or MalformedMessage."""
        if len(data) != decoder.num_bytes:
            raise ShapeMismatch(
                f"the compressed gradient for shard {self._shard_id} has another length",
                seen=f"{len(data)} bytes",
                expected=f"{decoder.num_bytes} bytes",
            )
        values = decoder.decode(data).to(self._values.dtype)
        return memoryview(values.view(torch.uint8).numpy().data) if len(values) else memoryview(b"")

    def growth_bytes(self, batch: Buffer, at_unix_s: float) -> int:
        return 0

    def apply(self, record: PushRecord, batch: Buffer) -> bytes:
        for image in self.images():
            image.preserve()
        self._rule.apply(record, batch)
        return b""

    def fates(self, session: str, sequence: int) -> bytes:
        return b""

    def ended_sessions(self, is_live: Callable[[str], bool]) -> Sequence[str]:
        return ()

    def values(
        self, version: int, known_version: int = 0, writer: CopyOut | None = None
    ) -> DenseValues:
        """Return the values, in ShardData messages if there is no writer; no values if
        `known_version` is `version`."""
        if known_version == version:
            return DenseValues(version=version, num_bytes=0, messages=())
        writer = writer or SHARD_DATA.writer(self._shard_id, self.num_bytes)
        messages = writer(self._shard_id, self._bytes)
        return DenseValues(version=version, num_bytes=self.num_bytes, messages=messages)

    def spec_message(self, spec: Shard) -> DenseSpec:
        return DenseSpec(shard=spec, optimizer=self.optimizer_spec)

    def image(self) -> tuple[FlatImage, SmallTensors]:
        content = FlatImage(self.flat_tensors())
        self.images.add(content)
        return content, _no_small_tensors

    def flat(self, chunk_bytes: int) -> FlatTensors:
        """Return all tensors, not copied."""
        return FlatTensors(self.flat_tensors(), chunk_bytes)

    def row_ids(self, start: int, num_bytes: int) -> tuple[bytes, int]:
        return b"", start

    def rows_of(self, row_ids: bytes) -> tuple[NDArray[np.int64], Sequence[Tensor]]:
        return np.zeros(1, np.int64), ()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy another body's optimizer state. Raises InternalError if it does not fit."""
        self._rule.load_state(state)

    def flat_tensors(self) -> Mapping[str, Tensor]:
        return {VALUES: self._values, **self._rule.state()}


DenseShard = VersionedShard[DenseBody]


def new_dense_shard(spec: Shard, optimizer: OptimizerSpec, values: bytearray) -> DenseShard:
    """Make a shard at version 1. Takes ownership of `values`."""
    return VersionedShard(spec, DenseBody(spec, optimizer, values))


def is_dense(shard: AnyShard) -> TypeGuard[DenseShard]:
    """True for a shard of parameters."""
    return isinstance(shard.body, DenseBody)


def dense_from_image(image: LoadedImage) -> DenseShard:
    """Restore a shard from its image. Raises InternalError if the image does not fit, or has an
    unknown dtype or optimizer."""
    spec = _dense_spec(image)
    if spec.shard.dtype not in DTYPES:
        raise InternalError(
            f"the image of shard {image.shard_id} has values of an unknown type",
            seen=repr(spec.shard.dtype),
            expected=f"one of {', '.join(DTYPES)}",
        )
    try:
        check_spec(spec.optimizer, 1 + spec.shard.group)
    except (InvalidSpec, UnsupportedOptimizer) as error:
        raise InternalError(
            f"the image of shard {image.shard_id} has an optimizer that this server does not know",
            seen=str(error),
            expected="an optimizer that every server knows",
            fix="Run the same version of Shoal on every server.",
        ) from error
    num_elements = sum(block.num_elements for block in spec.shard.blocks)
    values = image.tensors.get(VALUES)
    if image.kind != DenseBody.kind or values is None or values.numel() != num_elements:
        raise InternalError(
            f"the image of shard {image.shard_id} does not belong to a dense shard",
            seen=f"{image.kind!r}, {0 if values is None else values.numel()} values",
            expected=f"{DenseBody.kind!r}, {num_elements} values",
        )
    storage = bytearray(values.view(torch.uint8).numpy().data)
    body = DenseBody(spec.shard, spec.optimizer, storage)
    body.load_state({n: t for n, t in image.tensors.items() if n != VALUES})
    return VersionedShard.restored(spec.shard, body, image.version, image.sessions)


def bytes_to_make(spec: Shard, optimizer: OptimizerSpec) -> int:
    """Return the `memory_bytes` of a new dense shard, extrapolated from two tiny ones: they are
    linear in the number of elements."""

    def bytes_of(block_size: int) -> int:
        values = torch.zeros(len(spec.blocks) * block_size, dtype=DTYPES[spec.dtype])
        blocks = torch.split(values, [block_size] * len(spec.blocks))
        rule = UpdateRule(optimizer, spec.group, blocks, BlockSplitter(spec))
        return values.nbytes + sum(tensor.nbytes for tensor in rule.state().values())

    if not spec.blocks:
        return 0
    num_elements, num_blocks = sum(b.num_elements for b in spec.blocks), len(spec.blocks)
    least = bytes_of(1)
    return least + (bytes_of(2) - least) * (num_elements - num_blocks) // num_blocks


def _no_small_tensors(sessions: Sequence[SessionImage]) -> Mapping[str, Tensor]:
    return {}


def _dense_spec(image: LoadedImage) -> DenseSpec:
    try:
        return DenseSpec.FromString(image.spec)
    except DecodeError as error:
        raise InternalError(
            f"the specification in the image of shard {image.shard_id} cannot be read",
            seen=repr(error),
            expected="a DenseSpec",
        ) from error
