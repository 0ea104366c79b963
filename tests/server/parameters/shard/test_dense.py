"""Dense shards: a push is applied as a whole or not at all, and never twice."""

import threading
from functools import partial

import pytest
import torch

from shoal_proto.errors import (
    ForgottenPush,
    MalformedMessage,
    NonFiniteGradient,
    ShapeMismatch,
    ShoalError,
    WrongEpoch,
)
from shoal_proto.pieces import Buffer
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import PushReply, ShardData
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.shard.dense import DensePush, DenseShard, DenseValues, new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.reply_writer import in_messages
from shoal_server.parameters.shard.sessions import MAX_OUTCOMES
from shoal_server.parameters.shard.versioned import STALENESS_BUCKETS

TO_REPLIES = in_messages(PushReply)
NUM_ELEMENTS = 1000


def new_shard(num_elements: int = NUM_ELEMENTS, dtype: str = "float32") -> DenseShard:
    """Return a shard of zeros in two parameters, with plain SGD: a push of -1 adds 1 to each
    value."""
    half = num_elements // 2
    blocks = [
        Block(parameter="left", num_elements=half),
        Block(parameter="right", offset=64, num_elements=num_elements - half),
    ]
    spec = Shard(shard_id=7, epoch=3, dtype=dtype, blocks=blocks)
    optimizer = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
    size = torch.zeros((), dtype=getattr(torch, dtype)).element_size()
    return new_dense_shard(spec, optimizer, bytearray(num_elements * size))


def gradient(value: float, num_elements: int = NUM_ELEMENTS) -> bytes:
    return torch.full((num_elements,), value).numpy().tobytes()


def a_push(sequence: int = 1, **changes: object) -> DensePush:
    fields: dict[str, object] = {
        "session": "s",
        "sequence": sequence,
        "epoch": 3,
        "base_version": 1,
        "lr": None,
        "blocks": (0, 1),
        "gradient": gradient(-1.0),
    }
    return DensePush(**(fields | changes))  # type: ignore[arg-type]


def is_live(session: str) -> bool:
    return True


def read(values: DenseValues) -> torch.Tensor:
    data = bytearray()
    for message in values.messages:
        assert isinstance(message, PushReply | ShardData)
        data += message.piece.data
    return torch.frombuffer(data, dtype=torch.float32)


def test_a_push_changes_values_and_version() -> None:
    """The returned values have the new version; staleness counts the updates since the base
    version."""
    shard = new_shard()
    outcome = shard.push(a_push(1), is_live, read=partial(shard.body.values, writer=TO_REPLIES))
    assert (outcome.version, outcome.staleness, outcome.is_duplicate) == (2, 0, False)
    values = outcome.values
    assert values is not None
    assert values.version == 2
    assert torch.equal(read(values), torch.ones(NUM_ELEMENTS))
    outcome = shard.push(a_push(2), is_live)
    assert (outcome.version, outcome.staleness, outcome.values) == (3, 1, None)
    assert list(shard.describe("j").staleness_counts)[:3] == [1, 1, 0]


def test_a_repeated_push_is_applied_once() -> None:
    """The repetition gets the first outcome, and the current values, even after other pushes."""
    shard = new_shard()
    shard.push(a_push(1), is_live)
    shard.push(a_push(1, session="other"), is_live)
    outcome = shard.push(a_push(1), is_live, read=partial(shard.body.values, writer=TO_REPLIES))
    assert (outcome.version, outcome.staleness, outcome.is_duplicate) == (2, 0, True)
    values = outcome.values
    assert values is not None
    assert torch.equal(read(values), torch.full((NUM_ELEMENTS,), 2.0))
    assert shard.describe("j").duplicates == 1
    assert shard.describe("j").pushes == 2


def test_a_push_older_than_the_remembered_ones_is_refused() -> None:
    """An old push may be a repetition, and so is not applied."""
    shard = new_shard()
    for sequence in range(1, MAX_OUTCOMES + 3):
        shard.push(a_push(sequence), is_live)
    version = shard.read(shard.body.values).version
    with pytest.raises(ForgottenPush):
        shard.push(a_push(1), is_live)
    assert shard.read(shard.body.values).version == version


@pytest.mark.parametrize(
    ("push", "kind", "fragment"),
    [
        (a_push(epoch=2), WrongEpoch, "saw 2; expected 3"),
        (a_push(gradient=gradient(1.0)[:-4]), ShapeMismatch, "saw 3996 bytes; expected 4000"),
        (a_push(gradient=gradient(1.0) * 2), ShapeMismatch, "saw 8000 bytes"),
        (a_push(gradient=b""), ShapeMismatch, "saw 0 bytes"),
        (a_push(base_version=2), MalformedMessage, "base version 2"),
        (a_push(gradient=gradient(float("nan"))), NonFiniteGradient, "left .*nan at element 0"),
        (
            a_push(gradient=gradient(1.0)[:-4] + gradient(float("inf"))[:4]),
            NonFiniteGradient,
            "right .*inf at element 563",
        ),
    ],
)
def test_a_refused_push_changes_nothing(
    push: DensePush, kind: type[ShoalError], fragment: str
) -> None:
    """The sequence of a refused push may be used again. The shard counts the refusal, except one
    for the epoch, which the service counts."""
    shard = new_shard()
    with pytest.raises(kind, match=fragment):
        shard.push(push, is_live, read=partial(shard.body.values, writer=TO_REPLIES))
    values = shard.read(shard.body.values)
    assert values.version == 1
    assert torch.equal(read(values), torch.zeros(NUM_ELEMENTS))
    assert shard.describe("j").refused == (kind is not WrongEpoch)
    assert not shard.push(a_push(1), is_live).is_duplicate


def test_large_finite_gradients_pass() -> None:
    """The sum of such gradients overflows, but each number is finite."""
    shard = new_shard()
    shard.push(a_push(gradient=gradient(3e38), lr=1e-38), is_live)
    assert torch.allclose(read(shard.read(shard.body.values)), torch.full((NUM_ELEMENTS,), -3.0))


def test_absent_blocks_are_left_alone() -> None:
    """A block without a gradient keeps its values; the others change."""
    shard = new_shard()
    push = a_push(blocks=(1,), gradient=gradient(-1.0, 500))
    values = shard.push(push, is_live, read=partial(shard.body.values, writer=TO_REPLIES)).values
    assert values is not None
    assert torch.equal(read(values)[:500], torch.zeros(500))
    assert torch.equal(read(values)[500:], torch.ones(500))


def test_the_learning_rate_of_a_push_is_used() -> None:
    """Each push carries the rate of the worker's schedule."""
    shard = new_shard()
    shard.push(a_push(lr=0.25), is_live)
    assert torch.equal(read(shard.read(shard.body.values)), torch.full((NUM_ELEMENTS,), 0.25))


def test_reading_a_known_version_sends_nothing() -> None:
    """A reader that has another version gets the values."""
    shard = new_shard()
    assert shard.read(partial(shard.body.values, known_version=1)).messages == ()
    assert shard.read(partial(shard.body.values, known_version=2)).messages


def test_staleness_beyond_the_last_bucket_is_counted_there() -> None:
    """The number of counters is bounded, and their sum is the number of pushes."""
    shard = new_shard()
    for sequence in range(1, STALENESS_BUCKETS + 11):
        shard.push(a_push(sequence), is_live)
    counts = shard.describe("j").staleness_counts
    assert len(counts) == STALENESS_BUCKETS
    assert counts[-1] == 11
    assert sum(counts) == STALENESS_BUCKETS + 10


def test_concurrent_pushes_are_serialised_and_reads_are_whole() -> None:
    """Four threads push; no update is lost, and no reader sees a part of one."""
    num_elements, num_threads, num_pushes = 300_000, 4, 15
    shard = new_shard(num_elements)
    data = gradient(-1.0, num_elements)
    torn: list[int] = []
    done = threading.Event()

    def pusher(name: str) -> None:
        for sequence in range(1, num_pushes + 1):
            push = a_push(sequence, session=name, gradient=data)
            shard.push(push, is_live)

    def reader() -> None:
        while not done.is_set():
            values = shard.read(shard.body.values)
            tensor = read(values)
            if tensor.min() != tensor.max() or tensor[0] != values.version - 1:
                torn.append(values.version)

    threads = [threading.Thread(target=pusher, args=(str(i),)) for i in range(num_threads)]
    looker = threading.Thread(target=reader)
    for thread in (*threads, looker):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    looker.join()
    assert torn == []
    final = shard.read(shard.body.values)
    assert final.version == num_threads * num_pushes + 1
    assert torch.equal(read(final), torch.full((num_elements,), float(num_threads * num_pushes)))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_borrowed_gradient_is_copied_only_if_the_subscriber_keeps_it(is_kept: bool) -> None:
    """The sender reuses its memory once the push is answered."""
    records: list[UpdateRecord] = []
    shard, lent = new_shard(), bytearray(gradient(-1.0))
    shard.subscribe(records.append, bytes if is_kept else as_given)
    shard.push(a_push(gradient=lent, is_borrowed=True), is_live)
    lent[:] = bytes(len(lent))
    assert (bytes(records[0].data) == gradient(-1.0)) is is_kept
    assert records[0].is_lent is not is_kept


def test_the_kept_gradient_is_the_one_that_was_applied() -> None:
    """The sender may change its memory meanwhile."""
    records: list[UpdateRecord] = []
    primary, copy = new_shard(), new_shard()
    lent = bytearray(gradient(-1.0))

    def keep(data: Buffer) -> Buffer:
        kept = bytes(data)
        lent[:] = gradient(5.0)
        return kept

    primary.subscribe(records.append, keep)
    primary.push(a_push(gradient=lent, is_borrowed=True), is_live)
    copy.replay(records[0])
    assert torch.equal(read(copy.read(copy.body.values)), read(primary.read(primary.body.values)))


def test_a_push_is_reported_before_its_values_are_read() -> None:
    """Backups can apply it meanwhile."""
    order: list[str] = []
    shard = new_shard()
    shard.subscribe(lambda record: order.append("applied"))
    shard.push(
        a_push(gradient=gradient(-1.0)),
        is_live,
        on_applied=lambda: order.append("reported"),
        read=lambda version: order.append("read"),
    )
    assert order == ["applied", "reported", "read"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_borrowed_record_is_copied_only_if_the_subscriber_keeps_it(is_kept: bool) -> None:
    """A copy replays a record from memory that its primary reuses."""
    records: list[UpdateRecord] = []
    primary, copy = new_shard(), new_shard()
    primary.subscribe(records.append)
    primary.push(a_push(gradient=gradient(-1.0)), is_live)
    lent = bytearray(records[0].data)
    copy.subscribe(records.append, bytes if is_kept else as_given)
    copy.replay(UpdateRecord(records[0].push, memoryview(lent)), is_borrowed=True)
    lent[:] = bytes(len(lent))
    assert torch.equal(read(copy.read(copy.body.values)), read(primary.read(primary.body.values)))
    assert (bytes(records[1].data) == gradient(-1.0)) is is_kept


def as_given(data: Buffer) -> Buffer:
    return data
