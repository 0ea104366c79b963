"""Copies replay pushes in their compressed form, and have the same values bit for bit."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest
import torch
from support.clusters.snapshot_world import loaded
from support.models.dense_shards import new_shard

from shoal.compression import COMPRESSIONS, find_compression
from shoal.compression.push_encoder import PushBlock
from shoal.embedding.row_codec import RowCodec
from shoal_proto.errors import InvalidSpec, NonFiniteGradient, ShapeMismatch
from shoal_proto.pieces import Buffer, ReadPiece
from shoal_proto.row_hash import shard_of
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import PushHeader, PushItem
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.parameters.codecs.codec import GradientDecoder
from shoal_server.parameters.service.push import DenseTarget, PushKind, PushPart
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import ChunkAssembler
from shoal_server.parameters.shard.dense import DensePush, dense_from_image, new_dense_shard
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.reply_writer import ReplyWriter
from shoal_server.parameters.shard.workers import INLINE_BYTES, Workers
from shoal_server.parameters.tables.shard import TablePush, new_table_shard, table_from_image

SHAPES = {"w": torch.Size([64, 32]), "b": torch.Size([9])}
OPTIMIZERS: Mapping[str, HyperParameters] = {
    "sgd": HyperParameters(lr=0.1, momentum=0.9),
    "adam": HyperParameters(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8),
}


def any_session(session: str) -> bool:
    return True


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_copy_replays_compressed_pushes(name: str, kind: str, dtype: str) -> None:
    """The records of the copy have the pushed bytes. A push that is not smaller than the values is
    refused."""
    blocks = [Block(parameter=n, num_elements=shape.numel()) for n, shape in SHAPES.items()]
    spec = Shard(shard_id=1, epoch=1, dtype=dtype, blocks=blocks)
    optimizer = OptimizerSpec(kind=kind, groups=[OPTIMIZERS[kind]])
    torch_dtype = getattr(torch, dtype)
    size = sum(shape.numel() for shape in SHAPES.values())
    shard = new_dense_shard(spec, optimizer, bytearray(size * torch_dtype.itemsize))
    records: list[UpdateRecord] = []
    copy = dense_from_image(loaded(shard, records.append))
    encoder = find_compression(name).push_encoder()
    described = [
        PushBlock(parameter=n, offset=0, num_elements=shape.numel(), shape=shape)
        for n, shape in SHAPES.items()
    ]
    for sequence in range(1, 5):
        made = encoder.encode(torch.randn(size), described)
        data = made.data.view(torch.uint8).numpy().tobytes()
        if len(data) >= size * torch_dtype.itemsize:
            with pytest.raises(ShapeMismatch, match="fewer than"):
                shard.body.decoder(made.codec, (0, 1))
            return
        batch = shard.body.decode(shard.body.decoder(made.codec, (0, 1)), data)
        push = DensePush(
            session="s",
            sequence=sequence,
            epoch=1,
            base_version=sequence,
            lr=None,
            gradient=data,
            blocks=(0, 1),
            codec=made.codec,
            batch=batch,
        )
        shard.push(push, any_session)
        assert bytes(records[-1].data) == data
        copy.replay(records[-1])
    seen, wanted = loaded(copy).tensors, loaded(shard).tensors
    for key, tensor in wanted.items():
        assert torch.equal(seen[key], tensor), key
    assert bool(wanted["values"].any())


@dataclass(frozen=True)
class Overwritten:
    """A decoder of a gradient whose sender changes its memory once it is decoded."""

    decoder: GradientDecoder
    memory: bytearray

    @property
    def num_bytes(self) -> int:
        return self.decoder.num_bytes

    def decode(self, data: Buffer) -> torch.Tensor:
        values = self.decoder.decode(data)
        self.memory[:] = torch.full((len(values),), 7.0, dtype=torch.float16).numpy().tobytes()
        return values


async def test_a_copy_replays_the_decoded_bytes_of_a_changed_push() -> None:
    """The push comes through memory that the sender shares with the server."""
    shard = new_shard("sgd", "float32")
    records: list[UpdateRecord] = []
    copy = dense_from_image(loaded(shard, records.append))
    size = sum(block.num_elements for block in shard.spec.blocks)
    pushed = torch.ones(size, dtype=torch.float16).numpy().tobytes()
    memory = bytearray(pushed)
    codec = GradientCodec(kind="fp16", num_bytes=len(memory))
    item = PushItem(shard_id=shard.shard_id, epoch=shard.spec.epoch, base_version=1, codec=codec)
    blocks = range(len(shard.spec.blocks))
    decoder = Overwritten(shard.body.decoder(codec, blocks), memory)
    part = PushPart(
        item=item,
        replica=ShardReplica("job", shard, ReplicaRole.PRIMARY, shard.spec.epoch),
        assembler=ChunkAssembler(shard.spec, encoded_bytes=len(memory)),
        target=DenseTarget(shard=shard, blocks=blocks, lr=None, decoder=decoder),
        cost_bytes=INLINE_BYTES + 1,
    )
    with ThreadPoolExecutor(1) as pool:
        kind = PushKind(
            PushHeader(sequence=1, shards=[item]),
            "s",
            any_session,
            catalog=cast(Catalog, None),
            maker=cast(TableMaker, None),
            memory=cast(Memory, None),
            run=Workers(pool),
            reply_writer=cast(ReplyWriter, None),
        )
        piece = ReadPiece(shard.shard_id, 0, memoryview(memory), None, is_shared=True)
        part.assembler.take(piece)
        await kind.apply(part)
    assert bytes(memory) != pushed and bytes(records[0].data) == pushed
    copy.replay(records[0])
    assert torch.equal(loaded(copy).tensors["values"], loaded(shard).tensors["values"])


TABLE = TableSpec(
    name="t",
    dim=16,
    dtype="float32",
    num_shards=1,
    initialiser=Initialiser(kind="normal", spread=1.0),
    optimizer=RowOptimizer(kind="adagrad", lr=0.1, eps=1e-10),
)
IDS = torch.tensor([3, 5, 8], dtype=torch.int64)


def table_push(gradient: bytes, codec: GradientCodec | None, sequence: int = 1) -> TablePush:
    return TablePush(
        session="s",
        sequence=sequence,
        epoch=1,
        base_version=1,
        lr=None,
        gradient=gradient,
        row_ids=IDS.numpy().tobytes(),
        births=bytes(24),
        step=sequence,
        codec=codec,
        at_unix_s=1.0,
    )


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8"])
def test_rows_step_on_their_decoded_gradients(kind: str) -> None:
    """The values equal those of a push of the decoded gradients, and those of a copy."""
    assert shard_of(3, 1) == 0
    new = partial(new_table_shard, Shard(shard_id=2, epoch=1, table="t"), TABLE)
    shard, plain = new(), new()
    records: list[UpdateRecord] = []
    copy = table_from_image(loaded(shard, records.append))
    codec = RowCodec(kind)
    values_rc = torch.randn(3, 16)
    data = codec.encode(values_rc)[0].contiguous().numpy().tobytes()
    shard.push(table_push(data, codec.message), any_session)
    assert len(records[0].data) == 3 * (20 if kind == "int8" else 32)
    copy.replay(records[0])
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if kind == "int8":
        scales = values_rc.abs().amax(1, keepdim=True) / 127
        rounded = (values_rc / scales).round() * scales
    else:
        rounded = values_rc.to(half[kind]).float()
    plain.push(table_push(rounded.numpy().tobytes(), None), any_session)
    ids = IDS.numpy().tobytes()
    found = [each.read(partial(each.body.look_up, ids)).values for each in (shard, copy, plain)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "data", "error", "message"),
    [
        ("one-bit", bytes(6), InvalidSpec, "no codec 'one-bit'"),
        ("int8", b"\x00\x00\xc0\x7f" + bytes([1]) * 16 + bytes(40), NonFiniteGradient, "row 3"),
    ],
)
def test_invalid_gradients_of_rows_change_nothing(
    kind: str, data: bytes, error: type[Exception], message: str
) -> None:
    shard = new_table_shard(Shard(shard_id=2, epoch=1, table="t"), TABLE)
    with pytest.raises(error, match=message):
        shard.push(table_push(data, GradientCodec(kind=kind)), any_session)
    assert shard.version == 1
