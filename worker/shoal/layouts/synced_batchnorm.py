"""BatchNorm with the statistics of the whole global batch, however it is divided into shares.

torch's SyncBatchNorm runs on GPUs only, and counts stand-in samples. Members' statistics are
combined as in Chan et al. 1979.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from shoal import step_context
from shoal.backends.abortable.gather import gather_rows
from shoal.backends.abortable.waiter import all_reduce
from shoal.model.frameworks import keras_batchnorm_layers
from shoal.model.gradients import first_order
from shoal.step_context import BatchNormMembers
from shoal.torch_private.compiling import eager
from shoal.torch_private.modules import BatchNormBase
from shoal.torch_private.tensors import in_backward
from shoal_proto.errors import InvalidSpec


def sync_batchnorm(model: nn.Module, *, every: bool) -> int:
    """Make the model's SyncBatchNorm modules, or `every` BatchNorm, normalise over the samples of
    all members; returns their number. The modules stay the same objects, and evaluate as before.
    Raises InvalidSpec, before any change, for such layers of another framework, or of a class that
    is not torch's own."""
    if every:
        _refuse_foreign(model)
    _refuse_classes(model, every=every)
    num_synced = 0
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm or (every and type(module) in _SYNCED):
            module.__class__ = _SYNCED[type(module)]
            num_synced += 1
    return num_synced


def unsync_batchnorm(model: nn.Module) -> None:
    """Undo `sync_batchnorm`: give its modules torch's own classes back."""
    for module in model.modules():
        if type(module) in _PLAIN:
            module.__dict__.pop("_members", None)
            module.__class__ = _PLAIN[type(module)]


def has_sync_batchnorm(model: nn.Module) -> bool:
    """True if the script has converted layers of the model to SyncBatchNorm."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _refuse_foreign(model: nn.Module) -> None:
    for module in model.modules():
        # With the torch backend, Keras layers are torch modules, within any module.
        if names := keras_batchnorm_layers(module):
            raise InvalidSpec(
                "BatchNorm layers that are not torch's do not normalise over members",
                seen=f"sync_batchnorm=True, and {', '.join(names[:5])}",
                expected="sync_batchnorm=False, or torch's BatchNorm modules",
            )


def _refuse_classes(model: nn.Module, *, every: bool) -> None:
    """Refuse layers that would keep the forward pass of a class that is not torch's own."""
    base = BatchNormBase if every else nn.SyncBatchNorm
    unknown = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, base) and type(module) not in {*_SYNCED, *_PLAIN}
    ]
    if unknown:
        raise InvalidSpec(
            "BatchNorm layers of other classes than torch's own do not normalise over members",
            seen=f"{', '.join(unknown[:5])}{' and more' * (len(unknown) > 5)}",
            expected="layers of BatchNorm1d, BatchNorm2d, BatchNorm3d or SyncBatchNorm themselves,"
            " not of subclasses, lazy or parametrized ones",
            fix="torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) replaces subclasses by"
            " torch's own layer, without their additions."
            + " Or leave sync_batchnorm out."
            * every,
        )


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[float, BatchNormMembers],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (normalised values, mean, biased variance, number of values per channel)."""
        eps, members = settings
        exact = values.double() if values.dtype == torch.float64 else values.float()
        mean, variance, count = _statistics(exact, members)
        scale = (variance + eps).rsqrt().to(exact.dtype)
        centred = (exact - _wide(mean.to(exact.dtype), exact)) * _wide(scale, exact)
        context.save_for_backward(centred, weight, scale, count)
        context.members = members
        context.mark_non_differentiable(mean, variance, count)
        output = centred if weight is None else centred * _wide(weight.to(exact.dtype), exact)
        if bias is not None:
            output = output + _wide(bias.to(exact.dtype), exact)
        return output.to(values.dtype), mean, variance, count

    @staticmethod
    @first_order(
        "a synchronised BatchNorm normalises over other members' samples",
        fix="Leave sync_batchnorm out and convert no layer to SyncBatchNorm, or use a layer"
        " without statistics of the batch (GroupNorm, LayerNorm).",
    )
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        centred, weight, scale, count = context.saved_tensors
        members: BatchNormMembers = context.members
        outer = gradients[0].to(centred.dtype)
        dims = _dims(centred)
        own = torch.stack([outer.sum(dims), (outer * centred).sum(dims)]).double()
        sums = own.clone()
        if members.group.size() > 1:
            all_reduce(sums, members.group)
        means = (sums / count).to(centred.dtype)
        inner = outer - _wide(means[0], centred) - centred * _wide(means[1], centred)
        factor = scale if weight is None else scale * weight.to(centred.dtype)
        # A stand-in sample had no part in the statistics.
        factor = factor if members.has_samples else torch.zeros_like(factor)
        of_values = (inner * _wide(factor, centred)).to(gradients[0].dtype)
        of_weight = None if weight is None else own[1].to(weight.dtype)
        of_bias = own[0].to(gradients[0].dtype if weight is None else weight.dtype)
        return of_values, of_weight, of_bias if context.needs_input_grad[2] else None, None


def normalises_members(node: Node) -> bool:
    """True if this autograd node adds gradients of other members' losses to this member's
    samples."""
    return getattr(node, "_forward_cls", None) is _Normalise and node.members.has_samples  # type: ignore[attr-defined]


@torch.no_grad()
def _statistics(values: Tensor, members: BatchNormMembers) -> tuple[Tensor, Tensor, Tensor]:
    dims, channels = _dims(values), values.shape[1]
    num = values.numel() // channels if members.has_samples else 0
    mean = values.mean(dims, dtype=torch.float64)
    spread = (values - _wide(mean.to(values.dtype), values)).square().sum(dims, dtype=torch.float64)
    own = torch.cat([torch.full_like(mean[:1], num), mean, spread])
    if not num:
        own.zero_()
    rows = gather_rows(own, members.group) if members.group.size() > 1 else own[None]
    counts, means, spreads = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    count = counts.sum()
    whole = (counts * means).sum(0) / count
    variance = (spreads + counts * (means - whole).square()).sum(0) / count
    return whole, variance, count


def _dims(values: Tensor) -> list[int]:
    return [0, *range(2, values.ndim)]


def _wide(of_channels: Tensor, values: Tensor) -> Tensor:
    return of_channels.view(1, -1, *[1] * (values.ndim - 2))


@eager
def _forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name for it
    members = _members_of(self)
    if members is None or not self.training:
        # Outside a step no other rank takes part; evaluation needs no other rank.
        return nn.BatchNorm1d.forward(self, input)
    self._check_input_dim(input)
    output, mean, variance, count = _Normalise.apply(
        input, self.weight, self.bias, (self.eps, members)
    )  # type: ignore[no-untyped-call]
    if self.track_running_stats:
        _track(self, mean, variance, count)
    normalised: Tensor = output
    return normalised


def _members_of(module: Any) -> BatchNormMembers | None:
    members = step_context.current().batchnorm
    if members is None and in_backward():
        # Recomputation may run on another thread than the forward pass.
        members = module.__dict__.get("_members")
    module.__dict__["_members"] = members
    return members


@torch.no_grad()
def _track(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
    momentum = module.momentum
    for buffer, now in ((module.running_mean, mean), (module.running_var, unbiased)):
        if momentum is not None:
            buffer.mul_(1 - momentum).add_(now.to(buffer.dtype), alpha=momentum)
        else:
            # Mean of all batches, in double precision; the count is not read from the GPU.
            held = buffer.double()
            buffer.copy_(held + (now - held) / module.num_batches_tracked)


def _synced(kind: Any) -> Any:
    return type(f"Synced{kind.__name__}", (kind,), {"forward": _forward, "__module__": __name__})


SyncedBatchNorm1d = _synced(nn.BatchNorm1d)
SyncedBatchNorm2d = _synced(nn.BatchNorm2d)
SyncedBatchNorm3d = _synced(nn.BatchNorm3d)


class SyncedBatchNorm(_synced(nn.BatchNorm1d)):  # type: ignore[misc]
    """Replacement for torch's SyncBatchNorm, which DDP refuses on a CPU."""

    def _check_input_dim(self, values: Tensor) -> None:
        if values.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {values.ndim}D input)")


_SYNCED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
    nn.SyncBatchNorm: SyncedBatchNorm,
}
_PLAIN = {synced: plain for plain, synced in _SYNCED.items()}
