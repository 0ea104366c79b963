"""What is read of a cut is the shard as it was then, whatever is pushed, made, evicted or read
meanwhile; and a shard built from its chunks is that shard, to the last bit."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.table_specs import OPTIMIZERS, live, look_up, new_push, new_shard, new_table

from shoal_proto.errors import InternalError, MalformedMessage
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.replication_pb2 import CutHeader
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_proto.v1.tables_pb2 import Admission, Eviction, Initialiser, TableSpec
from shoal_server.parameters.cuts import flat_cut, shard_cut
from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.shard.dense import DensePush, DenseShard, new_dense_shard
from shoal_server.parameters.shard.image import Image
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.tables import admission, builder, row_cut
from shoal_server.parameters.tables.builder import ShardBuilder
from shoal_server.parameters.tables.restore import restore
from shoal_server.parameters.tables.shard import TableShard

START_S = 1e9
SMALL_CHUNK_BYTES = 512


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small shard has many."""
    for module in (shard_cut, flat_cut, row_cut):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(builder, "LEAST_CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(admission, "SKETCH_WIDTH", 64)


def bits(image: Image) -> tuple[int, bytes, dict[str, bytes], Sequence[object]]:
    """All that an image says, for comparing."""
    tensors = {
        name: bytes(str(tensor.dtype), "ascii") + tensor.contiguous().numpy().tobytes()
        for name, tensor in image.tensors.items()
    }
    return image.version, image.spec, tensors, list(image.sessions)


class Table:
    """A shard of a table with all that rows may have, under random pushes."""

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


def built(cut: ShardCut, header: CutHeader | None = None) -> AnyShard:
    made = ShardBuilder(header or cut.header)
    assert made.num_chunks == cut.num_chunks
    while not made.is_whole:
        made.add(cut.chunk(made.next_chunk))
    return made.finish()


@pytest.mark.sampled()
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(("world", "kind"), WORLDS)
def test_what_is_built_from_a_cut_is_the_shard_as_it_was(
    world: type[Table | Dense], kind: str, seed: int
) -> None:
    """Several cuts are open at a time; chunks are read twice, in between pushes, and let go of at
    random once they are taken."""
    run = world(kind, seed)
    for _ in range(10):
        run.push()
    with ExitStack() as stack:
        pending: list[tuple[ShardCut, ShardBuilder, AnyShard | None, object]] = []
        for _ in range(3):
            wanted = bits(run.shard.image())
            cut = stack.enter_context(run.shard.cut())
            header = CutHeader.FromString(cut.header.SerializeToString())
            pending.append((cut, ShardBuilder(header), None, wanted))
            for _ in range(int(run.random.integers(0, 4))):
                run.push()
        while not all(made.is_whole for _, made, _, _ in pending):
            for cut, made, _, _ in pending:
                if made.is_whole:
                    continue
                index = made.next_chunk
                first = bytes(cut.chunk(index))
                assert len(first) == cut.num_bytes(index) == made.num_bytes(index)
                if run.random.random() < 0.5:
                    run.push()
                assert bytes(cut.chunk(index)) == first
                made.add(first)
                if run.random.random() < 0.5:
                    cut.release(index)
        for _, made, _, wanted in pending:
            copy = made.finish()
            assert bits(copy.image()) == wanted
            assert copy.version == made.header.version
    assert run.shard.body.cuts.held_bytes == 0


@pytest.mark.parametrize("world", [Table("adam", 3), Dense("adam", 3)])
def test_a_built_shard_goes_on_as_the_first_one_does(world: Table | Dense) -> None:
    """Rows that are made, evicted and found again, and retries, come to the same in both."""
    for _ in range(30):
        world.push()
    records = []
    with world.shard.cut(records.append) as cut:
        for _ in range(10):
            world.push()
        copy = built(cut)
    for _ in range(40):
        world.push()
    assert [record.push.version for record in records] == list(range(32, 82))
    for record in records:
        copy.replay(record)
    assert bits(copy.image()) == bits(world.shard.image())


@pytest.mark.parametrize("world", [Table("adam", 5), Dense("adam", 5)])
def test_a_file_is_of_the_shard_as_it_was(world: Table | Dense) -> None:
    """Although a push comes between any two of its pieces."""
    for _ in range(30):
        world.push()
    wanted = bits(world.shard.image())
    with world.shard.cut() as cut:
        pieces = []
        for piece in image_file.pieces(cut):
            pieces.append(bytes(piece))
            world.push()
    data = b"".join(pieces)
    digest, shard_id = image_file.digest(data), world.shard.shard_id
    image = image_file.from_bytes(data, sha256=digest, file="f", shard_id=shard_id)
    assert bits(restore(image).image()) == wanted


def test_only_what_a_push_touches_is_copied_aside() -> None:
    """And nothing of what was released, or once all cuts are closed."""
    table = Table("adam", 1)
    for _ in range(60):
        table.push()
    shard = table.shard
    with shard.cut() as cut:
        before = cut.held_bytes
        table.push()
        assert before < cut.held_bytes < before + shard.memory_bytes // 2
        for index in range(cut.num_chunks):
            cut.release(index)
        held_bytes = cut.held_bytes
        table.push()
        assert cut.held_bytes == held_bytes
        aside_bytes, with_cut = shard.body.cuts.held_bytes, shard.held_bytes
    assert 0 < aside_bytes == with_cut - shard.held_bytes
    table.push()
    assert shard.body.cuts.held_bytes == 0


def test_a_chunk_that_was_let_go_of_is_refused() -> None:
    """It may be another one's bytes by now."""
    table = Table("sgd", 1)
    for _ in range(10):
        table.push()
    cut = table.shard.cut()
    last = cut.num_chunks - 1
    cut.release(last)
    with pytest.raises(InternalError, match="released"):
        cut.chunk(last)
    cut.close()
    cut.close()
    for index in (0, last):
        with pytest.raises(InternalError, match="closed"):
            cut.chunk(index)


def test_a_builder_takes_what_it_expects_and_nothing_else() -> None:
    """It is as before when it refuses, and goes on with the right chunk."""
    table = Table("adagrad", 1)
    for _ in range(10):
        table.push()
    with table.shard.cut() as cut:
        made = ShardBuilder(cut.header)
        with pytest.raises(MalformedMessage, match="not the next chunk"):
            made.add(bytes(cut.chunk(0)) + b"x")
        with pytest.raises(InternalError, match="not whole"):
            made.finish()
        while not made.is_whole:
            made.add(cut.chunk(made.next_chunk))
        with pytest.raises(MalformedMessage, match="not the next chunk"):
            made.add(b"x")
        assert bits(made.finish().image()) == bits(table.shard.image())


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
def test_a_header_of_something_else_is_refused(spoil: object) -> None:
    """With what was seen, before memory is taken for it."""
    for world in (Table("adam", 1), Dense("adam", 1)):
        world.push()
        with world.shard.cut() as cut:
            header = CutHeader.FromString(cut.header.SerializeToString())
        assert callable(spoil)
        spoil(header)
        with pytest.raises(MalformedMessage, match="layout that this server does not know"):
            ShardBuilder(header)
