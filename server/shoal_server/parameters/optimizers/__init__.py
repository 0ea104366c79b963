"""Optimizer steps on a shard, with the kernels of `torch.optim` with `fused=True`. The outer step,
and SGD on 16-bit types, use separate operations."""

from collections.abc import Sequence

from torch import Tensor

from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_server.parameters.optimizers.adagrad import Adagrad
from shoal_server.parameters.optimizers.adam import Adam
from shoal_server.parameters.optimizers.base import ShardOptimizer
from shoal_server.parameters.optimizers.outer import Outer
from shoal_server.parameters.optimizers.sgd import Sgd


def new_optimizer(spec: OptimizerSpec, group: int, blocks: Sequence[Tensor]) -> ShardOptimizer:
    """The optimizer of a shard in parameter group `group`. `spec` has passed `check_spec`."""
    hyper = spec.groups[group]
    if spec.kind == "sgd":
        return Sgd(hyper, blocks)
    if spec.kind == "adagrad":
        return Adagrad(hyper, blocks)
    if spec.kind == "outer":
        return Outer(hyper, blocks)
    return Adam(hyper, blocks, decoupled_weight_decay=spec.kind == "adamw")
