"""Reader of the chunks of a checkpoint that one rank needs, without communication. The checkpoint
may be of any world size and layout, or of plain torch."""

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoal.checkpoint import names
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath, located
from shoal.checkpoint.entries import FileSpan
from shoal.checkpoint.index import CheckpointIndex, IndexedTensor, read_index
from shoal.state.optimizer_state import SLOTS
from shoal.state.shards import Chunk, Needs, StateShard, TensorShard
from shoal_proto.errors import CheckpointFailed, ChecksumMismatch, MalformedMessage, ShoalError


def read(path: str | os.PathLike[str] | BucketPath, needs: Needs) -> StateShard:
    """Read the chunks that `needs` asks for into host memory, in the dtypes they were saved in.

    Reads only stored chunks that overlap the needed ones, one at a time. The step of plain torch's
    checkpoint is its entry `step`; 0 if that is not an int.

    Raises InvalidSpec if there is no checkpoint, if a later version of Shoal or DCP wrote it, or if
    it has an entry that Shoal's state cannot hold. Raises MalformedMessage if it is damaged or
    truncated, ChecksumMismatch if its bytes have changed, and OSError if the storage fails.
    """
    path = located(path)
    index = read_index(path)
    with ExitStack() as stack:
        reader = _Reader(path, index, stack)
        return reader.state_shard(needs)


def check_written(path: CheckpointPath, index: bytes) -> None:
    """Raise CheckpointFailed if `read` would refuse a checkpoint that is not published yet.

    `index`: the index's bytes. Reads all objects and settings, and one tensor chunk of each dtype.
    """
    try:
        with ExitStack() as stack:
            _Reader(path, read_index(path, index), stack).check()
    except ShoalError as error:
        raise CheckpointFailed(
            f"the checkpoint {path} was written and cannot be read back: {error.what}",
            seen=error.seen,
            expected=error.expected,
            fix="This checkpoint is discarded, and older ones stay. Check the storage, and what was"
            " new in the state: settings of the optimizer, registered objects.",
            details={"path": str(path)},
        ) from error


def _no_chunk(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ask for no chunk."""


class _Reader:
    def __init__(self, path: CheckpointPath, index: CheckpointIndex, stack: ExitStack) -> None:
        self._path = path
        self._index = index
        self._stack = stack
        self._files: dict[str, BinaryIO] = {}
        self._has_checksums = False

    def state_shard(self, needs: Needs) -> StateShard:
        own_entry = self._own()
        objects = {
            path: self._object(span)
            for path, span in self._index.objects.items()
            if names.is_read(path) and path != names.OWN
        }
        step = own_entry["step"] if own_entry else objects.get(names.STEP, 0)
        values = dict(own_entry["values"]) if own_entry else {}
        slots_known = values.get(SLOTS) or {}
        shards = dict(self._tensors(needs, slots_known))
        if slots := names.slots_of(objects, slots_known):
            values[SLOTS] = slots
        groups = names.groups_of({**objects, **self._settings()})
        if groups:
            values["groups"] = groups
        return StateShard(step=step if type(step) is int else 0, shards=shards, values=values)

    def check(self) -> None:
        """Raise the errors of `state_shard`, from one tensor chunk of each dtype."""
        self.state_shard(_no_chunk)
        seen: set[torch.dtype] = set()
        for path, stored in self._index.tensors.items():
            if stored.dtype not in seen:
                seen.add(stored.dtype)
                for chunk, span in islice(stored.chunks.items(), 1):
                    self._chunk(names.key_of(path), stored.dtype, chunk, span)

    def _own(self) -> Mapping[str, Any] | None:
        span = self._index.objects.get(names.OWN)
        if span is None:
            return None
        content = names.own_state(self._object(span))
        self._has_checksums = content["checksums"]
        return content

    def _tensors(self, needs: Needs, slots: Mapping[str, Any]) -> Iterator[tuple[str, TensorShard]]:
        for path, stored in self._index.tensors.items():
            name = names.name_of_tensor(path, slots)
            chunk = None if name is None else needs(name, stored.shape, stored.dtype)
            if name is not None and chunk is not None:
                yield name, self._piece(names.key_of(path), stored, chunk)

    def _settings(self) -> dict[names.Path, object]:
        return {
            path: self._piece(names.key_of(path), stored, Chunk.whole(stored.shape)).tensor
            for path, stored in self._index.tensors.items()
            if path[:2] == ("optim", "param_groups")
        }

    def _piece(self, key: str, stored: IndexedTensor, chunk: Chunk) -> TensorShard:
        tensor = torch.empty(chunk.sizes, dtype=stored.dtype)
        num_read = 0
        for written, span in stored.chunks.items():
            both = chunk.overlap(written)
            if both is None:
                continue
            part = self._chunk(key, stored.dtype, written, span)
            tensor[both.slices_in(chunk)] = part[both.slices_in(written)]
            num_read += both.num_elements
        if num_read != chunk.num_elements:
            raise MalformedMessage(
                f"the checkpoint {self._path} does not hold all of {key}",
                seen=f"{num_read} elements of {chunk}",
                expected=f"{chunk.num_elements}",
            )
        return TensorShard(shape=stored.shape, chunk=chunk, tensor=tensor)

    def _chunk(self, key: str, dtype: torch.dtype, chunk: Chunk, span: FileSpan) -> Tensor:
        tensor = self._object(span)
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype != dtype
            or tuple(tensor.shape) != chunk.sizes
        ):
            shown = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
            raise MalformedMessage(
                f"{key} in the checkpoint {self._path} is not the tensor that the index describes",
                seen=shown or type(tensor).__name__,
                expected=f"{dtype} {chunk.sizes}",
            )
        return tensor

    def _object(self, span: FileSpan) -> Any:
        """Load tensors and plain values, no code."""
        file, offset, length = span
        if file not in self._files:
            self._files[file] = self._stack.enter_context((self._path / file).open("rb"))
        try:
            self._files[file].seek(offset)
            data = io.BytesIO(self._files[file].read(length))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # each kind of bucket has its own errors
            seen = f"{type(error).__name__}: {error}"
            raise OSError(f"{self._path / file}: {seen}") from error
        with self._damage_in(file, offset):
            if self._has_checksums:
                # torch.load does not verify the checksums that torch.save writes.
                changed = zipfile.ZipFile(data).testzip()
                if changed is not None:
                    raise ChecksumMismatch(
                        f"the checkpoint {self._path} has changed since it was written",
                        seen=f"{file}, {length} bytes from {offset}",
                        fix="Use an older checkpoint.",
                    )
                data.seek(0)
            return torch.load(data, map_location="cpu", weights_only=True)

    @contextmanager
    def _damage_in(self, file: str, offset: int) -> Iterator[None]:
        try:
            yield
        except (ShoalError, MemoryError):
            raise
        except Exception as error:  # damaged bytes make torch.load raise anything
            spans = self._index.objects.items()
            keys = [names.key_of(path) for path, span in spans if span[:2] == (file, offset)]
            # torch's message begins with advice to disable the safe unpickler.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2]
            raise MalformedMessage(
                f"the checkpoint {self._path} cannot be read",
                seen=f"{' '.join([*keys, file])} at {offset}: {reason[:200]}",
                expected="an object written by torch.distributed.checkpoint",
                fix="Use an older checkpoint.",
            ) from error
