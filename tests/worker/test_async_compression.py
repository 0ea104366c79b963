"""Compressed gradients sent to parameter servers: each counts once, including its error."""

import copy
import threading
from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from support.clusters.parameter_servers import ParameterServers
from support.members.async_members import loss_of, new_model, start, train
from support.oracles.compression_twins import read_push
from torch import nn

from shoal.compression import COMPRESSIONS, find_compression
from shoal.strategies.asynchronous.async_diloco import AsyncDiLoCo
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal.strategies.asynchronous.bounded_staleness import SSP
from shoal.strategies.asynchronous.push_compression import PushCompressor
from shoal_client.parameters.dense import ParameterClient
from shoal_client.shards.parts import EncodedGradient, EncodedPush
from shoal_proto.errors import (
    InvalidSpec,
    MalformedMessage,
    NonFiniteGradient,
    ShapeMismatch,
    ShoalError,
)
from shoal_proto.v1.codec_pb2 import GradientCodec, LowRankRows
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, ParameterSpec, Shard, ShardMap
from shoal_server.parameters.service import parameters_servicer
from shoal_server.parameters.shard.dense import DenseBody


@pytest.fixture(scope="module")
def shared() -> Iterator[ParameterServers]:
    """Servers for tests that leave them unchanged, each with a job of its own."""
    with ParameterServers(2) as servers:
        yield servers


class Alone:
    """Process that steps on the decoded values of its own compressed gradients."""

    def __init__(self, model: nn.Module, compression: str, shard_map: ShardMap) -> None:
        self.model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        self._compressor = PushCompressor(find_compression(compression))
        self._map = shard_map

    def train(self, steps: range) -> None:
        for step in steps:
            self._optimizer.zero_grad(set_to_none=True)
            loss_of(self.model, step).backward()  # type: ignore[no-untyped-call]
            self._step()

    def _step(self) -> None:
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        push = self._compressor.encode(self._map, gradients)
        for shard in self._map.shards:
            blocks = [block for block in shard.blocks if block.parameter in gradients]
            made = push.shards.get(shard.shard_id)
            if made is None:
                continue
            sizes = [block.num_elements for block in blocks]
            values = torch.from_numpy(read_push(made.codec, bytes(made.data), sizes))
            for block, part in zip(blocks, torch.split(values, sizes), strict=True):
                flat = gradients[block.parameter].view(-1)
                flat[block.offset : block.offset + block.num_elements] = part
            push.applied(shard.shard_id)
        self._optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def shard_map_of(servers: ParameterServers, job: str) -> ShardMap:
    token = servers.admit("reader", job=job)
    client = ParameterClient([servers.coordinator], lambda: token)
    try:
        return client.fetch_map()
    finally:
        client.close()


def assert_equal(model: nn.Module, wanted: nn.Module) -> None:
    for (name, seen), value in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(seen, value), name


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_servers_step_on_the_decoded_gradients(shared: ParameterServers, name: str) -> None:
    """The model has a part that is not always used: its residual waits."""
    model = new_model()
    alone = copy.deepcopy(model)
    strategy = start(shared, model, adam(model), strategy=AsyncSGD(compression=name), job=name)
    train(strategy, model, range(6))
    reference = Alone(alone, name, shard_map_of(shared, name))
    reference.train(range(6))
    assert_equal(model, alone)
    metrics = strategy.metrics()
    # A matrix of 10 columns has little redundancy.
    assert metrics["compression_ratio"] > (1.05 if name == "powersgd" else 1.9)
    assert metrics["bytes_sent"] > metrics["bytes_per_step"] > 0
    strategy.close()


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_a_failover_in_the_middle_changes_no_bit(name: str) -> None:
    """The backup has decoded the same bytes, and recognises a push that is sent again."""
    with ParameterServers(2) as servers:
        model = new_model()
        alone = copy.deepcopy(model)
        strategy = start(servers, model, adam(model), strategy=AsyncSGD(compression=name))
        shard_map = shard_map_of(servers, "job")
        train(strategy, model, range(4))
        servers.stop("ps-1")
        train(strategy, model, range(4, 8))
        Alone(alone, name, shard_map).train(range(8))
        assert_equal(model, alone)
        strategy.close()


def test_rounds_are_compressed_too(shared: ParameterServers) -> None:
    """`async-diloco` pushes a member's change since the last round."""
    model = new_model()
    strategy = AsyncDiLoCo(every_steps=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    alone, plain = copy.deepcopy(model), start(shared, model, adam(model), strategy=strategy)
    train(plain, model, range(4))
    small = AsyncDiLoCo(
        every_steps=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False, compression="bf16"
    )
    start(shared, alone, adam(alone), strategy=small, job="small")
    train(small, alone, range(4))
    assert small.metrics()["compression_ratio"] == 2.0
    for seen, wanted in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(seen, wanted, rtol=0.02, atol=2e-3)
    plain.close()
    small.close()


def test_pushes_are_decoded_by_a_worker_thread(
    shared: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small shards, too, are not decoded by the event loop, which serves all clients."""
    threads: list[str] = []
    decode = DenseBody.decode

    def noted(*args: object) -> memoryview:
        threads.append(threading.current_thread().name)
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DenseBody, "decode", noted)
    model = new_model()
    strategy = start(shared, model, adam(model), strategy=SSP(compression="int8"), job="threads")
    train(strategy, model, range(2))
    strategy.close()
    assert threads
    assert "servers" not in threads


def test_a_server_that_cannot_decode_pushes_is_named(
    shared: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters_servicer, "CODECS", ())
    model = new_model()
    strategy = start(shared, model, adam(model), strategy=AsyncSGD(compression="int8"), job="old")
    with pytest.raises(InvalidSpec, match=r"server at .*:\d+ does not read .* 'int8'"):
        train(strategy, model, range(1))
    strategy.close()


def test_compression_with_delay_compensation_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="corrected for delay"):
        AsyncSGD(compression="int8", staleness="compensate")


# --- residuals ---

W = Shard(shard_id=0, dtype="float32", blocks=[Block(parameter="w", num_elements=64)])
W_MAP = ShardMap(shards=[W], parameters=[ParameterSpec(name="w", shape=[64], dtype="float32")])
GRADIENTS = {"w": torch.linspace(-1, 1, 64)}


def encode(compressor: PushCompressor, value: float = 1.0) -> bytes:
    return bytes(compressor.encode(W_MAP, {"w": GRADIENTS["w"] * value}).shards[0].data)


def test_a_residual_counts_once() -> None:
    """A push of zero gradients sends the rest."""
    compressor = PushCompressor(find_compression("int8"))
    push = compressor.encode(W_MAP, GRADIENTS)
    sent = torch.from_numpy(read_push(push.shards[0].codec, bytes(push.shards[0].data), [64]))
    push.applied(0)
    # A push that had to be sent again is reported a second time.
    push.applied(0)
    again = compressor.encode(W_MAP, {"w": torch.zeros(64)})
    rest = torch.from_numpy(read_push(again.shards[0].codec, bytes(again.shards[0].data), [64]))
    torch.testing.assert_close(sent + rest, GRADIENTS["w"], rtol=0, atol=1e-4)
    assert not torch.equal(sent, GRADIENTS["w"])


def test_a_refused_push_leaves_the_residual_unchanged() -> None:
    compressor = PushCompressor(find_compression("one-bit"))
    compressor.encode(W_MAP, GRADIENTS).applied(0)
    first = encode(compressor, 2.0)
    compressor.restore_residuals([0])
    assert encode(compressor, 2.0) == first


def test_a_push_with_an_unknown_outcome_leaves_no_residual() -> None:
    """The push may have been applied, including its residual."""
    compressor = PushCompressor(find_compression("one-bit"))
    compressor.encode(W_MAP, GRADIENTS).applied(0)
    encode(compressor)
    assert encode(compressor) == encode(PushCompressor(find_compression("one-bit")))


def test_a_gradient_beyond_fp16_is_refused_by_name() -> None:
    compressor = PushCompressor(find_compression("fp16"))
    with pytest.raises(NonFiniteGradient, match="parameter w is beyond what fp16") as raised:
        encode(compressor, 1e6)
    assert raised.value.details == {"parameter": "w"}


# --- malformed pushes ---


def int8(num_values: int, block: int = 64, scale: float = 1.0) -> tuple[GradientCodec, bytes]:
    groups = -(-num_values // block)
    data = array("f", [scale] * groups).tobytes() + bytes([1]) * (groups * block)
    return GradientCodec(kind="int8", num_bytes=len(data), block=block), data


def sparse(places: Sequence[int], value: float = 1.0) -> tuple[GradientCodec, bytes]:
    data = array("f", [value] * len(places)).tobytes() + array("i", places).tobytes()
    return GradientCodec(kind="top-k", num_bytes=len(data)), data


def low_rank(
    *, rank: int = 1, blocks: int = 8, columns: int = 64, **part: int
) -> tuple[GradientCodec, bytes]:
    """Return a codec of low-rank rows. The shard has 8 blocks of 512 values."""
    parts = [LowRankRows(**part)] + [LowRankRows()] * (blocks - 1)
    codec = GradientCodec(
        kind="powersgd", num_bytes=64, rank=rank, low_rank=parts, columns=[columns]
    )
    return codec, bytes(64)


BAD: dict[str, tuple[tuple[GradientCodec, bytes], type[ShoalError], str]] = {
    "a codec that there is not": (
        (GradientCodec(kind="fp4", num_bytes=64), bytes(64)),
        InvalidSpec,
        "no codec 'fp4'",
    ),
    "no kind": ((GradientCodec(num_bytes=64), bytes(64)), InvalidSpec, "no codec ''"),
    "another length": (int8(2048), ShapeMismatch, "another length"),
    "more bytes than without": (sparse(range(4096)), ShapeMismatch, "fewer than 16384"),
    "a block of none": (
        (GradientCodec(kind="one-bit", num_bytes=64), bytes(64)),
        InvalidSpec,
        "block of codec one-bit",
    ),
    "a block that is not a multiple of 8": (
        (GradientCodec(kind="int8", num_bytes=64, block=12), bytes(64)),
        InvalidSpec,
        "multiple of 8",
    ),
    "a scale that is not a number": (int8(4096, scale=float("nan")), NonFiniteGradient, "w is not"),
    "an infinite scale": (int8(4096, scale=float("inf")), NonFiniteGradient, "w is not"),
    "a place behind the last": (sparse([5, 4096]), MalformedMessage, "out of range"),
    "a place before the first": (sparse([-1, 5]), MalformedMessage, "out of range"),
    "a place twice": (sparse([5, 5]), MalformedMessage, "not rising"),
    "an infinite value": (sparse([5], float("inf")), NonFiniteGradient, "element 5"),
    "no rank": (low_rank(rank=0), InvalidSpec, "rank"),
    "rows beyond their block": (low_rank(rows=8, lead=1), ShapeMismatch, "lie in their block"),
    "rows of no matrix": (low_rank(rows=1, matrix=1), ShapeMismatch, "an unknown matrix"),
    "a matrix without columns": (low_rank(rows=1, columns=0), ShapeMismatch, "a column or more"),
    "other blocks": (low_rank(blocks=7), ShapeMismatch, "number of blocks"),
    "factors of another length": (low_rank(rows=4), ShapeMismatch, "another length"),
    "bytes that were not announced": (
        (int8(4096)[0], int8(4096)[1] + b"0"),
        ShapeMismatch,
        "more bytes",
    ),
    "fewer bytes than announced": ((int8(4096)[0], int8(4096)[1][:-1]), ShapeMismatch, "ended"),
}


@pytest.fixture(scope="module")
def client() -> Iterator[ParameterClient]:
    """A client of one parameter of 4096 zeros, in one shard."""
    with ParameterServers(1) as servers:
        token = servers.admit("w0")
        client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
        client.place([ParameterSpec(name="w", shape=[4096], dtype="float32")])
        zeros = memoryview(array("f", bytes(16384))).cast("B")
        client.create(OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)]), {"w": zeros})
        yield client
        client.close()


@pytest.mark.parametrize("case", BAD)
def test_malformed_pushes_are_refused_and_change_nothing(
    client: ParameterClient, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shoal_client.parameters.calls.ParameterCalls.check_codecs", lambda *args: None
    )
    (codec, data), kind, message = BAD[case]
    values = memoryview(array("f", bytes(16384))).cast("B")
    gradient = {"w": memoryview(array("f", bytes(16384))).cast("B")}
    (shard,) = client.shard_map.shards
    push = EncodedPush({shard.shard_id: EncodedGradient(codec, memoryview(data))}, pytest.fail)
    with pytest.raises(kind, match=message):
        client.push(gradient, encoded=push)
    client.pull({"w": values})
    assert set(values.cast("f")) == {0.0}
