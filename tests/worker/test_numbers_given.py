"""Numbers of other libraries, for each number in the public interface: NumPy's numbers, and tensors
of one number, work like Python's. Other values are refused by the argument's name."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shoal
from shoal.session.joining import join
from shoal.session.session import Session
from shoal.weights.series import SeriesOptions
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index, as_number


@dataclass(frozen=True)
class Argument:
    """An argument of a public call, and a valid value for it."""

    owner: str
    name: str
    value: int | float
    give: Callable[[Any], object]
    """Calls with that argument; the results are compared by their contents."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def made(owner: str, name: str, value: int | float, **others: Any) -> Argument:
    """Return an argument, by name, of a class or function that `shoal` exports."""
    call = getattr(shoal, owner)
    return Argument(owner, name, value, lambda given: call(**{**others, name: given}))


def in_session(
    name: str, value: int | float, act: Callable[[Session, Any, Any, Any], Any]
) -> Argument:
    """Return an argument of a call in the step of a process that trains alone."""

    def give(given: Any) -> object:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with shoal.join() as session:
            model, _ = session.distribute(model, optimizer)
            for batch in session.batches((torch.ones(4, 2), torch.ones(4, 1)), global_batch_size=4):
                with session.step():
                    if name == "num_parts":
                        for part in batch.parts(given):
                            session.backward(mse_loss(model(part.inputs), part.targets))
                    else:
                        weight = given if name == "weight" else None
                        loss = mse_loss(model(batch.inputs), batch.targets)
                        session.backward(loss, weight=weight)
                        if name == "max_norm":
                            session.clip_grad_norm(given)
                act(session, batch, model, given)
            return str(session.state_dict().keys())

    return Argument("Session" if name != "num_parts" else "Batch", name, value, give)


def nothing(*_: Any) -> None:
    pass


def paused(session: Session, batch: Any, model: Any, given: Any) -> None:
    with session.pause("validation", limit_s=given):
        pass


def evaluated(name: str, session: Session, batch: Any, model: Any, given: Any) -> None:
    options: Any = {"batch_size": 2, name: given}
    found = session.evaluate(
        (torch.ones(3, 2),), lambda b: {"n": np.int64(len(b.inputs))}, **options
    )
    assert found == {"n": 3}


def batched(name: str, value: int | float, **others: Any) -> Argument:
    """Return an argument of `Session.batches`."""

    def give(given: Any) -> object:
        data = [(torch.ones(2), torch.ones(1))] * 4
        model: Any = nn.Linear(2, 1)
        with shoal.join() as session:
            model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            options: Any = {"global_batch_size": 2, **others, name: given}
            steps = 0
            for batch in session.batches(data, **options):
                with session.step():
                    session.backward(mse_loss(model(batch.inputs), batch.targets))
                steps += 1
            return steps

    return Argument("Session", name, value, give)


def planned(given: Any) -> object:
    return str(shoal.plan(nn.Linear(8, 8), "fsdp", world_size=given))


def counted_ranks(given: Any, name: str) -> object:
    options: Any = {"world_size": 2, name: given}
    return shoal.run_in_memory(torch.distributed.get_world_size, **options)


def clipped(given: Any) -> object:
    def rank() -> float:
        model: Any = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        model, _ = shoal.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        return float(shoal.clip_grad_norm(model, given))

    return shoal.run_in_memory(rank, 1)


def joined(name: str, given: Any) -> object:
    options: Any = {"max_members": 9, name: given}
    config = join("job", coordinator="127.0.0.1:7700", **options)._config
    return config.min_members, config.max_members, config.desired_members


def checkpoints(name: str, given: Any) -> object:
    options: Any = {"every_steps": 2, name: given}
    found = shoal.Checkpoints("/nowhere", **options)
    return found.every_steps, found.keep, found._limit_s


def sharded(name: str, given: Any) -> object:
    options: Any = {"lengths": [4], name: given}
    found = shoal.Shards([range(4)], **options)
    return found.columns, found.turns, found.shuffle_buffer, found.lengths


def series(name: str, given: Any) -> object:
    options: Any = {name: given}
    return SeriesOptions(**options)


def published(name: str, given: Any) -> object:
    """Pass a number to `publish`: numbers are checked before the coordinator is called."""
    options: Any = {name: given}
    with pytest.raises(InvalidSpec) as refused:
        shoal.publish("no series", {}, **options)
    if name in refused.value.what:
        raise refused.value
    return refused.value.what


def table(owner: str, name: str, given: Any) -> object:
    options: Any = {"embedding_dim": 3, "num_embeddings": 4, name: given}
    found = getattr(shoal, owner)(**options)
    return found.spec(), found.embedding_dim, found.padding_idx, found.cache_rows


LAID_OUT = (*("Zero1", "Zero2", "Zero3", "FSDP", "HSDP", "FSDPTensor"),)
COPIED = (*LAID_OUT, "TensorParallel", "Pipeline", "Hybrid")
ARGUMENTS = [
    *(made(owner, name, 2) for owner in COPIED for name in ("copies", "copy_every_steps")),
    *(made(owner, "min_group_bytes", 64) for owner in LAID_OUT[1:]),
    *(made(owner, "bucket_mb", 2.5) for owner in ("DDP", "Zero1")),
    *(made(owner, "min_split_bytes", 64) for owner in ("TensorParallel", "FSDPTensor", "Hybrid")),
    *(made("Hybrid", name, 2) for name in ("pipeline", "data", "tensor", "max_rank_bytes")),
    *(made(owner, "microbatches", 2) for owner in ("Pipeline", "Hybrid")),
    *(made("HSDP", "shard", 2), made("FSDPTensor", "tensor", 2)),
    *(made(owner, "every_steps", 5) for owner in ("LocalSGD", "DiLoCo", "AsyncDiLoCo")),
    *(made(owner, "outer_lr", 0.5) for owner in ("DiLoCo", "AsyncDiLoCo")),
    *(made(owner, "outer_momentum", 0.5) for owner in ("DiLoCo", "AsyncDiLoCo")),
    made("AsyncSGD", "staleness_bound", 3, consistency="ssp"),
    made("SSP", "staleness_bound", 3),
    *(made(owner, "reject_above", 3) for owner in ("AsyncSGD", "SSP", "BSP")),
    *(made(o, "compensation", 0.5, staleness="compensate") for o in ("AsyncSGD", "SSP", "BSP")),
    *(made(owner, "lost_wait_s", 0.5) for owner in ("AsyncSGD", "SSP", "BSP")),
    *(made("Int8", "block", 64), made("OneBit", "block", 64), made("PowerSGD", "rank", 2)),
    made("TopK", "ratio", 0.5),
    made("RowConstant", "value", 0.5),
    *(made("RowUniform", name, 0.5) for name in ("low", "high")),
    *(made("RowNormal", name, 0.5) for name in ("mean", "std")),
    *(made("RowSGD", name, 0.5, lr=0.5) for name in ("lr", "momentum", "weight_decay")),
    *(made("RowAdagrad", n, 0.5) for n in ("lr", "eps", "initial_accumulator", "weight_decay")),
    *(made("RowAdam", name, 0.5) for name in ("lr", "eps", "weight_decay")),
    Argument("RowAdam", "betas", 0.5, lambda given: shoal.RowAdam(betas=(given, 0.5))),
    *(made("Admission", "min_pushes", 2), made("Admission", "probability", 0.5)),
    *(made("Eviction", name, 2) for name in ("max_rows", "max_shard_bytes")),
    made("Eviction", "max_idle_s", 0.5),
    *(
        Argument(owner, name, 3, partial(table, owner, name))
        for owner in ("EmbeddingTable", "EmbeddingBagTable")
        for name in (
            *("embedding_dim", "num_embeddings", "padding_idx", "seed"),
            *("staleness_bound", "cache_rows", "num_shards"),
        )
    ),
    *(Argument("Checkpoints", n, 3, partial(checkpoints, n)) for n in ("every_steps", "keep")),
    Argument("Checkpoints", "limit_s", 2.5, partial(checkpoints, "limit_s")),
    *(
        Argument("Shards", name, 3, partial(sharded, name))
        for name in ("columns", "turns", "shuffle_buffer")
    ),
    Argument("Shards", "lengths", 4, lambda given: sharded("lengths", [given])),
    *(
        Argument("join", name, 2, partial(joined, name))
        for name in ("min_members", "max_members", "desired_members")
    ),
    Argument("clip_grad_norm", "max_norm", 0.5, clipped),
    Argument("plan", "world_size", 2, planned),
    Argument("run_in_memory", "world_size", 2, partial(counted_ranks, name="world_size")),
    Argument("run_in_memory", "timeout_s", 20.0, partial(counted_ranks, name="timeout_s")),
    *(batched(name, 2) for name in ("global_batch_size", "epochs", "seed")),
    *(batched("num_workers", 0), batched("timeout", 0.0)),
    batched("prefetch_factor", 2, num_workers=1),
    *(
        Argument(owner, name, 3, partial(series, name))
        for owner in ("Session", "publish")
        for name in ("keep", "copies")
    ),
    Argument("publish", "step", 3, partial(published, "step")),
    in_session("weight", 4.0, nothing),
    in_session("max_norm", 0.5, nothing),
    in_session("num_parts", 2, nothing),
    in_session("limit_s", 2.5, paused),
    in_session("limit_s", 2.5, partial(evaluated, "limit_s")),
    in_session("batch_size", 2, partial(evaluated, "batch_size")),
]


def outline(thing: object, depth: int = 5) -> str:
    """Describe an object of Shoal's down to plain values, with their types."""
    if isinstance(thing, bool | int | float | str | None) or hasattr(thing, "SerializeToString"):
        return f"{type(thing).__name__} {thing}"
    if isinstance(thing, dict):
        return str({name: outline(each, depth - 1) for name, each in thing.items()})
    if isinstance(thing, list | tuple):
        return str([outline(each, depth - 1) for each in thing])
    if depth and type(thing).__module__.startswith("shoal") and not isinstance(thing, nn.Module):
        return f"{type(thing).__name__} {outline(dict(getattr(thing, '__dict__', {})), depth - 1)}"
    return type(thing).__name__


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_numbers_of_other_libraries_work_like_pythons(argument: Argument) -> None:
    """Objects are equal to the last attribute: nothing of NumPy or torch is kept, sent or
    compared."""
    value = argument.value
    is_index = isinstance(value, int)
    kinds: list[Callable[[Any], Any]] = [np.int64, np.int32, torch.tensor] if is_index else [
        np.float32, np.float64, torch.tensor
    ]  # fmt: skip
    expected = outline(argument.give(value))
    for kind in kinds:
        assert outline(argument.give(kind(value))) == expected


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_values_that_are_no_numbers_are_refused_by_the_arguments_name(argument: Argument) -> None:
    """True is not a batch size, NaN is not a time limit, an array is not a number."""
    no_numbers = [True, np.bool_(True), torch.tensor(True), "2.5", [2], np.ones(2), 1j]
    no_numbers += [2.5, np.float32(2.5)] if isinstance(argument.value, int) else [np.nan]
    words = {"num_parts": "number of parts", "lengths": "length"}.get(argument.name, argument.name)
    for given in no_numbers:
        with pytest.raises(InvalidSpec, match=f"(?i){words}"):
            argument.give(given)


NEEDS_MPI = ("init_mpi",)
"""Imports its library when it is accessed; takes no numbers."""


def numeric_parameters() -> Iterator[tuple[str, str]]:
    """Yield owner and name of each public parameter annotated as a number."""
    calls: dict[str, Any] = {
        name: getattr(shoal, name) for name in shoal.__all__ if name not in NEEDS_MPI
    }
    for owner, call in calls.items():
        if inspect.isclass(call) and issubclass(call, BaseException):
            continue
        yield from _numeric(owner, call)
    for name, method in inspect.getmembers(Session, inspect.isfunction):
        if not name.startswith("_"):
            yield from _numeric("Session", method)
    yield from _numeric("Batch", shoal.Batch.parts)


def _numeric(owner: str, call: Any) -> Iterator[tuple[str, str]]:
    if owner in ("Batch", "Roster", "RosterMember", "Reject") and inspect.isclass(call):
        return  # scripts read these
    for name, parameter in inspect.signature(call).parameters.items():
        kinds = set(re.findall(r"\w+", str(parameter.annotation)))
        if kinds & {"int", "float"} and not kinds & {"Callable", "Mapping", "Value", "Scalar"}:
            yield owner, name


def test_the_table_has_all_numeric_arguments() -> None:
    known = {(each.owner, each.name) for each in ARGUMENTS}
    assert set(numeric_parameters()) - known == set()


def test_numbers_are_converted_to_pythons_types() -> None:
    assert type(as_index("n", np.int8(3))) is int
    assert type(as_index("n", torch.tensor(3, dtype=torch.uint8))) is int
    assert type(as_number("x", np.float16(0.5))) is float
    assert type(as_number("x", 3)) is float
    for meta in (torch.empty((), device="meta"), 10**400):
        with pytest.raises(InvalidSpec, match=r"^x "):
            as_number("x", meta)
