"""A plain script with some ranks that publishes a series of weights."""

import threading
import uuid
from collections.abc import Sequence

from support.clusters.parameter_cluster import ParameterCluster
from support.weights.segments import segment_of

from shoal_client.weights.publisher import SeriesPublisher
from shoal_proto.errors import ShoalError
from shoal_proto.segments.sealed import Segment
from shoal_proto.v1 import weights_pb2 as pb

SERIES = "svc/ranker"
LIMIT_S = 60.0


def layout(rank: int, num_bytes: int) -> pb.Layout:
    """A layout with one bf16 tensor for each rank."""
    return pb.Layout(
        tensors=[pb.TensorSpec(name=f"w{rank}", dtype="bfloat16", shape=[num_bytes // 2])],
        slices=[pb.Slice(tensor=0, segment=rank, at=0)],
        segment_bytes=[num_bytes],
    )


class Script:
    """A plain script with some ranks that publishes a series."""

    def __init__(
        self,
        cluster: ParameterCluster,
        world: int = 1,
        *,
        keep: int = 2,
        copies: int = 2,
        incarnation: str = "",
    ) -> None:
        """`incarnation`: of the process that publishes; empty: a new one."""
        self.incarnation = incarnation or str(uuid.uuid4())
        identity = pb.Publisher(incarnation=self.incarnation)
        options = pb.SeriesOptions(keep=keep, copies=copies)
        self.ranks = [
            SeriesPublisher(
                [cluster.coordinator.grpc],
                SERIES,
                lambda: identity,
                rank=rank,
                world=world,
                options=options,
            )
            for rank in range(world)
        ]
        self.publication = 0

    def publish(self, *parts: bytes, timeout_s: float = LIMIT_S) -> pb.VersionRecord:
        """Publish one part of each rank at the same time; return the version."""
        self.publication += 1
        found: list[pb.VersionRecord | ShoalError] = []
        threads = [
            threading.Thread(target=self._contribute, args=(rank, part, timeout_s, found))
            for rank, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            if isinstance(each, ShoalError):
                raise each
        assert len({each.number for each in found if isinstance(each, pb.VersionRecord)}) == 1
        assert isinstance(found[0], pb.VersionRecord)
        return found[0]

    def _contribute(
        self, rank: int, part: bytes, timeout_s: float, found: list[pb.VersionRecord | ShoalError]
    ) -> None:
        try:
            found.append(
                self.ranks[rank].contribute(
                    segment_of(part),
                    layout(rank, len(part)),
                    publication=self.publication,
                    step=10 * self.publication,
                    timeout_s=timeout_s,
                )
            )
        except ShoalError as error:
            found.append(error)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def contents(segments: Sequence[Segment]) -> list[bytes]:
    return [bytes(segment.view()) for segment in segments]
