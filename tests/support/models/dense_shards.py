"""Shards of parameters for tests, with every optimizer that servers run."""

import torch

from shoal_proto.v1.optimizer_pb2 import (
    CosinePhase,
    HyperParameters,
    LinearPhase,
    OptimizerSpec,
    Phase,
    Schedule,
    StalenessPolicy,
)
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.shard.dense import DensePush, DenseShard, new_dense_shard

SIZES = (7, 33, 64, 130)
EPOCH = 3

SGD = HyperParameters(lr=0.1, weight_decay=0.01)
MOMENTUM = HyperParameters(lr=0.1, weight_decay=0.01, momentum=0.9, dampening=0.1)
NESTEROV = HyperParameters(lr=0.1, momentum=0.9, nesterov=True)
ADAM = HyperParameters(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-7, weight_decay=0.1)
AMSGRAD = HyperParameters(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-7, amsgrad=True)
ADAGRAD = HyperParameters(lr=0.1, lr_decay=0.1, eps=1e-10, initial_accumulator_value=0.1)
WARM_UP = Schedule(
    phases=[
        Phase(num_updates=4, linear=LinearPhase(start_factor=0.1, end_factor=1, total_iters=4)),
        Phase(cosine=CosinePhase(t_max=5)),
    ]
)
COMPENSATE = StalenessPolicy(kind="compensate", strength=0.04)
ADAPTIVE = StalenessPolicy(kind="compensate", strength=2.0, adaptive=True, decay=0.95)

SPECS = {
    "sgd": OptimizerSpec(kind="sgd", groups=[SGD]),
    "momentum": OptimizerSpec(kind="sgd", groups=[MOMENTUM]),
    "nesterov": OptimizerSpec(kind="sgd", groups=[NESTEROV]),
    "adam": OptimizerSpec(kind="adam", groups=[ADAM]),
    "amsgrad": OptimizerSpec(kind="adam", groups=[AMSGRAD]),
    "adamw": OptimizerSpec(kind="adamw", groups=[ADAM]),
    "adagrad": OptimizerSpec(kind="adagrad", groups=[ADAGRAD]),
    "outer": OptimizerSpec(kind="outer", groups=[NESTEROV]),
    "scheduled": OptimizerSpec(kind="sgd", groups=[SGD], schedule=WARM_UP),
    "scaled": OptimizerSpec(kind="sgd", groups=[SGD], staleness=StalenessPolicy(kind="scale")),
    "compensated": OptimizerSpec(kind="sgd", groups=[NESTEROV], staleness=COMPENSATE),
    "adaptive": OptimizerSpec(kind="adam", groups=[ADAM], staleness=ADAPTIVE),
}


def new_shard(case: str, dtype: str, seed: int = 0) -> DenseShard:
    blocks = [Block(parameter=str(i), num_elements=size) for i, size in enumerate(SIZES)]
    spec = Shard(shard_id=7, epoch=EPOCH, dtype=dtype, blocks=blocks)
    return new_dense_shard(spec, SPECS[case], bytearray(numbers(seed, sum(SIZES), dtype)))


def numbers(seed: int, count: int, dtype: str) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64)
    return drawn.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


def push_to(
    shard: DenseShard, sequence: int, dtype: str, *, session: str = "s", behind: int = 0
) -> DensePush:
    """Make a push with a gradient for every other block, or for all in every third push."""
    blocks = tuple(range(0, len(SIZES), 1 if sequence % 3 == 0 else 2))
    size = sum(SIZES[block] for block in blocks)
    return DensePush(
        session=session,
        sequence=sequence,
        epoch=EPOCH,
        base_version=max(1, shard.version - behind),
        lr=None,
        blocks=blocks,
        gradient=numbers(sequence, 2 * size if shard.body.needs_base else size, dtype),
    )


def is_live(session: str) -> bool:
    return True
