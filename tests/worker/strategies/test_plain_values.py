"""State of an optimizer that is not a tensor is transferred unchanged, or refused at once."""

import enum
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.members.elastic_schedule import Schedule, check_no_trace, elastic, lose_all
from support.models.plain_values import Keeps, KeepsCodes, Slips, plain_values
from support.processes.ranks import Ranks
from torch import nn

import shoal
from shoal.checkpoint.directory import complete
from shoal.state.optimizer_state import Slots, put_slots, take_settings, take_slots
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer

TOLERANCE = 1e-5
WHOLE = ("ddp", "zero1", "pipeline")
"""Strategies that leave parameters whole."""
STRATEGIES = (*WHOLE, "zero2", "fsdp", "tensor")
ALONE = ("ddp", "zero1", "zero2", "fsdp", "local-sgd")


class Kind(enum.IntEnum):
    WARM = 3


class Word(str, enum.Enum):  # noqa: UP042 - `str` of the other is its value
    WARM = "warm"


class Degrees(float):
    """A user's own number."""


SAME: dict[str, Any] = {
    **plain_values(2),
    "nan": float("nan"),
    "minus": -0.0,
    "complex": complex(1e300, -0.1),
    "dtype": torch.bfloat16,
    "bytes": b"\x00\xff",
    "text": "\u00e4 'quoted' \n $tuple",
    "marked": {"$tuple": [1]},
    "empty": ({}, [], (), ""),
}
CONVERTED: list[tuple[Any, Any]] = [
    (np.float64(0.1), 0.1),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float16(0.5), 0.5),
    (np.int64(2**62), 2**62),
    (np.uint8(3), 3),
    (np.bool_(True), True),
    (np.str_("warm"), "warm"),
    (np.complex64(1j), 1j),
    (np.array(0.25), 0.25),
    (Kind.WARM, 3),
    (Word.WARM, "warm"),
    (Degrees(0.1), 0.1),
    ([np.float64(0.1), {"k": np.int32(1)}], [0.1, {"k": 1}]),
]


class Dispatching(torch.Tensor):
    """A tensor without elements of its own, like the 8-bit state of some libraries."""

    @staticmethod
    def __new__(cls) -> "Dispatching":
        return torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


REFUSED: dict[str, Callable[[], Any]] = {
    "set": lambda: {1},
    "array": lambda: np.zeros(2),
    "date": lambda: np.datetime64("2026-01-01", "ns"),
    "long double": lambda: np.longdouble(1),
    "fraction": lambda: Fraction(1, 3),
    "deque": lambda: deque([1.0]),
    "ordered": lambda: OrderedDict(a=1),
    "function": lambda: max,
    "module": lambda: nn.Linear(1, 1),
    "long integer": lambda: 1 << 3000,
    "generator": torch.Generator,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "unsigned": lambda: torch.ones(3, dtype=torch.uint32),
    "wrapper": Dispatching,
    "inside": lambda: [1.0, {"a": ({2},)}],
    "sparse inside": lambda: [torch.eye(3).to_sparse()],
    "number and text as keys": lambda: {1: 0.1, "1": 0.2},
    "a key with a dot": lambda: {"a": {"b": 0.1}, "a.b": 0.2},
    "a key like an element": lambda: {"a": [torch.ones(1)], "a.0": torch.ones(1)},
}


def taken(value: Any) -> Any:
    """Return the value as another member receives it."""
    slots = take_slots({"odd": value}, "0.weight", torch.optim.SGD([torch.ones(1)]))
    values = json.loads(json.dumps(dict(slots.values)))
    return put_slots(Slots(tensors=slots.tensors, values=values))["odd"]


@pytest.mark.parametrize("name", SAME)
def test_a_value_arrives_as_it_was(name: str) -> None:
    assert repr(taken(SAME[name])) == repr(SAME[name])


@pytest.mark.parametrize(("given", "expected"), CONVERTED, ids=lambda each: type(each).__name__)
def test_numbers_of_other_kinds_arrive_as_pythons_own(given: Any, expected: Any) -> None:
    assert repr(taken(given)) == repr(expected)


def test_tensors_within_a_value_arrive_as_they_were() -> None:
    given = [torch.arange(3), ({"a": torch.tensor(0.1, dtype=torch.float64)},)]
    assert repr(taken(given)) == repr(given)


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_transferred_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"state 'odd.* of 0\.weight"):
        taken(REFUSED[name]())


def test_keys_of_one_parameter_that_read_alike_are_refused_by_name() -> None:
    """A checkpoint joins keys by dots."""
    state = {"odd": {"b": 0.1}, "odd.b": torch.ones(1)}
    with pytest.raises(UnsupportedOptimizer, match=r"two entries named 'odd\.b'"):
        take_slots(state, "0.weight", torch.optim.SGD([torch.ones(1)]))


def test_a_slash_in_a_key_within_a_value_is_refused_by_name() -> None:
    """A stored tensor's name has its parameter before the last slash."""
    state = {"odd": {"a/b": torch.ones(1)}}
    with pytest.raises(UnsupportedOptimizer, match=r"state 'odd\.a/b' of 0\.weight"):
        take_slots(state, "0.weight", torch.optim.SGD([torch.ones(1)]))


def test_settings_that_read_alike_are_refused_by_name() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    optimizer.param_groups[0] |= {"odd": {1: 0.1, "1": 0.2}}
    with pytest.raises(UnsupportedOptimizer, match=r"two entries named '0\.odd\.1'"):
        take_settings(optimizer)


# --- alone: through a checkpoint ---


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(24, 3), torch.zeros(24, dtype=torch.int64)


def train(
    strategy: str,
    make: Callable[[Any], torch.optim.Optimizer],
    directory: Path | None,
    num_epochs: int,
    each_step: Callable[[torch.optim.Optimizer, int], None] = lambda _, __: None,
) -> torch.optim.Optimizer:
    """Take two steps an epoch, in this process alone."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    checkpoints = shoal.Checkpoints(directory, every_steps=2) if directory else None
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=12, epochs=num_epochs):
            each_step(optimizer, batch.step)
            with session.step():
                outputs = model(batch.inputs)
                session.backward(nn.functional.cross_entropy(outputs, batch.targets))
        # After the session, a layout's parameters are not the script's any more.
        return optimizer


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Dtype that torch gives to a number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.sampled()
@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("strategy", ALONE)
def test_training_continues_from_a_checkpoint_with_equal_values(
    strategy: str, tmp_path: Path
) -> None:
    """The optimizer checks the values in each step."""
    counts = []

    def note(optimizer: torch.optim.Optimizer, _: int) -> None:
        counts.append([each["table"]["left"] for each in optimizer.state.values()])

    make = Keeps if strategy in ("zero2", "fsdp") else KeepsCodes
    train(strategy, make, tmp_path, 1)
    train(strategy, make, tmp_path, 2, note)
    assert counts[0] == [1] * 4, "the state of the two steps before"


@pytest.mark.parametrize(
    ("first", "second"), [("zero1", "ddp"), ("ddp", "fsdp"), ("fsdp", "zero1")]
)
def test_a_checkpoint_of_one_strategy_gives_its_values_to_another(
    first: str, second: str, tmp_path: Path
) -> None:
    train(first, Keeps, tmp_path, 1)
    train(second, Keeps, tmp_path, 2)
    assert max(complete(tmp_path)) == 4


@pytest.mark.parametrize("strategy", ALONE)
def test_settings_are_kept_in_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    """Settings include a rate computed by NumPy, and a tensor in double precision."""
    found: list[dict[str, Any]] = []
    settings = {
        "lr": np.interp(1, [0, 4], [0.0, 0.1]),
        "rate": np.float32(0.1),
        "kind": Kind.WARM,
        "word": Word.WARM,
        "scale": torch.tensor(0.1, dtype=torch.float64),
        "window": [1, (2.5, None)],
        "betas": (0.9, np.float64(0.99)),
        "table": {"a": [1], 2: torch.float16},
    }

    def write(optimizer: torch.optim.Optimizer, _: int) -> None:
        optimizer.param_groups[0].update(settings)

    def note(optimizer: torch.optim.Optimizer, _: int) -> None:
        found.append({key: optimizer.param_groups[0].get(key) for key in settings})

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    train(strategy, make, tmp_path, 1, write)
    train(strategy, make, tmp_path, 2, note)
    plain = {"lr": 0.025, "rate": float(np.float32(0.1)), "kind": 3, "word": "warm"}
    expected = {**settings, **plain, "betas": (0.9, 0.99)}
    assert repr(found[0]) == repr(expected)


def test_plain_torch_reads_the_values(tmp_path: Path) -> None:
    train("zero1", Keeps, tmp_path, 1)
    state: dict[str, Any] = {
        "optim": {"state": {"0.weight": {**plain_values(1), "history": [torch.zeros(4, 3)] * 2}}}
    }
    expected = plain_values(1)
    state["optim"]["state"]["0.weight"] |= dict.fromkeys(("count", "rate", "tiny", "phase"))
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load(state, checkpoint_id=complete(tmp_path)[2])
    own = state["optim"]["state"]["0.weight"]
    # torch turns keys of dictionaries into text on the way.
    assert own["table"].pop("5") == "five"
    assert {key: own[key] for key in expected} == expected
    assert all(bool(each.abs().sum()) for each in own["history"])


# --- refusals ---


@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize("strategy", ALONE)
def test_a_value_that_cannot_be_carried_is_refused_in_its_first_step(
    strategy: str, at_step: int
) -> None:
    """The refusal needs neither a checkpoint nor a newcomer."""
    steps: list[int] = []
    with pytest.raises(UnsupportedOptimizer, match=r"state 'odd' of 1\.bias: a set"):
        train(
            strategy,
            lambda parameters: Slips(parameters, {1}, at_step),
            None,
            4,
            lambda _, step: steps.append(step),
        )
    assert steps[-1] in (at_step, at_step + 1)


@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize("strategy", ALONE)
def test_a_setting_that_cannot_be_carried_is_refused_in_its_first_step(
    strategy: str, at_step: int
) -> None:
    def slip(optimizer: torch.optim.Optimizer, step: int) -> None:
        steps.append(step)
        if step == at_step:
            optimizer.param_groups[0]["odd"] = Fraction(1, 3)

    steps: list[int] = []
    with pytest.raises(UnsupportedOptimizer, match="setting 'odd' of group 0: a Fraction"):
        train(strategy, lambda p: torch.optim.SGD(p, lr=0.1), None, 4, slip)
    assert steps[-1] == at_step


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.uint32), torch.eye(3).to_sparse()])
@pytest.mark.parametrize("strategy", ALONE)
def test_a_buffer_that_cannot_be_handed_over_is_refused_before_training(
    strategy: str, tensor: torch.Tensor
) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("odd", tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join() as session, pytest.raises(InvalidSpec, match="the model's tensor odd"):
        session.distribute(model, optimizer, strategy)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_state_tensor_that_changes_its_dtype_is_refused_if_peers_keep_copies(
    strategy: str,
) -> None:
    class Grows(torch.optim.SGD):
        elementwise = per_parameter = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                before = self.state[parameter].get("seen", torch.ones((), dtype=torch.int8))
                self.state[parameter]["seen"] = before.to(torch.int32)

    def make(parameters: Any) -> torch.optim.Optimizer:
        grown = Grows(parameters, lr=0.1)
        for parameter in grown.param_groups[0]["params"]:
            grown.state[parameter]["seen"] = torch.ones((), dtype=torch.int8)
        return grown

    with pytest.raises(UnsupportedOptimizer, match=r"state 'seen' of .*int32; expected .*int8"):
        train(strategy, make, None, 1)
    train("ddp", make, None, 1)


@pytest.mark.parametrize("strategy", ALONE)
def test_optimizer_state_of_other_keys_than_parameters_is_refused(strategy: str) -> None:
    class Counts(torch.optim.SGD):
        elementwise = per_parameter = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.state["all"] = {"steps": 1}  # type: ignore[index]

    with pytest.raises(UnsupportedOptimizer, match="state for 'all'"):
        train(strategy, lambda parameters: Counts(parameters, lr=0.1), None, 1)


# --- several members ---


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_go_to_newcomers_and_come_back_from_copies(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    run = elastic(
        cluster,
        "values",
        desired_members=3,
        strategy=strategy,
        options={"min_split_bytes": 0} if strategy == "tensor" else {},
        optimizer="keeps codes" if strategy in WHOLE else "keeps",
        checkpoints=str(tmp_path / "checkpoints"),
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=3)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_no_trace(schedule, run, TOLERANCE)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "ddp", "pipeline"])
def test_several_members_continue_from_a_checkpoint_with_equal_values(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    directory = tmp_path / "checkpoints"
    run = elastic(
        cluster,
        "values",
        desired_members=2,
        strategy=strategy,
        optimizer="keeps codes" if strategy in WHOLE else "keeps",
        checkpoints=str(directory),
    )
    with Ranks() as ranks:
        lost = Schedule(ranks, run, tmp_path, seed=1)
        lost.start(2)
        newest = lose_all(lost, directory, 2)
        going_on = Schedule(ranks, elastic_again(run), tmp_path, seed=1)
        going_on.start(2)
        assert min(data["step"] for _, data in going_on.committed()) >= newest
        going_on.finish()


def elastic_again(run: Any) -> Any:
    return type(run)(**{**vars(run), "job": f"{run.job}-2"})


@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer", ["slips at once", "slips later"])
@pytest.mark.parametrize("strategy", ["zero1", "ddp", "fsdp", "pipeline"])
def test_all_members_refuse_state_that_cannot_be_transferred(
    cluster: LocalCluster, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    run = elastic(cluster, "slips", desired_members=2, strategy=strategy, optimizer=optimizer)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        crew = [schedule.add() for _ in range(2)]
        raised = [rank.expect("raised") for rank in crew]
    assert [each["error"] for each in raised] == ["UnsupportedOptimizer"] * 2
    assert len({each["text"] for each in raised}) == 1
    assert "state 'odd' of 6.bias: a set" in raised[0]["text"]
