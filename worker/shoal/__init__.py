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
    from shoal.backends.in_memory_run import run_in_memory
    from shoal.backends.mpi import init_mpi
    from shoal.checkpoint.background import Checkpoints
    from shoal.compression.half import BF16, FP16
    from shoal.compression.low_rank import PowerSGD
    from shoal.compression.quantised import Int8, OneBit
    from shoal.compression.sparse import TopK
    from shoal.data import Batch
    from shoal.draining import Drained
    from shoal.embedding import EmbeddingBagTable, EmbeddingTable
    from shoal.embedding_options import (
        Admission,
        Eviction,
        RowAdagrad,
        RowAdam,
        RowConstant,
        RowNormal,
        RowSGD,
        RowUniform,
    )
    from shoal.plain import clip_grad_norm, data_share, distribute, forward_backward, state_dict
    from shoal.planning import plan
    from shoal.session import Session
    from shoal.strategies.async_diloco import AsyncDiLoCo
    from shoal.strategies.async_sgd import AsyncSGD
    from shoal.strategies.bounded import BSP, SSP
    from shoal.strategies.ddp import DDP
    from shoal.strategies.fsdp import FSDP, Zero2, Zero3
    from shoal.strategies.hybrid import Hybrid
    from shoal.strategies.local_sgd import DiLoCo, LocalSGD
    from shoal.strategies.pipeline import Pipeline
    from shoal.strategies.tensor import TensorParallel
    from shoal.strategies.zero1 import Zero1
    from shoal.validators import Reject, Roster, RosterMember, Validator, validator

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
    "Admission": "shoal.embedding_options",
    "AsyncDiLoCo": "shoal.strategies.async_diloco",
    "AsyncSGD": "shoal.strategies.async_sgd",
    "BF16": "shoal.compression.half",
    "BSP": "shoal.strategies.bounded",
    "Batch": "shoal.data",
    "Checkpoints": "shoal.checkpoint.background",
    "DDP": "shoal.strategies.ddp",
    "DiLoCo": "shoal.strategies.local_sgd",
    "Drained": "shoal.draining",
    "EmbeddingBagTable": "shoal.embedding",
    "EmbeddingTable": "shoal.embedding",
    "Eviction": "shoal.embedding_options",
    "FP16": "shoal.compression.half",
    "FSDP": "shoal.strategies.fsdp",
    "Hybrid": "shoal.strategies.hybrid",
    "Int8": "shoal.compression.quantised",
    "LocalSGD": "shoal.strategies.local_sgd",
    "OneBit": "shoal.compression.quantised",
    "Pipeline": "shoal.strategies.pipeline",
    "PowerSGD": "shoal.compression.low_rank",
    "Reject": "shoal.validators",
    "Roster": "shoal.validators",
    "RosterMember": "shoal.validators",
    "RowAdagrad": "shoal.embedding_options",
    "RowAdam": "shoal.embedding_options",
    "RowConstant": "shoal.embedding_options",
    "RowNormal": "shoal.embedding_options",
    "RowSGD": "shoal.embedding_options",
    "RowUniform": "shoal.embedding_options",
    "SSP": "shoal.strategies.bounded",
    "Session": "shoal.session",
    "TensorParallel": "shoal.strategies.tensor",
    "TopK": "shoal.compression.sparse",
    "Zero1": "shoal.strategies.zero1",
    "Zero2": "shoal.strategies.fsdp",
    "Zero3": "shoal.strategies.fsdp",
    "clip_grad_norm": "shoal.plain",
    "data_share": "shoal.plain",
    "distribute": "shoal.plain",
    "forward_backward": "shoal.plain",
    "init_mpi": "shoal.backends.mpi",
    "plan": "shoal.planning",
    "run_in_memory": "shoal.backends.in_memory_run",
    "state_dict": "shoal.plain",
    "validator": "shoal.validators",
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
    from shoal.joining import read_config  # noqa: PLC0415 - see __getattr__
    from shoal.session import Session  # noqa: PLC0415

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
