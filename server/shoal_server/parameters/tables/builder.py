"""A builder of a shard from the chunks of an image, as they arrive.

    builder = ShardBuilder(header)
    while not builder.is_complete:
        builder.add(receive(builder.next_chunk))
    shard = builder.finish()

If the stream breaks, the same builder continues with `next_chunk` on a new stream.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError
from torch import Tensor

from shoal_proto.errors import InternalError, MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import (
    CutHeader,
    CutRest,
    DenseSpec,
    SessionImage,
    TableShardSpec,
    TensorImage,
)
from shoal_server.parameters.images.tensor_bytes import from_message
from shoal_server.parameters.shard.chunk_assembler import shard_bytes
from shoal_server.parameters.shard.dense import VALUES, DenseBody
from shoal_server.parameters.shard.versioned import AnyShard, VersionedShard
from shoal_server.parameters.tables.answers import RememberedFates
from shoal_server.parameters.tables.content import TableContent
from shoal_server.parameters.tables.index import MAX_ROWS
from shoal_server.parameters.tables.shard import TableBody

LEAST_CHUNK_BYTES = 4096
MOST_CHUNK_BYTES = 64 * 1024 * 1024
MAX_REST_BYTES = 1024**3


class ContentBuilder(Protocol):
    """Builds the large content of a shard from its chunks, in order."""

    @property
    def described(self) -> Sequence[TensorImage]: ...

    def __len__(self) -> int:
        """Return the number of chunks."""
        ...

    def size_of(self, index: int) -> int: ...

    def begin(self, small: Mapping[str, Tensor], sessions: Sequence[SessionImage]) -> None:
        """Set the small tensors, before the first chunk. Raises KeyError if one is missing."""
        ...

    def add(self, index: int, data: Buffer) -> None: ...

    def shard(self, version: int, sessions: Sequence[SessionImage]) -> AnyShard: ...


def bytes_to_build(header: CutHeader) -> int:
    """Return the memory that the shard of an image will take."""
    return header.rest_bytes + sum(tensor.num_bytes for tensor in header.tensors)


class ShardBuilder:
    """Builds one shard. Used by one thread at a time, and not on the event loop."""

    def __init__(self, header: CutHeader) -> None:
        """Raises MalformedMessage for an unknown layout, and for too many remembered pushes."""
        self.header = header
        self._content = _content(header)
        if not LEAST_CHUNK_BYTES <= header.chunk_bytes <= MOST_CHUNK_BYTES or list(
            self._content.described
        ) != list(header.tensors):
            raise _other_layout(header, self._content.described)
        if header.rest_bytes > MAX_REST_BYTES:
            raise MalformedMessage(
                f"the image of shard {header.shard_id} has too much besides its values",
                seen=f"{header.rest_bytes} bytes of remembered pushes and small tensors",
                expected=f"at most {MAX_REST_BYTES}",
                fix="Train with fewer members, or push fewer rows at a time.",
            )
        self._num_rest = -(-header.rest_bytes // header.chunk_bytes)
        self._rest = bytearray()
        self._sessions: Sequence[SessionImage] = ()
        self.next_chunk = 0
        self.received_bytes = 0
        if not self._num_rest:
            self._begin()

    @property
    def num_chunks(self) -> int:
        return self._num_rest + len(self._content)

    @property
    def is_complete(self) -> bool:
        return self.next_chunk == self.num_chunks

    def num_bytes(self, index: int) -> int:
        """Return the size of a chunk."""
        size = self.header.chunk_bytes
        if index < self._num_rest:
            return min(size, self.header.rest_bytes - index * size)
        return self._content.size_of(index - self._num_rest)

    def add(self, data: Buffer) -> None:
        """Add the next chunk. `data` is not kept. Raises MalformedMessage, without a change, for
        another length. Raises MalformedMessage or InternalError if the image's small tensors or
        remembered pushes are inconsistent: then the builder cannot be used any more."""
        expected = 0 if self.is_complete else self.num_bytes(self.next_chunk)
        if not data or len(data) != expected:
            raise MalformedMessage(
                f"not the next chunk of shard {self.header.shard_id}",
                seen=f"{len(data)} bytes",
                expected=f"{expected} bytes: chunk {self.next_chunk} of {self.num_chunks}",
            )
        if self.next_chunk < self._num_rest:
            self._rest += data
            if self.next_chunk + 1 == self._num_rest:
                self._begin()
        else:
            self._content.add(self.next_chunk - self._num_rest, data)
        self.next_chunk += 1
        self.received_bytes += len(data)

    def finish(self) -> AnyShard:
        """Return the shard. Do not use the builder afterwards. Raises InternalError if it is
        incomplete or inconsistent."""
        if not self.is_complete:
            raise InternalError(
                f"shard {self.header.shard_id} is not whole",
                seen=f"{self.next_chunk} chunks",
                expected=f"{self.num_chunks}",
            )
        return self._content.shard(self.header.version, self._sessions)

    def _begin(self) -> None:
        try:
            rest = CutRest.FromString(bytes(self._rest))
            small = {each.description.name: from_message(each) for each in rest.tensors}
            self._content.begin(small, rest.sessions)
        except (DecodeError, KeyError) as error:
            raise MalformedMessage(
                f"the rest of the image of shard {self.header.shard_id} cannot be read",
                seen=repr(error)[:200],
                expected="a CutRest with all its tensors",
            ) from error
        self._sessions = list(rest.sessions)
        self._rest = bytearray()


class _DenseContent:
    def __init__(self, header: CutHeader) -> None:
        self._spec = DenseSpec.FromString(header.spec)
        values = bytearray(shard_bytes(self._spec.shard))
        self._body = DenseBody(self._spec.shard, self._spec.optimizer, values)
        self._flat = self._body.flat(header.chunk_bytes)
        self.described = self._flat.described

    def __len__(self) -> int:
        return len(self._flat)

    def size_of(self, index: int) -> int:
        return self._flat.size_of(index)

    def begin(self, small: Mapping[str, Tensor], sessions: Sequence[SessionImage]) -> None:
        """Do nothing: a dense shard has no small tensors."""

    def add(self, index: int, data: Buffer) -> None:
        self._flat.write(index, data)

    def shard(self, version: int, sessions: Sequence[SessionImage]) -> AnyShard:
        # Most tensors are in place; some optimizers return copies of their state.
        state = {name: t for name, t in self._flat.tensors.items() if name != VALUES}
        self._body.load_state(state)
        return VersionedShard.restored(self._spec.shard, self._body, version, sessions)


class _TableContent:
    def __init__(self, header: CutHeader) -> None:
        self._spec = TableShardSpec.FromString(header.spec)
        self._content = TableContent(self._spec.table)
        self._answers = RememberedFates()
        num_rows = header.tensors[0].shape[0]
        if num_rows > MAX_ROWS:
            raise ValueError(f"{num_rows} rows")
        self._chunks = self._content.row_chunks(num_rows, header.chunk_bytes)
        self.described = self._chunks.described

    def __len__(self) -> int:
        return len(self._chunks)

    def size_of(self, index: int) -> int:
        return self._chunks.size_of(index)

    def begin(self, small: Mapping[str, Tensor], sessions: Sequence[SessionImage]) -> None:
        self._answers.load(sessions, small["answer_lengths"], small["answers"])
        expected_rows = self._chunks.num_rows
        self._content = TableContent(self._spec.table, small, expected_rows=expected_rows)

    def add(self, index: int, data: Buffer) -> None:
        self._content.fill(self._chunks.rows(index), self._chunks.views(index, data))

    def shard(self, version: int, sessions: Sequence[SessionImage]) -> AnyShard:
        shard = self._spec.shard
        body = TableBody(self._spec.table, shard.table_index, self._content, self._answers)
        return VersionedShard.restored(shard, body, version, sessions)


def _content(header: CutHeader) -> ContentBuilder:
    try:
        if header.kind == DenseBody.kind and header.chunk_bytes:
            return _DenseContent(header)
        if header.kind == TableBody.kind and header.chunk_bytes:
            return _TableContent(header)
        raise ValueError("no such kind of shard")
    except (DecodeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise _other_layout(header, ()) from error


def _other_layout(header: CutHeader, expected: Sequence[TensorImage]) -> MalformedMessage:
    def shapes(tensors: Sequence[TensorImage]) -> str:
        return ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in tensors)[:300]

    return MalformedMessage(
        f"shard {header.shard_id} has a layout that this server does not know",
        seen=f"{header.kind!r} in chunks of {header.chunk_bytes} bytes: {shapes(header.tensors)}",
        expected=f"dense or table: {shapes(expected)}",
        fix="Run the same version of Shoal on every server.",
    )
