"""Compression of a member's gradients before they are pushed, and the residuals that it leaves.

A residual, the part that the codec leaves out, is added to the gradients of the next step (error
feedback: Seide et al. 2014; Karimireddy et al., arXiv:1901.09847). A residual counts at most once,
whatever the outcome of a push:

- Once the server has acknowledged the shard's part as applied, the new residual is kept.
- A part that was refused as too stale changed nothing: the old residual is restored.
- If a push failed for another reason, the residuals of shards that have not acknowledged it are
  discarded.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.base import Compression
from shoal.compression.push_encoder import PushBlock
from shoal_client.shards.parts import EncodedGradient, EncodedPush
from shoal_proto.errors import NonFiniteGradient
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.shards_pb2 import Shard, ShardMap

Residuals = dict[tuple[str, int], Tensor]
"""Residuals by parameter and offset of the block."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    before: Residuals
    after: Residuals


class PushCompressor:
    """Compressor of one member's gradients.

    Used by one thread at a time, except for the callback of `EncodedPush`.
    """

    def __init__(self, compression: Compression) -> None:
        self._encoder = compression.push_encoder()
        self._residuals: Residuals = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._sent_bytes = self._plain_bytes = 0
        self._step = (0, 0)

    def encode(
        self,
        shard_map: ShardMap,
        gradients: Mapping[str, Tensor],
        only: Collection[int] | None = None,
    ) -> EncodedPush:
        """Encode the gradients of every shard, or of the shards `only`.

        `gradients`: on the host, contiguous and finite. The result lacks shards that compression
        would not make smaller. Raises NonFiniteGradient, before anything is sent, for a gradient
        that the codec cannot represent.
        """
        shapes = {spec.name: torch.Size(spec.shape) for spec in shard_map.parameters}
        encoded: dict[int, EncodedGradient] = {}
        self._in_flight.clear()
        before = (self._sent_bytes, self._plain_bytes)
        try:
            for shard in shard_map.shards:
                if only is None or shard.shard_id in only:
                    gradient = self._encode(shard, gradients, shapes)
                    if gradient is not None:
                        encoded[shard.shard_id] = gradient
        except NonFiniteGradient:
            self.restore_residuals(list(self._in_flight))
            raise
        self._step = (self._sent_bytes - before[0], self._plain_bytes - before[1])
        return EncodedPush(encoded, self._applied)

    def _encode(
        self, shard: Shard, gradients: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
    ) -> EncodedGradient | None:
        blocks = [
            PushBlock(
                parameter=block.parameter,
                offset=block.offset,
                num_elements=block.num_elements,
                shape=shapes[block.parameter],
            )
            for block in shard.blocks
            if block.parameter in gradients
        ]
        if not blocks:
            return None
        dtype = gradients[blocks[0].parameter].dtype
        keys = [(block.parameter, block.offset) for block in blocks]
        sizes = [block.num_elements for block in blocks]
        # The sum is in float64 if the gradients are, to keep the residual exact.
        total = torch.cat([_part(gradients, block) for block in blocks])
        total = total if dtype == torch.float64 else total.float()
        for key, values in zip(keys, torch.split(total, sizes), strict=True):
            if key in self._residuals:
                values.add_(self._residuals[key])
        coded = self._encoder.encode(total.float(), blocks)
        self._plain_bytes += total.numel() * dtype.itemsize
        if coded.data.nbytes >= total.numel() * dtype.itemsize:
            # Sent uncompressed; the residual waits for a later push.
            self._sent_bytes += total.numel() * dtype.itemsize
            return None
        self._sent_bytes += coded.data.nbytes
        applied = coded.decoded.to(dtype)
        _check(applied, blocks, coded.codec)
        after: Residuals = {}
        if self._encoder.keeps_residuals:
            after = dict(zip(keys, torch.split(total.sub_(applied), sizes), strict=True))
        before = {key: self._residuals.pop(key) for key in keys if key in self._residuals}
        self._in_flight[shard.shard_id] = _InFlight(before=before, after=after)
        return EncodedGradient(coded.codec, coded.data.view(torch.uint8).numpy().data)

    def _applied(self, shard_id: int) -> None:
        # May be called twice, if a push that was applied had to be resent.
        in_flight = self._in_flight.pop(shard_id, None)
        if in_flight is not None:
            self._residuals |= in_flight.after

    def restore_residuals(self, shard_ids: Iterable[int]) -> None:
        """Restore the residuals of shards that did not apply the push."""
        for shard_id in shard_ids:
            in_flight = self._in_flight.pop(shard_id, None)
            if in_flight is not None:
                self._residuals |= in_flight.before

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes of the last push and of all pushes, and the last compression ratio."""
        sent, plain = self._step
        return {
            "bytes_per_step": float(sent),
            "bytes_sent": float(self._sent_bytes),
            "compression_ratio": plain / sent if sent else 1.0,
        }


def _part(gradients: Mapping[str, Tensor], block: PushBlock) -> Tensor:
    flat = gradients[block.parameter].reshape(-1)
    return flat[block.offset : block.offset + block.num_elements]


def _check(applied: Tensor, blocks: Sequence[PushBlock], codec: GradientCodec) -> None:
    if bool(torch.isfinite(applied).all()):
        return
    at = int((~torch.isfinite(applied)).nonzero()[0])
    for block in blocks:
        if at < block.num_elements:
            raise NonFiniteGradient(
                f"the gradient of parameter {block.parameter} is beyond what {codec.kind} can hold",
                seen=f"element {block.offset + at} is not finite once it is compressed",
                expected="values in its range (fp16: up to 65,504)",
                fix="Choose bf16 or int8, or scale the loss down.",
                details={"parameter": block.parameter},
            )
        at -= block.num_elements
