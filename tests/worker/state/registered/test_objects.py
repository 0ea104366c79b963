"""A script's own state: carried by value, rolled back with a step, refused if it cannot be
carried."""

import json
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.state.plain_values import join_state, split_state
from shoal.state.registered import objects
from shoal.state.registered.comparison import difference
from shoal.state.registered.objects import CapturedState, RegisteredState
from shoal_proto.errors import InvalidSpec, MalformedMessage


class Counter:
    """A metric with a state dict."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def travelled(captured: CapturedState) -> CapturedState:
    """Return the state as another member receives it."""
    return CapturedState(values=json.loads(json.dumps(captured.values)), tensors=captured.tensors)


def optimizer_of(lr: float = 0.1) -> SGD:
    return SGD(nn.Linear(2, 2).parameters(), lr=lr, momentum=0.9)


SCHEDULES = {
    "cosine": lambda o: CosineAnnealingLR(o, 7),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "one cycle": lambda o: OneCycleLR(o, 0.3, total_steps=30),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 9)], [4]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_transferred_schedule_gives_the_same_later_rates(name: str) -> None:
    """Rates depend only on the transferred state, which includes the settings of groups."""
    crew = []
    for _ in range(2):
        optimizer = optimizer_of()
        registered = RegisteredState()
        schedule = SCHEDULES[name](optimizer)
        registered.add("schedule", schedule)
        registered.follow(optimizer)
        crew.append((optimizer, schedule, registered))
    (first, schedule, giver), (second, follower, taker) = crew
    for _ in range(6):
        first.step()
        schedule.step()
    taker.adopt(travelled(giver.current()))
    second.step()
    for _ in range(9):
        assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
        schedule.step()
        follower.step()


def test_a_step_that_did_not_happen_leaves_no_trace_in_schedule_rate_and_average() -> None:
    """The script's operations between the step and its next batch leave no trace either."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule, average = ExponentialLR(optimizer, 0.5), AveragedModel(model)
    registered = RegisteredState()
    registered.add("schedule", schedule)
    registered.add("average", average)
    registered.follow(optimizer)
    average.update_parameters(model)
    registered.keep()
    before = registered.current()
    registered.attempt()
    with torch.no_grad():
        model.weight += 1.0
    average.update_parameters(model)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    registered.undo()
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.step()
    registered.restore()
    now = registered.current()
    assert now.values == before.values
    assert all(torch.equal(now.tensors[name], before.tensors[name]) for name in before.tensors)
    assert schedule.last_epoch == 0


def test_peers_get_the_committed_state_while_a_step_is_in_progress() -> None:
    """Copies for peers are made when the next step has begun already."""
    registered, counter = RegisteredState(), Counter(seen=5)
    registered.add("counter", counter)
    registered.keep()
    registered.attempt()
    counter.state["seen"] = 6
    assert registered.current().values["counter"] == {"seen": 5}
    registered.committed()
    assert registered.current().values["counter"] == {"seen": 6}


def test_deferred_calls_are_made_once_and_only_by_a_step_that_is_taken() -> None:
    registered, made = RegisteredState(), []
    registered.attempt()
    registered.defer(lambda: made.append("first"))
    registered.undo()
    registered.attempt()
    registered.defer(lambda: made.append("second"))
    registered.stepped()
    registered.stepped()
    assert made == ["second"]


STATES: dict[str, Any] = {
    "numbers": {"a": 1, "b": 0.1, "c": True, "d": None, "e": float("inf"), "f": 1 << 80},
    "tuples": {"betas": (0.9, (0.99, [1])), "empty": ()},
    "keys": {1: "one", (2, 3): "pair", "$tensor": "a text"},
    "bytes": {"raw": b"\x00\xff"},
    "random": {"python": random.Random(3).getstate()},
    "ordered": OrderedDict(b=1, a=[2, {"c": 3}]),
}


@pytest.mark.parametrize("name", STATES)
def test_values_of_a_state_dict_are_transferred_unchanged(name: str) -> None:
    values, tensors = split_state(STATES[name], name)
    assert join_state(json.loads(json.dumps(values)), tensors) == STATES[name]


def test_tensors_and_arrays_come_back_with_shape_and_dtype() -> None:
    state = {
        "tensors": [torch.arange(6).reshape(2, 3), {"half": torch.ones(2).half()}],
        "array": np.arange(4, dtype=np.uint32).reshape(2, 2),
        "scalar": np.float32(0.5),
    }
    values, tensors = split_state(state, "mixed")
    assert sorted(tensors) == ["tensors.0", "tensors.1.half"]
    got = join_state(json.loads(json.dumps(values)), tensors)
    assert torch.equal(got["tensors"][0], state["tensors"][0])
    assert got["tensors"][1]["half"].dtype == torch.float16
    assert got["array"].dtype == np.uint32
    assert got["array"].tolist() == [[0, 1], [2, 3]]
    assert got["scalar"] == 0.5


def nested(num_levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(num_levels):
        state = {"in": state}
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": [object()]}}, r"a object at a\.b\.0"),
        ({"fn": len}, "builtin_function_or_method at fn"),
        ({"sparse": torch.eye(2).to_sparse()}, "sparse"),
        ({"much": list(range(20_001))}, "more than 20,000 values"),
        (nested(51), "values nested too deep.*at most 50 levels"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two tensors"),
    ],
)
def test_values_that_cannot_be_carried_are_refused_when_they_are_registered(
    state: dict[str, Any], words: str
) -> None:
    registered = RegisteredState()
    with pytest.raises(InvalidSpec, match=words):
        registered.add("odd", Counter(**state))
    assert not registered


def test_a_state_that_is_too_large_is_refused_with_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state is copied before each step."""
    monkeypatch.setattr(objects, "MAX_TENSOR_BYTES", 100)
    with pytest.raises(InvalidSpec, match=r"404 bytes.*at most 100"):
        RegisteredState().add("large", Counter(table=torch.zeros(101)))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "x" * 65, "param_groups"])
def test_invalid_names_of_registered_objects_are_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match="name"):
        RegisteredState().add(name, Counter())


def test_duplicates_and_things_without_state_are_refused() -> None:
    registered, counter = RegisteredState(), Counter()
    registered.add("counter", counter)
    with pytest.raises(InvalidSpec, match="'counter' is registered already"):
        registered.add("counter", Counter())
    with pytest.raises(InvalidSpec, match="under another name"):
        registered.add("other", counter)
    with pytest.raises(InvalidSpec, match=r"a list.*state_dict\(\)"):
        registered.add("list", [])  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="state_dict"):
        registered.add("class", Counter)  # type: ignore[arg-type]


def test_a_registered_tensor_that_changes_its_shape_is_refused() -> None:
    counter = Counter(table=torch.zeros(3))
    registered = RegisteredState()
    registered.add("counter", counter)
    registered.keep()
    counter.state["table"] = torch.zeros(4)
    with pytest.raises(InvalidSpec, match=r"'counter'.*table: \(4,\).*expected \(3,\)"):
        registered.keep()


def test_a_state_without_what_is_registered_is_refused_by_name() -> None:
    """A registered schedule must not begin from step 0 in the middle of the training."""
    registered = RegisteredState()
    registered.add("schedule", Counter(last=0))
    with pytest.raises(InvalidSpec, match="nothing under 'schedule'"):
        registered.adopt(CapturedState(values={"other": {}}))


def test_an_object_that_does_not_take_another_members_state_is_named() -> None:
    given, taker = RegisteredState(), RegisteredState()
    given.add("net", nn.Linear(2, 3))
    taker.add("net", nn.Linear(2, 4))
    with pytest.raises(InvalidSpec, match="'net' cannot load the state"):
        taker.adopt(given.current())


@pytest.mark.parametrize(
    "values", [{"$tensor": "gone"}, {"$what": 1}, {"$bytes": 3}, {"$array": ["O", [1], "AA=="]}]
)
def test_malformed_values_are_refused(values: Any) -> None:
    with pytest.raises(MalformedMessage):
        join_state(values, {})


def test_a_plateau_that_saw_other_losses_differs_by_its_name_and_place() -> None:
    crew = {}
    for name, loss in (("a", 1.0), ("b", 1.0), ("c", 0.5)):
        registered, schedule = RegisteredState(), ReduceLROnPlateau(optimizer_of())
        registered.add("schedule", schedule)
        schedule.step(loss)
        crew[name] = registered.comparable(with_tensors=True)
    found = difference(crew)
    assert found is not None
    assert found == ("schedule.values.best", {"a": "1.0", "b": "1.0", "c": "0.5"})


def test_averages_may_differ_by_rounding_and_by_nothing_else() -> None:
    def comparable(tensor: torch.Tensor) -> Any:
        registered = RegisteredState()
        registered.add("average", Counter(weight=tensor))
        return registered.comparable(with_tensors=True)

    own = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    assert difference({"a": comparable(own), "b": comparable(own * (1 + 1e-7))}) is None
    for other in (own * 1.001, own.flip(1), -own, own.reshape(50, 4), own.double()):
        found = difference({"a": comparable(own), "b": comparable(other)})
        assert found is not None
        assert found[0].startswith("average.tensors.weight")


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0.0, 1e-20), (0.1, 0.1 * (1 + 1e-7))])
def test_numbers_that_differ_by_rounding_are_the_same_in_any_order(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        assert difference({"a": {"best": first}, "b": {"best": second}}) is None


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.1), (0.0, 1e-9), (1.0, "1.0"), (0, None)])
def test_numbers_that_differ_do_so_in_any_order(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        assert difference({"a": {"best": first}, "b": {"best": second}}) is not None


class LargestResult(TorchDispatchMode):
    """The size of the largest tensor that a call of torch returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def test_large_tensors_are_compared_in_little_memory() -> None:
    """Differences are found wherever they are."""
    num_elements = 5_000_000
    own = (torch.arange(num_elements) // 20_000).to(torch.uint8)
    changed = own.clone()
    changed[num_elements // 2 :].clamp_(max=200)
    crew = {}
    for name, tensor in (("a", own), ("b", own.clone()), ("c", changed), ("d", own.flip(0))):
        registered = RegisteredState()
        registered.add("average", Counter(weight=tensor))
        with LargestResult() as largest:
            crew[name] = registered.comparable(with_tensors=True)
        assert largest.num_bytes < 3 * own.nbytes
    assert difference({name: crew[name] for name in "ab"}) is None
    for name in "cd":
        assert difference({"a": crew["a"], name: crew[name]}) is not None


def test_an_integer_that_cannot_be_written_as_text_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidSpec, match=r"an integer of 16,610 bits at big\.0"):
        RegisteredState().add("counter", Counter(big=[10**5000]))


def test_arguments_the_wrong_way_round_are_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match=r"session\.register\(name, object\)"):
        RegisteredState().add(Counter(), "counter")  # type: ignore[arg-type]


class Mean(nn.Module):
    """A metric like those of torchmetrics: its `state_dict()` may lack its state."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=persistent)


def test_a_module_of_which_nothing_would_be_carried_is_refused() -> None:
    """A member that joins would count from zero."""
    with pytest.raises(InvalidSpec, match=r"'loss'.*Mean.*metric\.persistent\(True\)"):
        RegisteredState().add("loss", Mean(persistent=False))
    RegisteredState().add("loss", Mean(persistent=True))


def test_an_object_whose_state_dict_fails_may_be_registered_again() -> None:
    class Unready(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.state["seen"]}

    registered, metric = RegisteredState(), Unready()
    with pytest.raises(KeyError):
        registered.add("metric", metric)
    assert metric not in registered
    metric.state["seen"] = 1
    registered.add("metric", metric)
    assert metric in registered
