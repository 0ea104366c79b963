"""ZeRO-2 for `fit`: each rank's Keras optimizer updates its part of every weight.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
"""

from typing import Any

import keras
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.torch_private.c10d import all_gather_single, reduce_scatter_single
from shoal_proto.errors import UnsupportedOptimizer

_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Lion,
)


class _Sharded:
    """Mixin for a Keras optimizer: callers pass whole weights, and the optimizer updates this
    rank's parts."""

    num_samples = 0
    """This rank's samples in the next step; 0 if all ranks have equally many."""

    def build(self: Any, variables: Any) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        wholes, parts = list(variables), []
        for variable in wholes:
            own = _rows(variable.value.detach(), ranks)[rank].clone()
            part = keras.Variable(own, dtype=variable.dtype, name=variable.name)
            part._path = variable.path
            parts.append(part)
        # Keras's __setattr__ would track these variables as optimizer state.
        self.__dict__["shoal_wholes"] = wholes
        self.__dict__["shoal_parts"] = {
            id(whole): part for whole, part in zip(wholes, parts, strict=True)
        }
        self.__dict__["shoal_whole_of"] = {
            id(part): whole for whole, part in zip(wholes, parts, strict=True)
        }
        super().build(parts)  # type: ignore[misc]

    @torch.no_grad()
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Take one step. Collective: all ranks pass the same variables and their own gradients."""
        wholes = list(trainable_variables or self.shoal_wholes)
        if not self.built:
            self.build(wholes)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        pairs = [(w, g) for w, g in zip(wholes, grads, strict=True) if g is not None]
        parts = [self.shoal_parts[id(whole)] for whole, _ in pairs]
        packed = torch.cat([_rows(gradient, ranks) for _, gradient in pairs], 1)
        packed *= self._shoal_weight(packed.device)
        own = packed.new_empty(packed.shape[1])
        reduce_scatter_single(own, packed.flatten())
        for (whole, _), part in zip(pairs, parts, strict=True):
            # The script may have set the weights since.
            part.value.copy_(_rows(whole.value, ranks)[rank])
        super().apply(torch.split(own, [part.value.numel() for part in parts]), parts)  # type: ignore[misc]
        updated = torch.empty_like(packed)
        all_gather_single(updated.view(-1), torch.cat([part.value for part in parts]))
        start = 0
        for (whole, _), part in zip(pairs, parts, strict=True):
            width = part.value.numel()
            value = updated[:, start : start + width].reshape(-1)[: whole.value.numel()]
            whole.value.copy_(value.view(whole.value.shape))
            start += width
            if whole.constraint is not None:
                whole.assign(whole.constraint(whole))

    def _shoal_weight(self: Any, device: torch.device) -> Tensor:
        counts = torch.tensor(float(self.num_samples or 1), device=device)
        total = counts.clone()
        dist.all_reduce(total)
        return counts / total

    def _clip_gradients(self: Any, grads: Any) -> Any:
        """Clip by norms over the parts of all ranks."""
        bound = self.clipnorm or self.global_clipnorm
        if not bound:
            return super()._clip_gradients(grads)  # type: ignore[misc]
        squares = torch.stack([gradient.square().sum() for gradient in grads])
        dist.all_reduce(squares)
        if not self.clipnorm:
            squares = squares.sum().expand(len(grads))
        scales = bound / squares.sqrt().clamp(min=bound)
        return [gradient * scale for gradient, scale in zip(grads, scales, strict=True)]

    def _use_weight_decay(self: Any, variable: Any) -> bool:
        whole = self.shoal_whole_of.get(id(variable), variable)
        return bool(super()._use_weight_decay(whole))  # type: ignore[misc]


def shard_optimizer(optimizer: Any) -> None:
    """Shard an optimizer that is not built yet: each rank then updates only its own part of every
    weight. Raises UnsupportedOptimizer for an optimizer that is not elementwise."""
    check_elementwise(optimizer)
    plain = type(optimizer)
    # The name is kept, so that a saved model loads with the plain optimizer.
    optimizer.__class__ = type(plain.__name__, (_Sharded, plain), {"__module__": plain.__module__})


def check_elementwise(optimizer: Any) -> None:
    """Raise UnsupportedOptimizer unless the optimizer gives the same result on a part of a weight
    as on the whole weight."""
    if not isinstance(optimizer, _ELEMENTWISE) or optimizer.use_ema:
        average = " with use_ema" if optimizer.use_ema else ""
        raise UnsupportedOptimizer(
            "the optimizer cannot work on parts of weights",
            seen=f"{type(optimizer).__name__}{average}",
            expected=" or ".join(kind.__name__ for kind in _ELEMENTWISE) + ", without use_ema",
        )


def _rows(value: Tensor, ranks: int) -> Tensor:
    """Return the elements as a row for each rank, padded with zeros."""
    width = -(-value.numel() // ranks)
    padded = value.new_zeros(ranks * width)
    padded[: value.numel()] = value.reshape(-1)
    return padded.view(ranks, width)
