"""The choice of a decoder for a push's gradient.

Every replica must decode the same bytes to the same values, to the last bit. So decoders only copy
and convert values, or multiply and add them one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from shoal_proto.errors import InvalidSpec, ShapeMismatch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_server.parameters.codecs.half import half_decoder
from shoal_server.parameters.codecs.low_rank import LowRankDecoder
from shoal_server.parameters.codecs.quantised import Int8Decoder, OneBitDecoder
from shoal_server.parameters.codecs.sparse import SparseDecoder


class GradientDecoder(Protocol):
    """Decodes the gradient of one push to one shard. Any thread may use it."""

    @property
    def num_bytes(self) -> int: ...

    def decode(self, data: Buffer) -> Tensor:
        """The values in fp32, block after block, perhaps infinite or NaN.

        Raises MalformedMessage for bytes that are not of this codec.
        """
        ...


_DECODERS: Mapping[str, Callable[[GradientCodec, Sequence[int]], GradientDecoder]] = {
    "fp16": half_decoder,
    "bf16": half_decoder,
    "int8": Int8Decoder,
    "one-bit": OneBitDecoder,
    "top-k": SparseDecoder,
    "powersgd": LowRankDecoder,
}
CODECS = tuple(_DECODERS)


def new_decoder(
    codec: GradientCodec, sizes: Sequence[int], *, plain_bytes: int, shard_id: int
) -> GradientDecoder:
    """Make a gradient's decoder. `sizes`: those of its blocks; `plain_bytes`: its size without
    compression.

    Raises InvalidSpec for an unknown codec or options out of range. Raises ShapeMismatch if the
    length or the rows do not fit the blocks, or the length is not below `plain_bytes`.
    """
    make = _DECODERS.get(codec.kind)
    if make is None:
        raise unknown_codec(codec.kind, CODECS)
    decoder = make(codec, sizes)
    if codec.num_bytes != decoder.num_bytes or not codec.num_bytes < plain_bytes:
        raise ShapeMismatch(
            f"the compressed gradient for shard {shard_id} has another length than its blocks need",
            seen=f"{codec.num_bytes} bytes of {codec.kind}",
            expected=f"{decoder.num_bytes} bytes, and fewer than {plain_bytes}, its plain size",
            fix="Compare shape and dtype with the job's shard map; send a gradient uncompressed if "
            "the codec does not make it smaller.",
        )
    return decoder


def unknown_codec(kind: str, known: Sequence[str]) -> InvalidSpec:
    return InvalidSpec(
        f"this server has no codec {kind!r} for gradients",
        seen=repr(kind),
        expected=", ".join(map(repr, known)),
        fix="Choose another compression, or bring the servers to the worker's release.",
    )
