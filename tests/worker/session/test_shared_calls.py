"""Calls of all members between two steps: evaluations, sums, the whole model. Each sample counts
once, and the loss of a member ends no other member."""

import itertools
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.members.reduced_values import reduced
from support.members.thread_members import Killed, ThreadJob, lone
from support.network import http
from support.processes.ranks import Rank, Ranks
from support.processes.served_process import awaited
from support.processes.worlds import run_on_gloo
from support.training import elastic_bodies, evaluation_bodies
from support.training.elastic_bodies import NUM_SAMPLES, build
from support.training.elastic_bodies import numbers as data
from support.training.evaluation_bodies import BATCH, Evaluating
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import shoal
from shoal.data.batches import Batch
from shoal.session.evaluation import Measure
from shoal.session.session import Session
from shoal.session.shared_calls import Reduction, values_by_name
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

WAIT_S = 60.0
Body = Callable[[Session, Any, int], Any]
"""Calls of a member after a step, of (session, model, step); the result goes to the test."""


def crew(cluster: LocalCluster, num_members: int, body: Body, **options: Any) -> list[Any]:
    """Return the results of `body` after each step, for each member (a thread of this process)."""
    job = ThreadJob(cluster=cluster, num_members=num_members)

    def member() -> Any:
        model, optimizer = build("sgd", "layers")
        found = []
        with job.join() as session:
            model, optimizer = session.distribute(model, optimizer, **options)
            for batch in session.batches(data(), global_batch_size=50):
                with session.step() as step:
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if step.committed:
                    found.append(body(session, model, batch.step))
        return found

    return job.outcomes(member)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("source", ["tensors", "loader"])
def test_an_evaluation_counts_each_sample_once_on_three_members(
    cluster: LocalCluster, strategy: str, source: str
) -> None:
    """Shares of 101 samples in batches of 5 on 3 members differ, and in the last batch some members
    have none."""
    given: Any = data()
    if source == "loader":
        given = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)

    def body(session: Session, model: Any, step: int) -> Any:
        sums = session.evaluate(
            given,
            lambda batch: evaluation_bodies.measured(model, batch),
            batch_size=None if source == "loader" else BATCH,
        )
        state = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        metrics = {name: float(value) for name, value in sums.items()}
        return {"metrics": metrics, "state": state}

    found = crew(cluster, 3, body, strategy=strategy)
    assert found[0] == found[1] == found[2]
    for looked in found[0]:
        evaluation_bodies.check(looked)


def test_a_member_that_fails_in_an_evaluation_ends_no_other(
    cluster: LocalCluster,
) -> None:
    """The others begin again, without the sums that included the lost member's."""
    failing = threading.Lock()

    def body(session: Session, model: Any, step: int) -> Any:
        def measure(batch: shoal.Batch) -> dict[str, int]:
            if step == 1 and batch.step == 1 and failing.acquire(blocking=False):
                raise ValueError("a bug of one member's")
            return {"samples": len(batch.inputs)}

        return session.evaluate(data(), measure, batch_size=BATCH)["samples"]

    found = crew(cluster, 3, body)
    assert sorted(type(each).__name__ for each in found) == ["ValueError", "list", "list"]
    assert [each for each in found if isinstance(each, list)] == [[NUM_SAMPLES] * 3] * 2


def test_the_error_for_a_loss_in_the_scripts_own_pass_names_session_evaluate(
    cluster: LocalCluster,
) -> None:
    """The loss ends the script: only the script could run the pass again."""

    def body(session: Session, model: Any, step: int) -> Any:
        if session.rank == 1 and step == 1:
            raise ValueError("a bug of one member's")
        with torch.no_grad():
            return float(model(data()[0]).sum())

    found = crew(cluster, 2, body, strategy="fsdp")
    lost = next(each for each in found if not isinstance(each, ValueError))
    assert isinstance(lost, RuntimeError)
    assert any("session.evaluate" in note for note in lost.__notes__)


def test_the_scripts_own_error_gets_no_note_about_collectives(cluster: LocalCluster) -> None:
    """The other member has ended the generation with the same error."""
    met = threading.Barrier(2)

    def body(session: Session, model: Any, step: int) -> Any:
        if step == 1:
            met.wait(WAIT_S)
            if session.rank == 1:
                time.sleep(1.0)
            raise RuntimeError("a bug of all members'")

    found = crew(cluster, 2, body)
    assert [str(each) for each in found] == ["a bug of all members'"] * 2
    assert [getattr(each, "__notes__", []) for each in found] == [[], []]


def test_values_of_all_members_are_reduced(cluster: LocalCluster) -> None:
    def body(session: Session, model: Any, step: int) -> Any:
        rank = session.rank
        return [
            session.all_reduce(rank + 1),
            session.all_reduce(0.5 * rank, "mean"),
            session.all_reduce(rank, "max"),
            session.all_reduce({"a": torch.tensor([rank, 1]), "b": -rank}, "min"),
            session.all_reduce(torch.tensor([1.0, rank]), "mean"),
        ]

    for each in crew(cluster, 3, body):
        total, mean, highest, lowest, tensor = each[0]
        assert (total, mean, highest) == (6, 0.5, 2)
        assert type(total) is int
        assert (lowest["a"].tolist(), lowest["b"]) == ([0, 1], -2)
        assert tensor.tolist() == [1.0, 1.0]


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("values", [(0.0, math.nan, 2.0), (0.0, 1.0, math.nan), (math.nan, 5, 6)])
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_of_any_member_is_the_largest_and_the_smallest(
    op: Reduction, values: Sequence[float]
) -> None:
    """Holds for tensors of each dtype and for numbers, on all members, as in torch.max. Gloo
    returns either the number or NaN. Other elements are reduced as usual."""
    given: list[dict[str, Any]] = [{"number": value} for value in values]
    for rank, (value, each) in enumerate(zip(values, given, strict=True)):
        each |= {str(kind): torch.tensor([value, -value, rank], dtype=kind) for kind in FLOATS}
    for found in run_on_gloo(3, reduced, op, given):
        assert math.isnan(found.pop("number"))
        for name, (dtype, (first, second, third)) in found.items():
            assert dtype == name
            assert math.isnan(first)
            assert math.isnan(second)
            assert third == (2 if op == "max" else 0)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_integers_of_all_sizes_do_not_wrap(op: Reduction) -> None:
    """Integers are reduced as int64, as in torch.sum; a mean is a float."""
    largest = {
        dtype: torch.iinfo(dtype).max
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    }
    given = {str(dtype): torch.tensor([value], dtype=dtype) for dtype, value in largest.items()}
    for found in run_on_gloo(3, reduced, op, [given] * 3):
        for dtype, value in largest.items():
            name, (seen,) = found[str(dtype)]
            assert name == ("torch.float32" if op == "mean" else "torch.int64")
            # float32 limits the precision of a mean; everything else is exact.
            expected = pytest.approx(value, rel=1e-7) if op == "mean" else value
            assert seen == (3 * value if op == "sum" else expected)


def test_values_are_reduced_by_name_and_not_by_their_order() -> None:
    """A dict may be made from a set, whose order differs from process to process."""
    given = {"correct": torch.tensor([10.0]), "total": torch.tensor([1e3]), "n": 1}
    for found in run_on_gloo(2, reduced, "sum", [given, dict(reversed(given.items()))]):
        assert found["correct"][1] == [20.0] and found["total"][1] == [2e3] and found["n"] == 2


def test_tensors_are_added_by_index_and_not_by_their_place_in_memory() -> None:
    """A member's tensor may be transposed, or have its channels last."""
    numbers = torch.arange(6.0).view(2, 3)
    given = [{"sum": numbers}, {"sum": numbers.t().contiguous().t()}]
    for found in run_on_gloo(2, reduced, "sum", given):
        assert found["sum"][1] == (2 * numbers).tolist()


def test_a_mean_of_half_types_does_not_overflow_in_the_sum() -> None:
    given = {"loss": torch.tensor([60000.0], dtype=torch.float16)}
    for found in run_on_gloo(3, reduced, "mean", [given] * 3):
        assert found["loss"] == ("torch.float16", [60000.0])


def test_infinities_of_both_signs_add_up_to_nan_and_too_large_a_sum_to_infinity() -> None:
    given = [{"both": math.inf, "large": 1e308}, {"both": -math.inf, "large": 1e308}]
    for found in run_on_gloo(2, reduced, "sum", given):
        assert math.isnan(found["both"])
        assert found["large"] == math.inf


def test_scalars_of_numpy_are_numbers() -> None:
    """Includes values of a measure, and members that have no samples of a batch."""
    given = {"loss": np.float32(1.5), "hits": np.int64(3), "all": np.bool_(True)}
    for found in run_on_gloo(2, reduced, "sum", [given] * 2):
        assert found == {"loss": 3.0, "hits": 6, "all": 2}


def test_complex_numbers_have_no_largest() -> None:
    with pytest.raises(InvalidSpec, match="z has no max over members"):
        values_by_name({"z": torch.ones(1, dtype=torch.complex64)}, "max")


def test_booleans_are_counted() -> None:
    values = values_by_name({"hits": torch.tensor([True, False])})
    assert (values["hits"] + values["hits"]).tolist() == [2, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1: 2}, "not a string; saw 1"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        ({"n": torch.zeros(1, dtype=torch.uint16)}, "n cannot be reduced.*uint16"),
        (1j, "cannot be reduced.*complex"),
        (np.ones(2), "cannot be reduced.*ndarray"),
    ],
    ids=["names", "sparse", "uint16", "complex", "array"],
)
def test_values_that_cannot_be_reduced_are_refused_before_they_are_sent(
    value: Any, words: str
) -> None:
    with pytest.raises(InvalidSpec, match=words):
        values_by_name(value)


def refusals() -> list[Any]:
    def calls(session: Session, model: Any, step: int) -> Any:
        if session.rank == 0:
            return session.all_reduce(1)
        return session.evaluate(data(), lambda _: {"n": 1}, batch_size=BATCH)

    def values(session: Session, model: Any, step: int) -> Any:
        return session.all_reduce({"a": torch.zeros(1 + session.rank)})

    def operations(session: Session, model: Any, step: int) -> Any:
        return session.all_reduce(torch.ones(1), "max" if session.rank else "sum")

    def kinds(session: Session, model: Any, step: int) -> Any:
        return session.all_reduce("a text")  # type: ignore[arg-type]

    def nothing(session: Session, model: Any, step: int) -> Any:
        return session.evaluate(data(), lambda _: 1, batch_size=BATCH)  # type: ignore[arg-type,return-value]

    def samples(session: Session, model: Any, step: int) -> Any:
        some = [each[session.rank :][:40] for each in data()]
        return session.evaluate(tuple(some), lambda _: {"n": 1}, batch_size=BATCH)

    return [
        pytest.param(samples, r"different calls.*content \w+.*; .*content", id="samples"),
        pytest.param(calls, r"different calls between two steps.*all_reduce", id="calls"),
        pytest.param(values, r"different values.*\(1,\).*\(2,\)", id="shapes"),
        pytest.param(operations, r"different calls.*'sum'.*'max'", id="operations"),
        pytest.param(kinds, "the value cannot be reduced", id="kinds"),
        pytest.param(nothing, "returned no named values", id="no names"),
    ]


def test_a_value_for_each_sample_is_refused_and_not_spread_over_another_batch() -> None:
    """Batches have four and one samples: torch would broadcast the last value over the others."""

    def measure(batch: Batch) -> Any:
        return {"each": batch.inputs}

    model: Any
    model, optimizer = build("sgd", "layers")
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        refused = r"'each' in different shapes.*saw \(1,\), and \(4,\)"
        for step in session.batches(data(), global_batch_size=NUM_SAMPLES):
            with session.step():
                session.backward(cross_entropy(model(step.inputs), step.targets))
            with pytest.raises(InvalidSpec, match=refused):
                session.evaluate((torch.ones(5),), measure, batch_size=4)


def evaluated_alone(samples: Any, measure: Measure, batch_size: int) -> dict[str, float]:
    """Return the sums after one step of a session without other members."""
    model: Any
    model, optimizer = build("sgd", "layers")
    found = {}
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(data(), global_batch_size=NUM_SAMPLES):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            found = session.evaluate(samples, measure, batch_size=batch_size)
    return {name: float(value) for name, value in found.items()}


def test_an_evaluation_adds_half_precision_sums_in_float32() -> None:
    """1,024 + 4 is 1,024 in bfloat16."""

    def measure(batch: Batch) -> dict[str, torch.Tensor]:
        num = batch.inputs.sum()
        return {"bf16": num.bfloat16(), "fp16": (100 * num).half()}

    found = evaluated_alone(TensorDataset(torch.ones(4_000), torch.ones(4_000)), measure, 4)
    assert found == {"bf16": 4e3, "fp16": 4e5}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 10, "sampler": SubsetRandomSampler(range(80, 100))},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(80, 100)), 10, drop_last=False)},
        {"batch_size": 10, "sampler": RandomSampler(range(100), num_samples=20)},
        {"batch_size": 10, "sampler": itertools.cycle(range(100))},
    ],
    ids=["subset", "batches", "drawn", "endless"],
)
def test_a_loader_that_leaves_samples_out_is_not_evaluated_as_a_whole(
    options: dict[str, Any],
) -> None:
    loader = DataLoader(TensorDataset(torch.ones(100), torch.ones(100)), **options)
    with pytest.raises(InvalidSpec, match="each sample once"):
        evaluated_alone(loader, lambda batch: {"n": batch.num_samples}, 10)


def test_a_loader_that_takes_all_samples_in_an_order_of_its_own_is_evaluated() -> None:
    samples = TensorDataset(torch.ones(100), torch.ones(100))
    sampler = SubsetRandomSampler(range(100))
    for options in (
        {"sampler": sampler},
        {"batch_sampler": BatchSampler(sampler, 7, drop_last=False)},
    ):
        loader: Any = DataLoader(samples, **options)
        assert evaluated_alone(loader, lambda batch: {"n": batch.num_samples}, 10) == {"n": 100}


def test_an_evaluation_of_a_subclass_of_tensor_dataset_measures_its_samples() -> None:
    """Regression: whole tensors were indexed, without the subclass's `__getitem__`."""

    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            inputs, targets = super().__getitem__(index)
            return 2 * inputs, targets

    inputs, targets = data()
    found = evaluated_alone(
        Doubled(inputs, targets),
        lambda batch: {"sum": float(batch.inputs.sum())},
        NUM_SAMPLES,
    )
    assert found["sum"] == pytest.approx(2 * float(inputs.sum()), abs=1e-3)


@pytest.mark.parametrize(("body", "words"), refusals())
def test_different_calls_of_members_are_an_error_that_names_them(
    cluster: LocalCluster, body: Body, words: str
) -> None:
    """Members all get the error, at once; none hangs."""
    found = crew(cluster, 2, body)
    assert all(isinstance(each, InvalidSpec) for each in found), found
    for each in found:
        with pytest.raises(InvalidSpec, match=words):
            raise each


def test_shared_calls_before_the_first_batch_or_within_a_step_are_refused(
    cluster: LocalCluster,
) -> None:
    """A joiner would make the call alone before the first batch; within a step it is refused."""
    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        replica, optimizer = session.distribute(model, optimizer)
        with pytest.raises(InvalidSpec, match=r"session\.all_reduce.* before the first batch"):
            session.all_reduce(1)
        batches = session.batches(data(), global_batch_size=101)
        # The member knows its rank, and has no batch yet.
        assert session.rank == 0
        with pytest.raises(InvalidSpec, match=r"session\.all_reduce.* before the first batch"):
            session.all_reduce(1)
        for batch in batches:
            with session.step():
                with pytest.raises(InvalidSpec, match=r"session\.all_reduce within a step"):
                    session.all_reduce(1)
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
            assert session.all_reduce(2.5) == 2.5


def test_ranks_are_final_once_batches_returns(cluster: LocalCluster) -> None:
    """Exactly one member is the first, from `batches` on."""
    job = ThreadJob(cluster=cluster, num_members=2)

    def member() -> tuple[bool, int, int]:
        model, optimizer = build("sgd", "layers")
        with job.join() as session:
            replica, optimizer = session.distribute(model, optimizer)
            batches = session.batches(data(), global_batch_size=101)
            ranks = session.is_first, session.rank, session.world_size
            for batch in batches:
                assert ranks == (session.is_first, session.rank, session.world_size)
                with session.step():
                    session.backward(cross_entropy(replica(batch.inputs), batch.targets))
            assert session.step_number == 1
            return ranks

    assert sorted(job.results(member)) == [(False, 1, 2), (True, 0, 2)]


@pytest.mark.parametrize(
    ("call", "strategy"),
    [
        ("state_dict", "fsdp"),
        pytest.param("all_reduce", "ddp", marks=pytest.mark.long),
        pytest.param("evaluate", "zero1", marks=pytest.mark.long),
    ],
)
def test_a_call_of_one_member_alone_is_refused_by_all_of_them(
    cluster: LocalCluster, call: str, strategy: str
) -> None:
    """The refusal says where each member waits. It comes in the generation of the call, long before
    a collective's limit, which would break the generation and repeat the call."""
    run = Evaluating(
        coordinator=cluster.coordinator,
        job=f"lone-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        desired_members=2,
        batch_size=24,
        at_step=2,
        fault=call,
    )
    with Ranks() as ranks:
        body = evaluation_bodies.train_with_a_lone_call
        members = [ranks.start(body, replace(run, member_id=name)) for name in "ab"]
        refusals = [member.expect("refused") for member in members]
        assert [each["generation"] for each in refusals] == [1, 1]
        for each in refusals:
            assert "wait for each other at different points" in each["text"]
            assert f"session.{call}" in each["text"]
            assert "session.step() after 3 steps" in each["text"]


@pytest.mark.sampled("fault")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1", "tensor"])
@pytest.mark.parametrize("fault", ["kill in evaluation", "kill before state_dict"])
def test_survivors_of_a_kill_between_two_steps_go_on(
    cluster: LocalCluster, fault: str, strategy: str
) -> None:
    """The survivors have the metrics of all samples, and of the model with which they continue."""
    run = Evaluating(
        coordinator=cluster.coordinator,
        job=f"between-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        options={"min_split_bytes": 0} if strategy == "tensor" else {},
        desired_members=3,
        batch_size=24,
        at_step=2,
    )
    with Ranks() as ranks:
        members = [
            ranks.start(
                evaluation_bodies.train,
                Evaluating(**{**vars(run), "member_id": name, "fault": fault * (name == "c")}),
            )
            for name in "abc"
        ]
        assert members[2].join() == -signal.SIGKILL
        ends = [member.expect("finished") for member in members[:2]]
        assert ends == [{"step": 5}] * 2
        for member in members[:2]:
            looked = [report for kind, report in member.seen if kind == "looked"]
            assert looked[-1]["step"] == 5
            assert looked[-1]["total"] == 2
            checked = [report for report in looked if report["same"]]
            for report in checked:
                evaluation_bodies.check(report)
            # After that step too: if not at first, then when it was taken again.
            assert {report["step"] for report in checked} >= {3, 5}
            assert member.join() == 0
        seen = [[report for kind, report in m.seen if kind == "looked"] for m in members[:2]]
        assert seen[0] == seen[1]


def evaluate_first(session: Session, model: Any, measure: Callable[[Batch], Any]) -> None:
    session.evaluate(data(), measure, batch_size=BATCH)


def reduce_first(session: Session, model: Any, measure: Callable[[Batch], Any]) -> None:
    measure(Batch(inputs=[], targets=[], indices=[], weight=0.0, step=0, epoch=0))
    session.all_reduce(1)


@pytest.mark.parametrize(
    ("strategy", "options", "call"),
    [
        ("ddp", {}, evaluate_first),
        ("fsdp", {}, evaluate_first),
        ("fsdp", {"copy_every_steps": 2}, reduce_first),
        ("local-sgd", {"every_steps": 1}, reduce_first),
    ],
)
def test_a_batch_from_before_a_loss_in_a_call_is_handed_out_again(
    cluster: LocalCluster, strategy: str, options: dict[str, int], call: Callable[..., None]
) -> None:
    """The call is between the hand-out of a batch and its step. Regression: the step was committed
    without the lost member's samples, and after a rollback with another step's samples."""
    job = ThreadJob(cluster=cluster, num_members=3)
    # Later with rarer copies: those of step 2 are whole before those of step 4 are made.
    at_step, whole_at = (4, 3) if "copy_every_steps" in options else (3, 3)
    trained: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    # Not in the members' threads, which share torch's generator.
    built = {name: build("sgd", "layers") for name in trained}
    for built_model, _ in built.values():
        built_model.register_buffer("num_passes", torch.tensor(0))
        built_model.register_forward_hook(lambda own, *_: own.num_passes.add_(1) and None)

    def member(name: str) -> Any:
        def measure(batch: Batch) -> dict[str, int]:
            if name == "c":
                raise Killed
            return {"samples": len(batch.inputs)}

        model, optimizer = built[name]
        run = Evaluating(coordinator="", job="", member_id=name, strategy=strategy, options=options)
        with job.join(member_id=name, min_members=2) as session:
            given = elastic_bodies.strategy_of(run)
            model, optimizer = session.distribute(model, optimizer, strategy=given)
            schedule = StepLR(optimizer, 100)
            if strategy != "local-sgd":
                session.register("schedule", schedule)
            for batch in session.batches(data(), global_batch_size=24):
                if batch.step == whole_at and strategy == "fsdp":
                    given.flush()  # copies may take longer than these steps
                if batch.step == at_step and session.world_size == 3:
                    call(session, model, measure)
                with session.step() as step:
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if step.committed:
                    del trained[name][batch.step :]
                    trained[name].append(len(batch.indices))
                if strategy != "local-sgd":
                    schedule.step()
            return session.step_number, session.state_dict(), schedule.last_epoch

    ends = job.outcomes(member, ("a",), ("b",), ("c",))
    assert isinstance(ends.pop(), Killed)
    sizes = [a + b for a, b in zip(trained["a"], trained["b"], strict=True)]
    assert sizes[at_step:] == ([24] * 4 + [5])[at_step:]
    run = Evaluating(coordinator="", job="", member_id="", batch_size=24)
    expected = elastic_bodies.one_process(run, 5)
    for step, weights, num_scheduled in ends:
        assert step == 5
        assert weights["num_passes"] == 5, "the statistics of a repeated step count twice"
        if strategy != "local-sgd":
            assert num_scheduled == 5
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value)


def gated(cluster: LocalCluster, gate: Path) -> Evaluating:
    """Return a run in which three members train three steps, and measure once the file `gate`
    exists."""
    return Evaluating(
        coordinator=cluster.coordinator,
        job=f"between-{secrets.token_hex(4)}",
        member_id="",
        desired_members=3,
        batch_size=24,
        at_step=3,
        gate=str(gate),
    )


def measuring(ranks: Ranks, run: Evaluating) -> list[Rank]:
    """Start the three members; return them during their evaluation."""
    body = evaluation_bodies.train_until_joined
    crew = [ranks.start(body, replace(run, member_id=name)) for name in "abc"]
    for member in crew:
        member.expect("measuring")
    return crew


@pytest.mark.long
def test_a_joiner_waits_until_an_evaluation_that_begins_again_is_over(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The joiner waits when a member is killed, so the next generation includes it, but its script
    is elsewhere."""
    run = gated(cluster, tmp_path / "gate")
    with Ranks() as ranks:
        body = evaluation_bodies.train_until_joined
        crew = measuring(ranks, run)
        joiner = ranks.start(body, replace(run, member_id="d"))
        url = f"{cluster.http_url}/api/v1/jobs/{run.job}/members/d/why"
        awaited(lambda: http.get(url).status_code == 200 or None, WAIT_S, "d waits")
        crew[2].send_signal(signal.SIGKILL)
        assert crew[2].join() == -signal.SIGKILL
        (tmp_path / "gate").touch()
        for member in crew[:2]:
            assert member.expect("looked") == {"samples": NUM_SAMPLES, "world_size": 2}
        ends = [member.expect("finished")["step"] for member in (*crew[:2], joiner)]
        assert len(set(ends)) == 1


@pytest.mark.long
def test_the_last_member_of_an_evaluation_completes_it_and_trains_with_joiners(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two of three members are killed in the evaluation. Two others join before it begins again,
    and wait until the last member has completed it."""
    run = replace(gated(cluster, tmp_path / "gate"), min_members=2)
    with Ranks() as ranks:
        body = evaluation_bodies.train_until_joined
        crew = measuring(ranks, run)
        for member in crew[1:]:
            member.send_signal(signal.SIGKILL)
        joiners = [ranks.start(body, replace(run, member_id=name)) for name in "bc"]
        for name in "bc":
            url = f"{cluster.http_url}/api/v1/jobs/{run.job}/members/{name}/why"
            awaited(lambda url=url: http.get(url).status_code == 200 or None, WAIT_S, "it waits")
        (tmp_path / "gate").touch()
        assert crew[0].expect("looked") == {"samples": NUM_SAMPLES, "world_size": 1}
        ends = [member.expect("finished")["step"] for member in (crew[0], *joiners)]
        assert len(set(ends)) == 1
    shown = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/events?limit=1000").json()
    assert "bring_up_failed" not in {each["kind"] for each in shown["events"]}
