"""Images and manifests to write and read back."""

from collections.abc import Sequence

import numpy as np
import torch

from shoal_proto.v1.replication_pb2 import SessionImage
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_server.parameters.images.image import LoadedImage, TensorStream
from shoal_server.parameters.images.tensor_bytes import DTYPES
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.shard.record import UpdateListener
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest, ManifestEntry, part_file


def image(shard_id: int, version: int = 3, num_elements: int = 100) -> LoadedImage:
    """Make the image of a shard with tensors of four dtypes, an empty tensor, and two sessions."""
    generator = torch.Generator().manual_seed(1000 * shard_id + version)
    values = torch.randn(num_elements, generator=generator)
    return LoadedImage(
        kind="dense",
        shard_id=shard_id,
        version=version,
        spec=bytes(range(256)),
        tensors={
            "values": values,
            "optimizer/exp_avg": values.to(torch.bfloat16),
            "optimizer/exp_avg_sq": values.to(torch.float64),
            "optimizer/step": torch.tensor(5.0),
            "ids": torch.arange(num_elements),
            "none": torch.empty(0, 3),
        },
        sessions=(
            SessionImage(
                session="a#1", floor=1, sequences=[2, 3], versions=[2, 3], staleness=[0, 1]
            ),
            SessionImage(session="b#2", sequences=[1], versions=[4], staleness=[0]),
        ),
    )


def loaded(shard: AnyShard, listener: UpdateListener | None = None) -> LoadedImage:
    """Read a whole shard as an image. `listener` receives every later push.

    Rows of a table are ordered by id, so that shards with equal rows give equal tensors.
    """
    if listener is not None:
        shard.subscribe(listener)
    with shard.image() as image:
        tensors = {each.described.name: _whole(each) for each in image.streams()}
        if "ids" in tensors:
            order = torch.from_numpy(np.argsort(tensors["ids"].numpy(), kind="stable"))
            for each in image.header.tensors:
                tensors[each.name] = tensors[each.name].index_select(0, order)
        return LoadedImage(
            kind=image.kind,
            shard_id=image.shard_id,
            version=image.version,
            spec=image.spec,
            tensors=tensors,
            sessions=image.sessions,
        )


def _whole(stream: TensorStream) -> torch.Tensor:
    described = stream.described
    flat = [torch.empty(0, dtype=DTYPES[described.dtype])]
    flat += [piece.reshape(-1) for piece in stream.pieces]
    return torch.cat(flat).view(tuple(described.shape))


def write_snapshot(
    library: SnapshotLibrary,
    number: int,
    versions: Sequence[int],
    *,
    previous: Manifest | None = None,
) -> Manifest:
    """Write shards of these versions; unchanged shards stay in their old files."""
    cut_id = f"cut{number}"
    before = {part.shard_id: part for part in previous.parts} if previous else {}
    parts = []
    for shard_id, version in enumerate(versions):
        part = before.get(shard_id)
        if part is None or part.version != version:
            part = write_part(library, image(shard_id, version), number, cut_id)
        parts.append(part)
    manifest = manifest_of(library.job, number, parts)
    library.commit(manifest)
    return manifest


def write_part(
    library: SnapshotLibrary, shard: LoadedImage, number: int, cut_id: str
) -> ManifestEntry:
    data = b"".join(image_file.pieces(shard))
    file = part_file(number, cut_id, shard.shard_id)
    library.storage.write(f"{library.job}/{file}", data)
    return ManifestEntry(
        shard_id=shard.shard_id,
        epoch=1,
        version=shard.version,
        kind=shard.kind,
        file=file,
        num_bytes=len(data),
        sha256=image_file.digest(data),
    )


def manifest_of(job: str, number: int, parts: Sequence[ManifestEntry]) -> Manifest:
    layout = ShardMap(
        job=job,
        shards=[
            Shard(shard_id=part.shard_id, server_id=f"ps-{part.shard_id % 2}") for part in parts
        ],
    )
    return Manifest(
        job=job,
        number=number,
        cut_id=f"cut{number}",
        lineage="first",
        taken_unix_s=1700000000.25 + number,
        layout=layout.SerializeToString(),
        parts=tuple(parts),
        steps={"a#1": 3, "b#2": 1},
        partial_steps=[],
        cursor={"format": 1, "open": [{"epoch": 0, "free": [[0, 10]], "returned": 0}]},
        training={"generation": 2, "step": 7},
    )
