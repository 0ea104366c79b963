"""A data set in shards that are read from the beginning: tar files, streams, iterable data sets.

A shard is read up to the requested sample. The order of `shoal.data.shard_order` goes through each
shard in sequence, with small steps back; samples are kept for these steps.
"""

import os
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import fsspec
from torch.utils.data import Dataset

from shoal.data.samples import preserve_generators
from shoal.torch_private.dataloader import hidden_worker_info
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

Read = Callable[[Any], Iterable[Any]]
"""Function that returns one shard's samples, in the same order each time."""


TARS = (".tar", ".tar.gz", ".tgz")


def read_shard(shard: Any) -> Iterable[Any]:
    """Return the samples of a tar file, given by path or URL, or of an iterable. Raises InvalidSpec
    for another kind of file."""
    if not isinstance(shard, str | os.PathLike):
        samples: Iterable[Any] = iter(shard)
        return samples
    name = os.fspath(shard)
    if not name.endswith(TARS):
        raise InvalidSpec(
            "a shard of an unknown kind",
            seen=name,
            expected=", ".join(TARS),
            fix="Give Shards(read=...): a function that gives the samples of one shard.",
        )
    return tar_samples(name)


def tar_samples(url: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar file in WebDataset's format.

    Adjacent files with the same name up to the first dot are one sample: a dict of bytes by
    lower-case extension, with the name as `__key__`.
    """
    with _opened(url) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        sample: dict[str, Any] = {}
        for member in tar:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            content = tar.extractfile(member)
            assert content is not None, "a file has content"
            sample = {"__key__": key, **sample, extension.lower(): content.read()}
        if sample:
            yield sample


def _opened(url: str) -> IO[bytes]:
    if "://" not in url:
        return Path(url).open("rb")
    file: IO[bytes] = fsspec.open(url, "rb").open()
    return file


class Shards(Dataset[Any]):
    """Samples in shards, for `session.batches`:

        urls = [f"s3://bucket/train-{number:05d}.tar" for number in range(1024)]
        dataset = shoal.Shards(urls, lengths=lengths, decode=to_tensors)
        for batch in session.batches(dataset, global_batch_size=256, epochs=10, num_workers=4):

    With shuffling, each epoch concatenates the shards in a new order, shuffles within windows, and
    cuts the result into streams; a member reads its share's streams."""

    def __init__(
        self,
        shards: Sequence[Any],
        *,
        lengths: Sequence[int],
        read: Read = read_shard,
        decode: Callable[[Any], Any] | None = None,
        columns: int = 8,
        turns: int = 1,
        shuffle_buffer: int = 128,
    ) -> None:
        """`lengths`: number of samples of each shard, as `Shards.count` returns it. A wrong length
        is an error when the shard's end is read.

        `read`: returns the samples of a shard; by default tar files are read in WebDataset's
        format, and other objects are iterated over. `decode`: converts a sample that is trained on
        before it is collated, with random numbers seeded by the sample.

        `columns`: number of streams in a batch; choose about the largest number of members.
        `turns`: number of consecutive batches with different streams; choose `num_workers`.
        `shuffle_buffer`: size of the windows in which samples are shuffled. A process keeps up to
        twice as many samples, not decoded, of each open shard: up to two shards for each stream,
        more if shards are short.

        Raises InvalidSpec for options out of range, and if there are no samples or not one length
        for each shard.
        """
        self.shards, self.lengths = list(shards), [_checked("a length", n, 0) for n in lengths]
        if len(self.shards) != len(self.lengths):
            raise InvalidSpec(
                "not each shard has a length",
                seen=f"{len(self.shards)} shards, {len(self.lengths)} lengths",
                expected="lengths=[...], one for each shard, in their order",
                fix="Shards.count(shards) reads all of them once and counts.",
            )
        if not sum(self.lengths):
            raise InvalidSpec("the shards hold no samples", seen=f"{len(self.shards)} shards")
        self.columns = _checked("columns", columns, 1)
        self.turns = _checked("turns", turns, 1)
        self.shuffle_buffer = _checked("shuffle_buffer", shuffle_buffer, 1)
        self._read, self._decode = read, decode
        self._ends = list(accumulate(self.lengths))
        self._open = _OpenShards(self)

    @staticmethod
    def count(shards: Iterable[Any], read: Read = read_shard) -> list[int]:
        """Count the samples in each shard by reading all. Raises what `read` raises."""
        return [sum(1 for _ in read(shard)) for shard in shards]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its index over all shards. Raises IndexError for an index out of
        range, and InvalidSpec if the shard has another length."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        sample = self._open.sample(number, index - self._ends[number] + self.lengths[number])
        return sample if self._decode is None else self._decode(sample)

    @property
    def description(self) -> str:
        """Description that members compare."""
        digest = blake2b(repr((self._names, self.lengths)).encode(), digest_size=8).hexdigest()
        return f"{len(self)} samples in {len(self.shards)} shards {digest}"

    @property
    def listing(self) -> Iterator[str]:
        """Lines that the digest in `description` covers, one for each shard."""
        for number, (name, length) in enumerate(zip(self._names, self.lengths, strict=True)):
            yield f"shard {number}: {f'{name!r} of ' if name else ''}{length} samples"

    @property
    def _names(self) -> list[str]:
        """Paths below their common folder, which may differ between hosts; "" if not a path."""
        paths = [
            os.fsdecode(shard) if isinstance(shard, str | os.PathLike) else ""
            for shard in self.shards
        ]
        # Not commonpath: it changes URLs.
        start = os.path.commonprefix([*filter(None, paths)]).rfind("/") + 1  # noqa: RUF071
        return [path[start:] for path in paths]

    def samples_of(self, number: int) -> Iterator[Any]:
        """Iterate over one shard's samples."""
        return iter(self._read(self.shards[number]))

    def shard_name(self, number: int) -> str:
        shard = self.shards[number]
        return str(shard) if isinstance(shard, str | os.PathLike) else f"shard {number}"


class _OpenShards:
    """The shards that this process reads. Empty after a fork or pickling."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        num_streams = shards.columns * shards.turns
        mean_length = len(shards) / len(shards.shards)
        self._keep = 2 * shards.shuffle_buffer
        self._max_open = num_streams * (2 + int(self._keep / mean_length))
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict(), "_pid": 0}

    def sample(self, number: int, offset: int) -> Any:
        if self._pid != os.getpid():
            self._open, self._pid = OrderedDict(), os.getpid()
        shard = self._open.pop(number, None)
        if shard is None or not shard.has(offset):
            shard = _OpenShard(self._shards, number, self._keep)
            while len(self._open) >= self._max_open:
                self._open.popitem(last=False)
        sample = shard.sample(offset)
        self._open[number] = shard
        return sample


class _OpenShard:
    def __init__(self, shards: Shards, number: int, keep: int) -> None:
        self._name, self._length = shards.shard_name(number), shards.lengths[number]
        self._keep = keep
        self._num_read = 0
        self._kept: dict[int, Any] = {}
        """The last samples read, at most `keep`, by ascending offset."""
        with hidden_worker_info(), preserve_generators():
            self._samples = shards.samples_of(number)

    def has(self, offset: int) -> bool:
        return offset >= self._num_read or offset in self._kept

    def sample(self, offset: int) -> Any:
        """Return a sample that the caller may change."""
        if offset >= self._num_read:
            # The reader must not divide samples by torch's worker info, nor change the samples'
            # random numbers.
            with hidden_worker_info(), preserve_generators():
                self._read_to(offset)
        kept = self._kept[offset]
        try:
            return deepcopy(kept)
        except Exception:  # noqa: BLE001 - of the sample's own class, such as an open file's
            # The next request of this sample reads the shard again.
            del self._kept[offset]
            return kept

    def _read_to(self, offset: int) -> None:
        for kept in [kept for kept in self._kept if kept <= offset - self._keep]:
            del self._kept[kept]
        for sample in self._samples:
            if self._num_read > offset - self._keep:
                self._kept[self._num_read] = sample
            self._num_read += 1
            if self._num_read == self._length:
                self._end()
            if self._num_read > offset:
                return
        raise self._wrong_length(str(self._num_read))

    def _end(self) -> None:
        if next(self._samples, self) is not self:
            raise self._wrong_length("more")
        self._samples = iter(())

    def _wrong_length(self, seen: str) -> InvalidSpec:
        return InvalidSpec(
            f"{self._name} has another number of samples than `lengths` says",
            seen=f"{seen} samples",
            expected=f"{self._length}",
            fix="Give its length as Shards.count returns it. `read` must return all samples of the"
            " shard, the same each time, in any rank and process.",
        )


def _checked(name: str, number: Any, least: int) -> int:
    value = as_index(f"{name} of shards", number)
    if value < least:
        raise InvalidSpec(
            f"{name} of shards is out of range",
            seen=repr(number),
            expected=f"an integer of {least} or more",
        )
    return value
