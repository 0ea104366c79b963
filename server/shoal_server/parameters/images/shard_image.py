"""An image of a live shard, read in chunks while pushes go on.

    image = shard.image()                 no copy is made; pushes go on at once
    for i in range(image.num_chunks):
        send(image.chunk(i))              may be repeated until the release
        image.release(i)
    image.close()

Before a push changes a chunk that is not released, the old data are copied. Of a table, only the
touched rows are copied; a dense shard is copied whole, once.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import CutHeader, CutRest, SessionImage, TensorImage
from shoal_server.parameters.images.image import Stamp, TensorStream
from shoal_server.parameters.images.tensor_bytes import from_message, to_message

T = TypeVar("T")

CHUNK_BYTES = 2 * 1024 * 1024


class Locked(Protocol):
    """Calls `work` under the lock of a shard's content. Raises InternalError if the image is closed
    meanwhile."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class ImageContent(Protocol):
    """The large part of an image. Call `read` under the lock of the shard's content;
    `release`, `close` and `held_bytes` need no lock, on any thread."""

    described: Sequence[TensorImage]

    def __len__(self) -> int:
        """Number of chunks."""
        ...

    def size_of(self, index: int) -> int: ...

    def read(self, index: int) -> Buffer:
        """A copy of a chunk. Raises InternalError if the chunk is released."""
        ...

    def release(self, index: int) -> None:
        """Release a chunk, which is not read again."""
        ...

    def close(self) -> None: ...

    @property
    def held_bytes(self) -> int: ...

    def streams(self, locked: "Locked") -> "Sequence[TensorStream]":
        """All tensors. A piece is read on request, within `locked`."""
        ...


ContentT = TypeVar("ContentT", bound=ImageContent)


class OpenImages(Generic[ContentT]):
    """The open images of a shard. What they still need must be copied before a change. Any thread
    may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[ContentT, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._open)

    def __call__(self) -> Sequence[ContentT]:
        return self._open

    def add(self, content: ContentT) -> None:
        with self._lock:
            self._open = (*self._open, content)

    def remove(self, content: ContentT) -> None:
        with self._lock:
            self._open = tuple(each for each in self._open if each is not content)

    @property
    def held_bytes(self) -> int:
        return sum(content.held_bytes for content in self._open)


class ShardImage:
    """An image of one shard, which several threads may use at once.

    `chunk` and the pieces of `streams` copy data and wait for pushes: not for the event loop.
    `release` and `header` neither copy nor wait. `close` frees copied data, which takes 0.1 ms per
    MiB.
    """

    def __init__(
        self,
        header: CutHeader,
        *,
        content: ImageContent,
        rest: CutRest,
        lock: AbstractContextManager[bool],
        images: OpenImages[ImageContent],
        epoch: int,
    ) -> None:
        """`header` gets the sizes of content and rest. `lock` protects the content, which the
        caller must have added to `images`."""
        self._content = content
        self._rest_message = rest
        self._rest = rest.SerializeToString(deterministic=True)
        self._num_rest = -(-len(self._rest) // CHUNK_BYTES)
        self._lock = lock
        self._images = images
        self._is_closed = False
        header.chunk_bytes, header.rest_bytes = CHUNK_BYTES, len(self._rest)
        header.tensors.extend(content.described)
        self.header = header
        """Header for a `ShardBuilder`. Do not change it."""
        self.stamp = Stamp(header.shard_id, epoch, header.version)

    @property
    def shard_id(self) -> int:
        return self.header.shard_id

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def kind(self) -> str:
        """ "dense" or "table"."""
        return self.header.kind

    @property
    def spec(self) -> bytes:
        return self.header.spec

    @property
    def sessions(self) -> Sequence[SessionImage]:
        return list(self._rest_message.sessions)

    @property
    def num_chunks(self) -> int:
        return self._num_rest + len(self._content)

    def num_bytes(self, index: int) -> int:
        if index < self._num_rest:
            return min(CHUNK_BYTES, len(self._rest) - index * CHUNK_BYTES)
        return self._content.size_of(index - self._num_rest)

    @property
    def held_bytes(self) -> int:
        """Memory in addition to the shard's."""
        return 0 if self._is_closed else len(self._rest) + self._content.held_bytes

    def chunk(self, index: int) -> Buffer:
        """A chunk as of the image's version.

        Raises InternalError if the image is closed, or the chunk of its content released.
        """
        if index < self._num_rest:
            self._check_open()
            return memoryview(self._rest)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        return self._locked(partial(self._content.read, index - self._num_rest))

    def _locked(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._check_open()
            result = work()
        # A concurrent `close` may have freed the copied data meanwhile.
        self._check_open()
        return result

    def release(self, index: int) -> None:
        """Release a chunk: pushes need not preserve it. Repeated calls, also after `close`, are
        harmless."""
        if index >= self._num_rest and not self._is_closed:
            self._content.release(index - self._num_rest)

    def close(self) -> None:
        """Release everything. Repeated calls are harmless; a `chunk` call in progress raises."""
        self._is_closed = True
        self._images.remove(self._content)
        self._content.close()

    def __enter__(self) -> "ShardImage":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def streams(self) -> Sequence[TensorStream]:
        """All tensors, in pieces that are read on request. Unused rows of a table are left out.
        Call it before any chunk is released."""
        small = [
            TensorStream(each.description, iter((from_message(each),)))
            for each in self._rest_message.tensors
        ]
        return [*self._content.streams(self._locked), *small]

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalError(
                f"the image of shard {self.header.shard_id} at version {self.version} is closed",
                seen="a read of a chunk",
                expected="no reads after `close`",
            )


def rest_of(sessions: Sequence[SessionImage], tensors: Mapping[str, Tensor]) -> CutRest:
    """The small parts of an image, which are sent first."""
    return CutRest(
        sessions=sessions, tensors=[to_message(name, each) for name, each in tensors.items()]
    )


def released(index: int) -> InternalError:
    return InternalError(
        "a released chunk of an image was requested", seen=f"chunk {index} of its content"
    )
