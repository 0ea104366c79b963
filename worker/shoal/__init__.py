"""Elastic training for PyTorch.

import shoal

with shoal.join("digits") as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(dataset, global_batch_size=256, epochs=10):
        with session.step():
            loss = loss_fn(model(batch.inputs), batch.targets)
            session.backward(loss)
"""

import os
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.backends.in_memory.run import run_in_memory
    from shoal.backends.mpi.group import init_mpi
    from shoal.checkpoint.background import Checkpoints
    from shoal.compression.half import BF16, FP16
    from shoal.compression.low_rank import PowerSGD
    from shoal.compression.quantised import Int8, OneBit
    from shoal.compression.sparse import TopK
    from shoal.data.batches import Batch
    from shoal.embedding.options import (
        Admission,
        Eviction,
        RowAdagrad,
        RowAdam,
        RowConstant,
        RowNormal,
        RowSGD,
        RowUniform,
    )
    from shoal.embedding.table import EmbeddingBagTable, EmbeddingTable
    from shoal.membership.draining import Drained
    from shoal.membership.validators import Reject, Roster, RosterMember, Validator, validator
    from shoal.session.session import Session
    from shoal.strategies.asynchronous.async_diloco import AsyncDiLoCo
    from shoal.strategies.asynchronous.async_sgd import AsyncSGD
    from shoal.strategies.asynchronous.bounded_staleness import BSP, SSP
    from shoal.strategies.layout.fsdp import FSDP, Zero2, Zero3
    from shoal.strategies.layout.hybrid import Hybrid
    from shoal.strategies.layout.pipeline import Pipeline
    from shoal.strategies.layout.tensor import TensorParallel
    from shoal.strategies.layout.zero1 import Zero1
    from shoal.strategies.local_sgd.strategy import DiLoCo, LocalSGD
    from shoal.strategies.synchronous.ddp import DDP
    from shoal.without_session.distribute import (
        clip_grad_norm,
        data_share,
        distribute,
        forward_backward,
        state_dict,
    )
    from shoal.without_session.plan import plan

__all__ = [
    "BF16",
    "BSP",
    "DDP",
    "FP16",
    "FSDP",
    "SSP",
    "Admission",
    "AsyncDiLoCo",
    "AsyncSGD",
    "Batch",
    "Checkpoints",
    "DiLoCo",
    "Drained",
    "EmbeddingBagTable",
    "EmbeddingTable",
    "Eviction",
    "Hybrid",
    "Int8",
    "LocalSGD",
    "OneBit",
    "Pipeline",
    "PowerSGD",
    "Reject",
    "Roster",
    "RosterMember",
    "RowAdagrad",
    "RowAdam",
    "RowConstant",
    "RowNormal",
    "RowSGD",
    "RowUniform",
    "Session",
    "TensorParallel",
    "TopK",
    "Zero1",
    "Zero2",
    "Zero3",
    "clip_grad_norm",
    "data_share",
    "distribute",
    "forward_backward",
    "init_mpi",
    "join",
    "plan",
    "run_in_memory",
    "state_dict",
    "validator",
]

_HOMES = {
    "Admission": "shoal.embedding.options",
    "AsyncDiLoCo": "shoal.strategies.asynchronous.async_diloco",
    "AsyncSGD": "shoal.strategies.asynchronous.async_sgd",
    "BF16": "shoal.compression.half",
    "BSP": "shoal.strategies.asynchronous.bounded_staleness",
    "Batch": "shoal.data.batches",
    "Checkpoints": "shoal.checkpoint.background",
    "DDP": "shoal.strategies.synchronous.ddp",
    "DiLoCo": "shoal.strategies.local_sgd.strategy",
    "Drained": "shoal.membership.draining",
    "EmbeddingBagTable": "shoal.embedding.table",
    "EmbeddingTable": "shoal.embedding.table",
    "Eviction": "shoal.embedding.options",
    "FP16": "shoal.compression.half",
    "FSDP": "shoal.strategies.layout.fsdp",
    "Hybrid": "shoal.strategies.layout.hybrid",
    "Int8": "shoal.compression.quantised",
    "LocalSGD": "shoal.strategies.local_sgd.strategy",
    "OneBit": "shoal.compression.quantised",
    "Pipeline": "shoal.strategies.layout.pipeline",
    "PowerSGD": "shoal.compression.low_rank",
    "Reject": "shoal.membership.validators",
    "Roster": "shoal.membership.validators",
    "RosterMember": "shoal.membership.validators",
    "RowAdagrad": "shoal.embedding.options",
    "RowAdam": "shoal.embedding.options",
    "RowConstant": "shoal.embedding.options",
    "RowNormal": "shoal.embedding.options",
    "RowSGD": "shoal.embedding.options",
    "RowUniform": "shoal.embedding.options",
    "SSP": "shoal.strategies.asynchronous.bounded_staleness",
    "Session": "shoal.session.session",
    "TensorParallel": "shoal.strategies.layout.tensor",
    "TopK": "shoal.compression.sparse",
    "Zero1": "shoal.strategies.layout.zero1",
    "Zero2": "shoal.strategies.layout.fsdp",
    "Zero3": "shoal.strategies.layout.fsdp",
    "clip_grad_norm": "shoal.without_session.distribute",
    "data_share": "shoal.without_session.distribute",
    "distribute": "shoal.without_session.distribute",
    "forward_backward": "shoal.without_session.distribute",
    "init_mpi": "shoal.backends.mpi.group",
    "plan": "shoal.without_session.plan",
    "run_in_memory": "shoal.backends.in_memory.run",
    "state_dict": "shoal.without_session.distribute",
    "validator": "shoal.membership.validators",
}


def join(
    job: str | None = None,
    *,
    coordinator: str | None = None,
    min_members: int | None = None,
    max_members: int | None = None,
    desired_members: int | None = None,
    member_id: str | None = None,
    address: str | None = None,
    check_peers: str | None = None,
    backend: str | None = None,
    validators: "Iterable[Validator]" = (),
) -> "Session":
    """A session of a job, to be used in a `with` statement; entering it joins.

    What is not given comes from the environment that `shoal run` sets: SHOAL_JOB,
    SHOAL_COORDINATOR (comma-separated host:port), SHOAL_MIN_MEMBERS, SHOAL_MAX_MEMBERS,
    SHOAL_DESIRED_MEMBERS, SHOAL_MEMBER_ID, SHOAL_ADDRESS, SHOAL_CHECK_PEERS ("auto": members on
    different hosts find out before each generation whether they reach each other; "always",
    "never"), SHOAL_BACKEND ("gloo", "nccl", "in-memory"; by itself NCCL for a model on CUDA and
    Gloo for all else). `validators` are the session's own, beside those that `shoal.validator`
    registered.

    Raises InvalidSpec at once for what is missing or contradictory; entering raises Unavailable if
    no coordinator answers, JobFinished, or what else the coordinator refuses with.
    """
    from shoal.membership.join_config import read_config  # noqa: PLC0415 - see __getattr__
    from shoal.session.session import Session  # noqa: PLC0415

    given = {
        "job": job,
        "coordinator": coordinator,
        "min_members": min_members,
        "max_members": max_members,
        "desired_members": desired_members,
        "member_id": member_id,
        "address": address,
        "check_peers": check_peers,
        "backend": backend,
    }
    return Session(read_config(given, os.environ), validators)


def __getattr__(name: str) -> Any:
    # `shoal run` imports this package too, and should not pay for torch: nothing here does.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
