"""What a `GradientCodec` says of a push, checked, and the reader of what comes with it.

Whoever holds a copy of a shard reads the same bytes again, and must get the same values to the last
bit: every reader does nothing but copy values, and multiply and add them one by one.
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


class Decoder(Protocol):
    """Reads the gradient of one push to one shard. Any thread."""

    @property
    def num_bytes(self) -> int:
        """Of the gradient as it comes."""
        ...

    def decode(self, data: Buffer) -> Tensor:
        """The values in fp32, those of one block after the other; maybe not finite.

        Raises MalformedMessage for bytes that are none of this codec.
        """
        ...


_DECODERS: Mapping[str, Callable[[GradientCodec, Sequence[int]], Decoder]] = {
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
) -> Decoder:
    """The reader for a gradient of blocks of so many elements, which has `plain_bytes` as it is.

    Raises InvalidSpec for a codec that there is not, or whose options are out of range, and
    ShapeMismatch for another length than those blocks have.
    """
    make = _DECODERS.get(codec.kind)
    if make is None:
        raise unknown_codec(codec.kind, CODECS)
    decoder = make(codec, sizes)
    if codec.num_bytes != decoder.num_bytes or not codec.num_bytes < plain_bytes:
        raise ShapeMismatch(
            f"the compressed gradient for shard {shard_id} has another length than its blocks say",
            seen=f"{codec.num_bytes} bytes of {codec.kind}",
            expected=f"{decoder.num_bytes} bytes, and fewer than the {plain_bytes} without it",
            fix="Compare shape and dtype with the job's shard map; send uncompressed what a codec "
            "does not make smaller.",
        )
    return decoder


def unknown_codec(kind: str, known: Sequence[str]) -> InvalidSpec:
    """The error for a codec that is none of those known."""
    return InvalidSpec(
        f"there is no codec {kind!r} for gradients here",
        seen=repr(kind),
        expected=", ".join(map(repr, known)),
        fix="Choose another compression, or bring the servers to the worker's release.",
    )
