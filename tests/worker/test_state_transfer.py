"""Hand-over of a member's state: complete, by name, bit for bit."""

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes.ranks import Ranks
from support.training import rank_bodies
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.process_group.collectives import counts, reset_counts
from shoal.model.module_proxy import proxy_of
from shoal.state import transfer
from shoal.state.replicated import ReplicatedState
from shoal.state.shards import StateShard, TensorShard
from shoal_proto.errors import DtypeMismatch, InvalidSpec, MalformedMessage, ShapeMismatch

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adam-lr-tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "rprop": torch.optim.Rprop,
}


def trained(make: Make, num_steps: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = make(list(model.parameters()))
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(3, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_member_goes_on_exactly_where_the_other_stands(name: str) -> None:
    """Includes optimizer state, of which the fresh member has none, and a changed learning rate."""
    model, optimizer = trained(OPTIMIZERS[name], 3, seed=0)
    other, other_optimizer = trained(OPTIMIZERS[name], 0, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    state = ReplicatedState(model, optimizer).capture(3)
    # As over the wire: values that are not tensors go through JSON.
    values = json.loads(json.dumps(state.values))
    ReplicatedState(other, other_optimizer).restore(
        StateShard(step=3, shards=state.shards, values=values)
    )
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


FUSED: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


class Strided(nn.Module):
    """A model with channels_last weights and a transposed parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 2).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        self.turned = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.conv(images).mean((2, 3))[:, :3]
        return pooled @ self.turned.t()


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_goes_on_exactly_with_weights_in_another_order(name: str) -> None:
    """Received tensors are contiguous, and the model's parameters are not: fused kernels pair both
    by their position in memory."""
    images = torch.arange(48.0).reshape(1, 3, 4, 4).sin()

    def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    model, other = Strided(0), Strided(1)
    optimizer = FUSED[name](list(model.parameters()))
    other_optimizer = FUSED[name](list(other.parameters()))
    for _ in range(3):
        take(model, optimizer)
    state = ReplicatedState(model, optimizer).collect(3)
    shards = {
        path: TensorShard.whole(each.tensor.contiguous()) for path, each in state.shards.items()
    }
    ReplicatedState(other, other_optimizer).restore(
        StateShard(step=3, shards=shards, values=state.values)
    )
    for _ in range(2):
        take(model, optimizer)
        take(other, other_optimizer)
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


Form = Callable[[ReplicatedState, int], StateShard]
FORMS: list[Form] = [ReplicatedState.collect, ReplicatedState.state_shard]
"""The state as a member sends it, and as a checkpoint contains it."""


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_in_a_tensor_stays_the_tensor_of_the_script(form: Form) -> None:
    """The script changes the rate in place after it received another member's state."""
    rate, other_rate = torch.tensor(0.5), torch.tensor(0.25)
    model, optimizer = trained(lambda p: torch.optim.Adam(p, lr=rate), 1, seed=0)
    other, other_optimizer = trained(lambda p: torch.optim.Adam(p, lr=other_rate), 1, seed=1)
    ReplicatedState(model, optimizer).restore(form(ReplicatedState(other, other_optimizer), 1))
    assert rate.item() == 0.25
    rate.fill_(0.125)
    assert optimizer.param_groups[0]["lr"].item() == 0.125


@pytest.mark.parametrize("form", FORMS)
def test_groups_that_share_a_tensor_of_their_rate_get_their_own_rates(form: Form) -> None:
    def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        return torch.optim.Adam(groups, lr=torch.tensor(0.5))

    model, optimizer = trained(two_groups, 1, seed=0)
    other, other_optimizer = trained(two_groups, 1, seed=1)
    other_optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    ReplicatedState(model, optimizer).restore(form(ReplicatedState(other, other_optimizer), 1))
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]


class NumbersRead(TorchFunctionMode):
    """Count of tensors whose numbers were read, for which a GPU is awaited."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (Tensor.tolist, Tensor.item)
        return func(*args, **(kwargs or {}))


def test_capturing_a_state_reads_no_number_of_a_tensor() -> None:
    model, optimizer = trained(OPTIMIZERS["adam-lr-tensor"], 1, seed=0)
    keeper = ReplicatedState(model, optimizer)
    with NumbersRead() as read:
        keeper.capture(1)
    assert read.num == 0


def test_a_captured_state_is_not_touched_by_later_steps() -> None:
    """A restore of the captured state undoes later steps."""
    model, optimizer = trained(OPTIMIZERS["sgd"], 1, seed=0)
    keeper = ReplicatedState(model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = keeper.capture(1)
    step(model, optimizer)
    keeper.restore(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Shape, dtype and name are each reported."""
    model, optimizer = trained(OPTIMIZERS["sgd"], 1, seed=0)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    keeper = ReplicatedState(other, torch.optim.SGD(other.parameters(), lr=0.1))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ShapeMismatch, match=r"2\.(weight|bias)"):
        keeper.restore(ReplicatedState(model, optimizer).capture(1))
    with pytest.raises(DtypeMismatch, match="float64"):
        same = ReplicatedState(model, optimizer)
        same.restore(_as_double(same.capture(1)))
    for key, value in other.state_dict().items():
        assert torch.equal(value, before[key]), key


def _as_double(state: StateShard) -> StateShard:
    tensors = {name: shard.tensor for name, shard in state.shards.items()}
    shards = {
        name: TensorShard.whole(tensor.double() if tensor.is_floating_point() else tensor)
        for name, tensor in tensors.items()
    }
    return StateShard(step=state.step, shards=shards, values=state.values)


def test_an_optimizer_with_foreign_parameters_is_refused() -> None:
    """Foreign parameters would not be kept the same on all members."""
    model = nn.Linear(2, 2)
    foreign = nn.Parameter(torch.zeros(3))
    with pytest.raises(InvalidSpec, match="not the model's"):
        ReplicatedState(model, torch.optim.SGD([*model.parameters(), foreign], lr=0.1))


def test_any_dtype_and_shape_crosses_the_group_unchanged(tmp_path: Path) -> None:
    """Empty tensors, scalars and odd sizes are in one buffer; two of three members receive."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(rank_bodies.exchange_state, path, rank, 3) for rank in range(3)]
        for rank in crew:
            rank.expect("same")


NUM_BYTES = 100_000


def pass_on(source: int, receivers: list[int]) -> tuple[int, bool]:
    """Return the bytes that this rank sent, and True if it has the source's state."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    reset_counts()
    wanted = torch.arange(NUM_BYTES // 4, dtype=torch.int32)
    given = StateShard(step=3, shards={"w": TensorShard.whole(wanted)}, values={"lr": 0.5})
    if rank == source:
        transfer.send(given, receivers, group)
    elif rank in receivers:
        given = transfer.receive(source, receivers, group)
    sent = counts().get("send")
    same = given.step == 3 and torch.equal(given.shards["w"].tensor, wanted)
    return sent.bytes if sent else 0, same and given.values == {"lr": 0.5}


@pytest.mark.parametrize(("source", "receivers"), [(0, [1]), (2, [0, 1, 3, 4, 5, 6, 8])])
def test_no_rank_sends_a_state_more_than_twice(
    monkeypatch: pytest.MonkeyPatch, source: int, receivers: list[int]
) -> None:
    """Receivers pass the state on. One member, the last but one, has the state already."""
    monkeypatch.setattr(transfer, "MESSAGE_BYTES", 7_000)
    ranks = run_in_memory(pass_on, 9, source, receivers)
    assert all(same for _, same in ranks)
    sent = [num_bytes for num_bytes, _ in ranks]
    assert sum(sent) >= len(receivers) * NUM_BYTES
    assert max(sent) < (transfer.FAN_OUT + 0.1) * NUM_BYTES
    assert sent[7] == 0


class Translator(nn.Module):
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        return tokens if labels is None else labels


def test_a_replica_has_the_signature_of_the_models_forward() -> None:
    """Frameworks pass only the arguments that a forward pass declares."""
    replica = proxy_of(Translator(), nn.Identity)
    assert inspect.signature(replica.forward) == inspect.signature(Translator().forward)
    assert torch.equal(replica(torch.ones(2)), torch.ones(2))


def test_a_replica_is_the_model_in_all_but_its_forward_pass() -> None:
    """Names, keys, mode and attributes are the same; optimizers made from either see the same
    parameters."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    replica = proxy_of(model, nn.Identity)
    assert list(replica.state_dict()) == list(model.state_dict())
    assert [n for n, _ in replica.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in replica.named_modules()][1:] == [n for n, _ in model.named_modules()][1:]
    replica.eval()
    assert not model.training
    assert not model[2].training
    replica.train()
    assert model.training
    assert replica.training
    assert isinstance(replica, nn.Sequential)
    assert replica[0] is model[0]
    assert len(replica) == 3
    assert type(copy.deepcopy(replica)) is nn.Sequential
    replica.temperature = 3
    assert model.temperature == 3
    replica.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    assert torch.equal(model[0].weight, torch.ones(3, 2))
    assert torch.equal(replica(torch.ones(2)), torch.ones(2))


def test_a_state_is_captured_into_the_memory_of_the_last() -> None:
    """A round needs no third copy of everything, besides the live state and the last one."""
    model, optimizer = trained(OPTIMIZERS["adamw"], 3, seed=0)
    keeper = ReplicatedState(model, optimizer)
    first = keeper.capture(1)
    places = {name: shard.tensor.data_ptr() for name, shard in first.shards.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    second = keeper.capture(2, first)
    assert {name: shard.tensor.data_ptr() for name, shard in second.shards.items()} == places
    now = keeper.collect(2).shards
    assert all(shard.tensor.equal(now[name].tensor) for name, shard in second.shards.items())
    # New tensors get memory of their own, and tensors that are gone are left out.
    optimizer.state.clear()
    assert keeper.capture(3, second).shards.keys() == keeper.collect(3).shards.keys()


def refused(tensors: object) -> str:
    """Send a manifest that lists `tensors`; return the error with which the other rank refuses."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        manifest = json.dumps({"step": 1, "values": {}, "tensors": tensors}).encode()
        for message in (torch.tensor([len(manifest)]), torch.tensor(list(manifest)).byte()):
            transfer.Branch(0, [1], group).pass_on(message)
        return ""
    try:
        transfer.receive(0, [1], group)
    except MalformedMessage as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "tensors",
    [
        [["w", "no-dtype", [2]]],
        [["w", "float32"]],
        [["w", "float32", ["2"]]],
        [["w", "float32", [-2]]],
        7,
    ],
)
def test_a_manifest_that_cannot_be_read_is_malformed(tensors: object) -> None:
    [_, seen] = run_in_memory(refused, 2, tensors)
    assert "rank 0 sent a manifest that cannot be read" in seen
