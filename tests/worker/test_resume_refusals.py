"""A job continues from a checkpoint with the samples with which it was written, or is refused, with
the field that differs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from structlog.testing import capture_logs
from support.members.thread_members import lone
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

import shoal
from shoal.checkpoint import names
from shoal.checkpoint.directory import complete
from shoal.data.order import Order
from shoal.model.same_optimizer import check_same_optimizer
from shoal.state.shards import whole_chunk
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, ShapeMismatch

BATCHES: dict[str, Any] = {"global_batch_size": 24, "epochs": 2, "seed": 5, "shuffle": True}
EVERY_STEPS = 4


def trained(
    cluster: LocalCluster,
    directory: Path,
    strategy: str = "ddp",
    *,
    num_steps: int = 1000,
    samples: Any = None,
    took: Callable[[list[int]], object] = lambda indices: None,
    **changes: Any,
) -> list[int]:
    """Train as a lone member of a new job, at most `num_steps` steps; return the steps taken."""
    model, optimizer = build("sgd", "layers")
    taken = []
    with lone(cluster) as session:
        model, optimizer = session.distribute(
            model,
            optimizer,
            strategy=strategy,
            checkpoints=shoal.Checkpoints(directory, every_steps=EVERY_STEPS),
        )
        for batch in session.batches(samples or data(), **{**BATCHES, **changes}):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            taken.append(batch.step)
            took(batch.indices)
            if len(taken) == num_steps:
                break
    return taken


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_a_checkpoint_with_another_order_of_samples_is_refused(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The checkpoint's step would skip some of the other samples, and train others twice."""
    trained(cluster, tmp_path, strategy, num_steps=6)
    assert max(complete(tmp_path)) == EVERY_STEPS
    inputs, targets = data()
    other_batches = [({"global_batch_size": 12}, "global_batch", "12", "24")]
    for changes, field, seen, expected in (
        # Other strategies continue at the sample.
        *(other_batches if strategy == "local-sgd" else []),
        ({"seed": 6}, "seed", "6", "5"),
        ({"shuffle": False}, "shuffle", "false", "true"),
        ({"samples": (inputs[:90], targets[:90])}, "dataset", r"\(90, 20\)", r"\(101, 20\)"),
    ):
        with pytest.raises(InvalidSpec, match=f"{field}.*{seen}.*expected.*{expected}.*directory"):
            trained(cluster, tmp_path, strategy, **changes)
    assert trained(cluster, tmp_path, strategy) == list(range(EVERY_STEPS, 10))


def test_a_checkpoint_with_other_samples_of_the_same_size_is_warned_of(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Labels may have been corrected on purpose. A split without a seed is another one now."""
    inputs, targets = data()
    trained(cluster, tmp_path, num_steps=6)
    with capture_logs() as logs:
        trained(cluster, tmp_path, num_steps=1)
    assert "checkpoint_of_other_samples" not in [entry["event"] for entry in logs]
    with capture_logs() as logs:
        samples = inputs.flip(0), targets.flip(0)
        assert trained(cluster, tmp_path, num_steps=1, samples=samples) == [EVERY_STEPS]
    (line,) = [entry for entry in logs if entry["event"] == "checkpoint_of_other_samples"]
    assert line["log_level"] == "warning" and "seeded" in line["hint"]


def indices_of(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_run_with_another_batch_size_goes_on_at_the_sample(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The size changes twice: 4 steps of 24 samples, 4 of 12, and the rest in steps of 30. Each
    sample counts once an epoch, in an order that does not depend on the size; the count of steps
    continues."""
    taken: list[Any] = []
    for size, num_steps in ((24, 4), (12, 4), (30, 1000)):
        again: list[Any] = []
        steps = trained(
            cluster,
            tmp_path,
            strategy,
            num_steps=num_steps,
            global_batch_size=size,
            took=again.append,
        )
        assert steps[0] == len(taken)
        taken += again
    # 101 samples an epoch: 96 and 5 of the first, then 36 of the second.
    sizes = [len(batch) for batch in taken]
    assert sizes == [24, 24, 24, 24, 5, 12, 12, 12, 30, 30, 5]
    order = Order(num_samples=101, global_batch_size=1, seed=5)
    expected = [*order.indices(0, 0, 101).tolist(), *order.indices(1, 0, 101).tolist()]
    assert indices_of(taken) == expected


def test_a_finished_run_is_trained_for_more_epochs(cluster: LocalCluster, tmp_path: Path) -> None:
    """The order of an epoch does not depend on the number of epochs."""
    assert trained(cluster, tmp_path) == list(range(10))
    assert trained(cluster, tmp_path, epochs=3) == list(range(8, 15))


def test_a_checkpoint_without_fields_of_its_samples_is_continued_from(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Plain torch writes such checkpoints: there is nothing to compare."""
    model, _ = build("sgd", "layers")
    own = {"format": 1, "step": 4, "values": {}, "checksums": False}
    saved = {"model": model.state_dict(), "shoal": {"state": json.dumps(own)}}
    dcp.save(saved, checkpoint_id=tmp_path / "step-00000004", no_dist=True)
    assert names.key_of(names.OWN) == "shoal.state"
    assert trained(cluster, tmp_path, global_batch_size=50) == [4, 5]


@pytest.mark.parametrize("entry", [{}, {"step": torch.tensor(1000)}, {"step": 7}], ids=str)
def test_a_checkpoint_of_an_earlier_step_than_its_name_says_is_refused_when_it_is_read(
    tmp_path: Path, entry: Mapping[str, Any]
) -> None:
    """Regression: the run's own first checkpoint was refused, beside that of a later step."""
    model, _ = build("sgd", "layers")
    saved = {"model": model.state_dict(), **entry}
    dcp.save(saved, checkpoint_id=tmp_path / "step-00001000", no_dist=True)
    checkpoints = shoal.Checkpoints(tmp_path, every_steps=1)
    with pytest.raises(InvalidSpec, match=r"of an earlier step than its name says.*entry step"):
        checkpoints.read(max(checkpoints.steps()), whole_chunk)


def test_a_checkpoint_has_the_fields_of_its_samples(cluster: LocalCluster, tmp_path: Path) -> None:
    """Fields of the samples are beside the step, where a person can read them."""
    trained(cluster, tmp_path, num_steps=5)
    entries: dict[str, Any] = {"shoal": {"state": ""}}
    dcp.load(entries, checkpoint_id=complete(tmp_path)[EVERY_STEPS], no_dist=True)
    samples = json.loads(entries["shoal"]["state"])["values"]["samples"]
    assert samples["global_batch"] == "24"
    assert samples["seed"] == "5"
    assert samples["order"] == "1"


def one_step(directory: Path, strategy: str, kind: Any, num_groups: int = 1, **options: Any) -> Any:
    """Take one step as a lone process without a cluster; return the optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5))
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    groups = layers if num_groups == 2 else [[*layers[0], *layers[1]]]
    optimizer = kind([{"params": each} for each in groups], lr=1e-3, **options)
    kept = shoal.Checkpoints(directory, every_steps=1)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=kept)
        for batch in session.batches(data(), global_batch_size=50):
            with session.step():
                session.forward_backward(batch, cross_entropy)
            session.stop("one is enough")
    return optimizer


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
@pytest.mark.parametrize(
    ("first", "second"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("AdamW", "Adam"), ("Adam", "Adamax")]
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, strategy: str, first: str, second: str
) -> None:
    """The checkpoint's learning rate and decay would replace the script's."""
    one_step(tmp_path, strategy, getattr(torch.optim, first))
    with pytest.raises(InvalidSpec, match=rf"another optimizer.*saw {first};.*expected {second}"):
        one_step(tmp_path, strategy, getattr(torch.optim, second))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_checkpoint_with_other_groups_is_refused(tmp_path: Path, strategy: str) -> None:
    """Parameters would all have the settings of the first group."""
    one_step(tmp_path, strategy, torch.optim.SGD, num_groups=2)
    with pytest.raises(InvalidSpec, match=r"2\.\w+ in group 1; expected 2\.\w+ in group 0"):
        one_step(tmp_path, strategy, torch.optim.SGD)
    one_step(tmp_path, strategy, torch.optim.SGD, num_groups=2)


def step_of(directory: Path, strategy: str, model: torch.nn.Module, **registered: Any) -> None:
    """Take one step as a lone process, for the trained parameters of the model; continue from a
    checkpoint if there is one."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    kept = shoal.Checkpoints(directory, every_steps=1)
    with shoal.join() as session:
        for name, each in registered.items():
            session.register(name, each(optimizer))
        replica, optimizer = session.distribute(model, optimizer, strategy, checkpoints=kept)
        for batch in session.batches(data(), global_batch_size=50):
            with session.step():
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
            session.stop("one is enough")


def net(num_more: int = 0, *, frozen: bool = False, buffer: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    more = [torch.nn.Linear(5, 5) for _ in range(num_more)]
    model = torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.Linear(4, 5), *more)
    model[0].requires_grad_(not frozen)
    if buffer:
        model.register_buffer("seen", torch.zeros(1))
    return model


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("first", "second", "seen"),
    [
        ({"num_more": 1}, {}, r"model, which lacks a tensor; saw 2\.bias"),
        ({"buffer": True}, {}, r"model, which lacks a tensor; saw seen"),
        ({}, {"num_more": 1}, r"model at 2\.weight; saw missing"),
        ({}, {"frozen": True}, r"another optimizer.*saw 0\.bias in the state"),
        ({"frozen": True}, {}, r"another optimizer.*saw a state without 0\.bias"),
    ],
)
def test_a_checkpoint_of_a_larger_or_smaller_model_is_refused(
    tmp_path: Path, strategy: str, first: Any, second: Any, seen: str
) -> None:
    """Further tensors of the checkpoint would be ignored silently."""
    step_of(tmp_path, strategy, net(**first))
    with pytest.raises((InvalidSpec, ShapeMismatch), match=seen):
        step_of(tmp_path, strategy, net(**second))


class Metric:
    """A script's own metric."""

    def __init__(self, _: Any) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_with_a_registered_object_of_another_class_is_refused(
    tmp_path: Path, strategy: str
) -> None:
    """torch's schedules accept any state, and would begin from step 0."""
    step_of(tmp_path, strategy, net(), schedule=Metric)
    with pytest.raises(InvalidSpec, match=r"another class; saw Metric; expected ExponentialLR"):
        step_of(tmp_path, strategy, net(), schedule=lambda each: ExponentialLR(each, 0.5))
    with capture_logs() as logs:
        step_of(tmp_path, strategy, net())
    logged = [each["names"] for each in logs if each["event"] == "registered_state_dropped"]
    assert logged == ["schedule"]


def test_a_state_without_its_optimizers_name_is_recognised_by_its_settings() -> None:
    """Plain torch writes such a state."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    settings = {
        kind.__name__: {"params": ["w"], **kind(parameters, lr=1e-3).defaults}
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    }
    for written, groups in settings.items():
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            optimizer = kind(parameters, lr=1e-3)
            if kind.__name__ == written:
                check_same_optimizer(optimizer, [["w"]], {"groups": [groups]})
                continue
            with pytest.raises(InvalidSpec, match="another optimizer"):
                check_same_optimizer(optimizer, [["w"]], {"groups": [groups]})
    check_same_optimizer(torch.optim.SGD(parameters, lr=1e-3), [["w"]], {})
