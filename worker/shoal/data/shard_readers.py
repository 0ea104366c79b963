"""Reads the samples of one shard from its beginning."""

import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from shoal_proto.errors import InvalidSpec

TARS = (".tar", ".tar.gz", ".tgz")


def read_shard(shard: Any) -> Iterable[Any]:
    """The samples of a tar file, by its path or URL, or of anything that can be iterated over.

    Raises InvalidSpec for another kind of file.
    """
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
    """The samples of a tar file as WebDataset lays them out: files that follow one another with
    the same name up to the first dot are one sample. Bytes by extension, the name as `__key__`."""
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
