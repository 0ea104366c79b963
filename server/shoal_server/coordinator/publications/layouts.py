"""Layouts of published versions: conversion to messages, and merging."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from shoal_proto.dtypes import ITEM_BYTES
from shoal_proto.errors import InternalError, InvalidSpec
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.publications.coverage import (
    NotCovered,
    PublishedLayout,
    PublishedSlice,
    PublishedTensor,
    check_cover,
)
from shoal_server.core.publications.coverage import merged as merge
from shoal_server.core.publications.protocol import PublicationPart
from shoal_server.etcd.records.deflated_chunks import MAX_LAYOUT_BYTES

MAX_CACHED_BYTES = 128 * 1024 * 1024
"""Maximum size of the cache, unless a single layout is larger. A model's layout is the same in each
version."""


def layout_from_pb(message: pb.Layout) -> PublishedLayout:
    """Return the layout in a message. Raises InvalidSpec for an unknown element type."""
    tensors = []
    for spec in message.tensors:
        item_bytes = ITEM_BYTES.get(spec.dtype)
        if item_bytes is None:
            raise InvalidSpec(
                f"tensor {spec.name} has an unknown element type",
                seen=repr(spec.dtype),
                expected=f"one of {', '.join(ITEM_BYTES)}",
            )
        tensors.append(PublishedTensor(spec.name, spec.dtype, tuple(spec.shape), item_bytes))
    slices = tuple(
        PublishedSlice(each.tensor, tuple(each.offsets), tuple(each.sizes), each.segment, each.at)
        for each in message.slices
    )
    return PublishedLayout(tuple(tensors), slices, tuple(message.segment_bytes))


def layout_to_pb(layout: PublishedLayout) -> pb.Layout:
    """Return the layout as a message, without `item_bytes`."""
    return pb.Layout(
        tensors=(pb.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in layout.tensors),
        slices=(
            pb.Slice(
                tensor=each.tensor,
                offsets=each.offsets,
                sizes=each.sizes,
                segment=each.segment,
                at=each.at,
            )
            for each in layout.slices
        ),
        segment_bytes=layout.segment_bytes,
    )


class MergedLayouts:
    """Cache of merged and checked layouts, by the digests of the ranks' layouts."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, ...], bytes] = OrderedDict()

    async def of_parts(self, parts: Sequence[PublicationPart]) -> bytes:
        """Serialized layout of a version with these parts. Raises NotCovered, InvalidSpec."""
        key = tuple(part.layout_key for part in parts)
        if key not in self._known:
            # Merge in a thread: a large model takes seconds.
            self._known[key] = await asyncio.to_thread(_merged, parts)
        self._known.move_to_end(key)
        serialized = self._known[key]
        while len(self._known) > 1 and sum(map(len, self._known.values())) > MAX_CACHED_BYTES:
            self._known.popitem(last=False)
        return serialized


def _merged(parts: Sequence[PublicationPart]) -> bytes:
    layouts = [layout_from_pb(_parsed(part.layout)) for part in parts]
    for part, layout in zip(parts, layouts, strict=True):
        if layout.segment_bytes != (part.segment.num_bytes,):
            raise NotCovered(
                f"the layout of rank {part.rank} belongs to another segment",
                seen=f"{list(layout.segment_bytes)} bytes",
                expected=f"{part.segment.num_bytes} bytes",
            )
    layout = merge(layouts)
    check_cover(layout)
    serialized = layout_to_pb(layout).SerializeToString(deterministic=True)
    if len(serialized) > MAX_LAYOUT_BYTES:
        raise NotCovered(
            "the layout of the model is too large to keep",
            seen=f"{len(serialized)} bytes, {len(layout.slices)} slices",
            expected=f"at most {MAX_LAYOUT_BYTES} bytes",
        )
    return serialized


def _parsed(serialized: bytes) -> pb.Layout:
    try:
        return pb.Layout.FromString(serialized)
    except DecodeError as error:
        raise InternalError("a layout that was serialized here does not parse") from error
