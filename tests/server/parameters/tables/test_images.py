"""Images of shards: an image has the shard's content at one version, whatever is pushed meanwhile.

A shard built from its chunks equals that content, bit for bit.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters.snapshot_world import loaded
from support.models.table_specs import OPTIMIZERS, live, look_up, new_push, new_shard, new_table

from shoal_proto.errors import InternalError, MalformedMessage
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.replication_pb2 import CutHeader
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_proto.v1.tables_pb2 import Admission, Eviction, Initialiser, TableSpec
from shoal_server.parameters.images import flat_image, shard_image
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.shard.dense import DensePush, DenseShard, new_dense_shard
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.tables import admission, builder, row_image
from shoal_server.parameters.tables.builder import ShardBuilder
from shoal_server.parameters.tables.restore import restore
from shoal_server.parameters.tables.shard import TableShard

START_S = 1e9
SMALL_CHUNK_BYTES = 512


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that a small shard has many of them."""
    for module in (shard_image, flat_image, row_image):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(builder, "LEAST_CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(admission, "SKETCH_WIDTH", 64)


def bits(image: LoadedImage) -> tuple[int, bytes, dict[str, bytes], Sequence[object]]:
    """Return everything in an image, for comparison."""
    tensors = {
        name: bytes(str(tensor.dtype), "ascii") + tensor.contiguous().numpy().tobytes()
        for name, tensor in image.tensors.items()
    }
    return image.version, image.spec, tensors, list(image.sessions)


class Table:
    """A shard of a table with all features of rows, under random pushes."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.shard: TableShard = new_shard(self.spec(kind))
        self.now_s, self.num_pushes = START_S, 0

    @staticmethod
    def spec(kind: str) -> TableSpec:
        return new_table(
            dim=5,
            initialiser=Initialiser(kind="normal", spread=0.1),
            optimizer=OPTIMIZERS[kind],
            admission=Admission(kind="count", min_pushes=2),
            eviction=Eviction(max_idle_s=40.0, oldest_when_full=True),
            max_rows=200,
        )

    def push(self) -> None:
        ids = self.random.integers(0, 400, self.random.integers(1, 60))
        births, _ = look_up(self.shard, ids)
        self.num_pushes += 1
        self.now_s += float(self.random.choice([0.0, 1.0, 7.0]))
        push = new_push(
            ids,
            self.random.standard_normal((len(ids), 5), np.float32),
            births=births,
            session=f"s{self.num_pushes % 3}",
            sequence=self.num_pushes,
            step=self.num_pushes,
            at_unix_s=self.now_s,
        )
        self.shard.push(push, live)


class Dense:
    """A shard of parameters under random pushes to some of its blocks."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        blocks = [Block(parameter=str(i), num_elements=size) for i, size in enumerate((7, 300, 9))]
        spec = Shard(shard_id=7, epoch=1, dtype="float32", blocks=blocks)
        hyper = HyperParameters(lr=0.1, momentum=0.9, beta1=0.9, beta2=0.99, eps=1e-8)
        values = bytearray(self.random.standard_normal(316).astype(np.float32).tobytes())
        optimizer = OptimizerSpec(kind=kind, groups=[hyper])
        self.shard: DenseShard = new_dense_shard(spec, optimizer, values)
        self.num_pushes = 0

    def push(self) -> None:
        self.num_pushes += 1
        chosen = [b for b in range(3) if self.random.random() < 0.7]
        size = sum((7, 300, 9)[b] for b in chosen)
        push = DensePush(
            session=f"s{self.num_pushes % 3}",
            sequence=self.num_pushes,
            epoch=1,
            base_version=self.shard.version,
            lr=None,
            blocks=chosen,
            gradient=self.random.standard_normal(size).astype(np.float32).tobytes(),
        )
        self.shard.push(push, live)


WORLDS = [(Table, kind) for kind in sorted(OPTIMIZERS)] + [(Dense, "sgd"), (Dense, "adam")]


def built(image: ShardImage, header: CutHeader | None = None) -> AnyShard:
    made = ShardBuilder(header or image.header)
    assert made.num_chunks == image.num_chunks
    while not made.is_complete:
        made.add(image.chunk(made.next_chunk))
    return made.finish()


@pytest.mark.long
@pytest.mark.sampled()
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(("world", "kind"), WORLDS)
def test_a_shard_built_from_an_image_equals_the_shard_at_its_version(
    world: type[Table | Dense], kind: str, seed: int
) -> None:
    """Three images are open at a time. Each chunk is read twice, with pushes in between, and some
    are released after that."""
    run = world(kind, seed)
    for _ in range(10):
        run.push()
    with ExitStack() as stack:
        pending: list[tuple[ShardImage, ShardBuilder, AnyShard | None, object]] = []
        for _ in range(3):
            wanted = bits(loaded(run.shard))
            image = stack.enter_context(run.shard.image())
            header = CutHeader.FromString(image.header.SerializeToString())
            pending.append((image, ShardBuilder(header), None, wanted))
            for _ in range(int(run.random.integers(0, 4))):
                run.push()
        while not all(made.is_complete for _, made, _, _ in pending):
            for image, made, _, _ in pending:
                if made.is_complete:
                    continue
                index = made.next_chunk
                first = bytes(image.chunk(index))
                assert len(first) == image.num_bytes(index) == made.num_bytes(index)
                if run.random.random() < 0.5:
                    run.push()
                assert bytes(image.chunk(index)) == first
                made.add(first)
                if run.random.random() < 0.5:
                    image.release(index)
        for _, made, _, wanted in pending:
            copy = made.finish()
            assert bits(loaded(copy)) == wanted
            assert copy.version == made.header.version
    assert run.shard.body.images.held_bytes == 0


@pytest.mark.parametrize("world", [Table("adam", 3), Dense("adam", 3)])
def test_a_built_shard_replays_later_pushes(world: Table | Dense) -> None:
    """The built shard then equals the first one, bit for bit."""
    for _ in range(30):
        world.push()
    records = []
    world.shard.subscribe(records.append)
    with world.shard.image() as image:
        for _ in range(10):
            world.push()
        copy = built(image)
    for _ in range(40):
        world.push()
    assert [record.push.version for record in records] == list(range(32, 82))
    for record in records:
        copy.replay(record)
    assert bits(loaded(copy)) == bits(loaded(world.shard))


@pytest.mark.sampled()
@pytest.mark.parametrize("world", [Table("adam", 5), Dense("adam", 5)])
def test_an_image_file_equals_the_shard_at_its_version(world: Table | Dense) -> None:
    """The shard gets a push between any two of the file's pieces."""
    for _ in range(30):
        world.push()
    wanted = bits(loaded(world.shard))
    with world.shard.image() as image:
        pieces = []
        for piece in image_file.pieces(image):
            pieces.append(bytes(piece))
            world.push()
    data = b"".join(pieces)
    digest, shard_id = image_file.digest(data), world.shard.shard_id
    image = image_file.from_bytes(data, sha256=digest, file="f", shard_id=shard_id)
    assert bits(loaded(restore(image))) == wanted


def test_only_data_that_a_push_changes_is_copied_for_an_image() -> None:
    """Released chunks are not copied, and nothing is once all images are closed."""
    table = Table("adam", 1)
    for _ in range(60):
        table.push()
    shard = table.shard
    with shard.image() as image:
        before = image.held_bytes
        table.push()
        assert before < image.held_bytes < before + shard.memory_bytes // 2
        for index in range(image.num_chunks):
            image.release(index)
        held_bytes = image.held_bytes
        table.push()
        assert image.held_bytes == held_bytes
        aside_bytes, with_image = shard.body.images.held_bytes, shard.held_bytes
    assert 0 < aside_bytes == with_image - shard.held_bytes
    table.push()
    assert shard.body.images.held_bytes == 0


def test_a_released_chunk_cannot_be_read() -> None:
    """The shard may have changed since. The same holds for a closed image."""
    table = Table("sgd", 1)
    for _ in range(10):
        table.push()
    image = table.shard.image()
    last = image.num_chunks - 1
    image.release(last)
    with pytest.raises(InternalError, match="released"):
        image.chunk(last)
    image.close()
    image.close()
    for index in (0, last):
        with pytest.raises(InternalError, match="closed"):
            image.chunk(index)


def test_a_builder_accepts_only_the_next_chunk() -> None:
    """The builder is unchanged after a refusal, and continues with the right chunk."""
    table = Table("adagrad", 1)
    for _ in range(10):
        table.push()
    with table.shard.image() as image:
        made = ShardBuilder(image.header)
        with pytest.raises(MalformedMessage, match="not the next chunk"):
            made.add(bytes(image.chunk(0)) + b"x")
        with pytest.raises(InternalError, match="not whole"):
            made.finish()
        while not made.is_complete:
            made.add(image.chunk(made.next_chunk))
        with pytest.raises(MalformedMessage, match="not the next chunk"):
            made.add(b"x")
        assert bits(loaded(made.finish())) == bits(loaded(table.shard))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header: header.tensors.pop(),
        lambda header: header.ClearField("tensors"),
        lambda header: setattr(header.tensors[0], "dtype", "float16"),
        lambda header: header.tensors[0].shape.__setitem__(0, 2**40),
        lambda header: setattr(header, "kind", "sparse"),
        lambda header: setattr(header, "chunk_bytes", 0),
        lambda header: setattr(header, "chunk_bytes", 2**31),
        lambda header: setattr(header, "rest_bytes", 2**40),
        lambda header: setattr(header, "spec", b"\xff"),
    ],
)
def test_an_invalid_header_is_refused(spoil: object) -> None:
    """The error comes before memory is allocated."""
    for world in (Table("adam", 1), Dense("adam", 1)):
        world.push()
        with world.shard.image() as image:
            header = CutHeader.FromString(image.header.SerializeToString())
        assert callable(spoil)
        spoil(header)
        with pytest.raises(MalformedMessage, match=r"layout that this server does not|too much"):
            ShardBuilder(header)
