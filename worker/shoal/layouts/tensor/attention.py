"""torch's MultiheadAttention, split by heads over the ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from shoal.layouts.tensor.parts import Cut, biased, enter, gathered, local, summed, whole_mask
from shoal.torch_private.compiling import eager


class SplitAttention(nn.MultiheadAttention):
    """Attention in which a rank computes its own heads and its summand of the output projection.

    Outputs of the packed input projection are gathered: each rank has an equal run of its rows, and
    these runs do not match the heads. Shapes: B samples, T target and S source positions, H own
    heads of width D, E embedding.
    """

    rows: Cut
    """Rows of the packed projection: query, then key, then value."""
    heads: Cut
    columns: Cut
    """Columns of the output projection, which are its inputs."""

    @eager
    def forward(  # noqa: PLR0917 - torch's own signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            # As in attention that is not split: `is_causal` only describes `attn_mask`.
            raise RuntimeError("is_causal=True without attn_mask: attention needs the mask itself")
        # q [B, H, T, D], k and v [B, H, S, D], weights [B, H, T, S]
        q, k, v = (self._own_heads(p) for p in self._projected(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[-2])
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights or p:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            if p:
                drawn = whole_mask(weights, 1, self.heads, p)
                weights = weights * self.heads.own(drawn, 1)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask)
        joined = self._joined(out, batched=query.dim() == 3)
        shown = weights if need_weights else None
        return joined, self._shown(shown, average_attn_weights, query.dim() == 3)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        weight = local(self.in_proj_weight)
        bias = None if self.in_proj_bias is None else local(self.in_proj_bias)
        if query is key and key is value:
            part = F.linear(enter(query, self.rows), weight, bias)
            yield from gathered(part, self.rows).chunk(3, -1)
            return
        for index, given in enumerate((query, key, value)):
            cut, own = self._third(index)
            part_bias = None if bias is None else bias[own]
            yield gathered(F.linear(enter(given, cut), weight[own], part_bias), cut)

    def _third(self, index: int) -> tuple[Cut, slice]:
        begin, end = index * self.embed_dim, (index + 1) * self.embed_dim
        starts = [sum(self.rows.sizes[:rank]) for rank in range(len(self.rows.sizes))]
        spans = [
            (max(begin, start), min(end, start + size))
            for start, size in zip(starts, self.rows.sizes, strict=True)
        ]
        sizes = tuple(max(0, stop - start) for start, stop in spans)
        rank = self.rows.rank
        cut = replace(self.rows, sizes=sizes)
        first = spans[rank][0] - starts[rank] if sizes[rank] else 0
        return cut, slice(first, first + sizes[rank])

    def _own_heads(self, projected: Tensor) -> Tensor:
        """Reshape [B, T, E], [T, B, E] or [T, E] to [B, H, T, D], with this rank's heads."""
        whole = projected.unsqueeze(0) if projected.dim() == 2 else projected
        if projected.dim() == 3 and not self.batch_first:
            whole = whole.transpose(0, 1)
        own = self.columns.own(enter(whole, self.columns))
        return own.view(*own.shape[:-1], self.heads.size, self.head_dim).transpose(1, 2)

    def _joined(self, out: Tensor, *, batched: bool) -> Tensor:
        """Project [B, H, T, D] to the output, in the shape of the query."""
        # Time first in memory, as in torch: dropout draws in the order of memory.
        side_by_side = out.permute(2, 0, 1, 3).flatten(2)
        total = summed(F.linear(side_by_side, local(self.out_proj.weight)), self.columns)
        total = biased(total, self.out_proj.bias)
        if not batched:
            return total.squeeze(1)
        return total.transpose(0, 1) if self.batch_first else total

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, num_sources: int
    ) -> Tensor | None:
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, query.dtype)
            if mask.dim() == 3:
                mask = mask.view(query.shape[0], self.num_heads, *mask.shape[1:])
                mask = self.heads.own(mask, 1)
        if padding is not None:
            padded = _additive(padding, query.dtype).view(-1, 1, 1, num_sources)
            mask = padded if mask is None else mask + padded
        return mask

    def _shown(self, weights: Tensor | None, average: bool, batched: bool) -> Tensor | None:
        if weights is None:
            return None
        whole = gathered(weights.movedim(1, -1), self.heads).movedim(-1, 1)
        shown = whole.mean(1) if average else whole
        return shown if batched else shown.squeeze(0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask.to(dtype)
