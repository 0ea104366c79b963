"""Digest of a data set's contents, with which members check that they train on the same samples.

The digest covers a few values, at positions that depend on sizes alone. No item is loaded: that may
be slow, random, or have side effects. For unknown classes, the digest covers public attributes
(torchvision's: all) that have one entry for each sample or are data sets.

Only the last part of a text with slashes counts: folders may differ between hosts. Floating-point
values count only in steps of about a factor e: computed columns may differ in the last bits between
hosts.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from shoal.data.arrow_columns import columns_at, is_arrow, selected_rows
from shoal.data.batches import Dataset, dataset_size
from shoal.data.order import CONTENT_FIELD
from shoal.data.shards import Shards
from shoal_proto.listings import pack

NUM_SAMPLES = 64
"""Limit of the samples read in each data set or part."""
NUM_EXACT, NUM_ROUGH = 16, 4
"""Limits of the elements read in each row: integers, floating-point numbers."""
NUM_ROWS, NUM_ROWS_TAKEN = 32, 256
"""Limits for Arrow: rows read, and entries read of its list of rows."""
NUM_INDICES = 1 << 12
MAX_TEXT = 4096
MAX_PARTS = 64
"""Limit of a sample's parts, of columns, and of a composite's data sets."""
MAX_DEPTH = 8
MAX_ITEMS = 1 << 14
SMALLEST = 1e-3
"""Values far below this count as equal: they may be rounding errors."""
OFFSET = 0.371
"""Offset that keeps common values such as 0 or 1 away from a step's border."""
_INTEGERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
DigestItem = str | int


class RoughNumber(int):
    """Number of a step of the rough scale, for floats of about the same magnitude."""

    def __str__(self) -> str:
        return f"about {SMALLEST * math.sinh(int(self) + 0.5 - OFFSET):.2g}"


def content_of(dataset: Dataset) -> str:
    """Return the digest of the contents; empty for `Shards`, and if they cannot be read without
    loading samples."""
    return _digest_of(_items_of(dataset))


def content_fields(dataset: Dataset | DataLoader[Any]) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return optional fields of the proposal, and by field a packed listing of the digest's
    values."""
    samples = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    listings = {"dataset": pack(samples.listing)} if isinstance(samples, Shards) else {}
    items = _items_of(samples)
    if not items:
        return {}, listings
    lines = (f"compared value {number}: {item}" for number, item in enumerate(items))
    return {CONTENT_FIELD: _digest_of(items)}, {**listings, CONTENT_FIELD: pack(lines)}


def _items_of(dataset: Dataset) -> list[DigestItem]:
    return list(islice(_dataset_items(dataset, dataset_size(dataset), 0), MAX_ITEMS))


def _digest_of(items: Sequence[DigestItem]) -> str:
    return sha256(repr(items).encode()).hexdigest()[:16] if items else ""


def _dataset_items(dataset: Any, size: int | None, depth: int) -> Iterator[DigestItem]:
    """Read a data set that holds its samples or wraps another one. `size`: number of samples, if
    known."""
    if depth > MAX_DEPTH or isinstance(dataset, Shards):
        return
    if isinstance(dataset, Subset):
        yield from _index_items(dataset.indices)
        yield from _dataset_items(dataset.dataset, None, depth + 1)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        parts: Any = dataset.datasets
        for each in list(parts.values() if isinstance(parts, Mapping) else parts)[:MAX_PARTS]:
            yield from _dataset_items(each, None, depth + 1)
    elif is_arrow(dataset):
        yield from _arrow_items(dataset)
    elif isinstance(dataset, TensorDataset) or _are_tensors(dataset):
        for column in getattr(dataset, "tensors", dataset)[:MAX_PARTS]:
            yield from _array_items(column)
    elif isinstance(dataset, Tensor | np.ndarray):
        yield from _array_items(dataset)
    elif type(dataset) in (list, tuple):
        for position in _spread(len(dataset), NUM_SAMPLES):
            yield from _value_items(dataset[position], 0)
    elif size is not None:
        yield from _attribute_items(dataset, size, depth)


def _are_tensors(dataset: object) -> bool:
    return isinstance(dataset, tuple) and all(isinstance(each, Tensor) for each in dataset)


def _attribute_items(dataset: object, size: int, depth: int) -> Iterator[DigestItem]:
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if name.startswith("_") and not _keeps_no_caches(dataset):
            continue
        is_column = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
        if is_column or type(value) in (list, tuple):
            counts = len(value) == size and not _is_being_filled(value)
            items = _dataset_items(value, size, depth + 1) if counts else iter(())
        elif isinstance(value, TorchDataset) or is_arrow(value):
            items = _dataset_items(value, size, depth + 1)
        else:
            continue
        for count, item in enumerate(items):
            if not count:
                yield name
            yield item


def _keeps_no_caches(dataset: object) -> bool:
    """True for torchvision's data sets: their private attributes are file names and labels."""
    return type(dataset).__module__.startswith("torchvision.datasets.")


def _arrow_items(dataset: Any) -> Iterator[DigestItem]:
    yield len(dataset)
    table_rows = selected_rows(dataset, lambda size: _spread(size, NUM_ROWS_TAKEN))
    if table_rows is not None:
        yield sha256(repr(table_rows).encode()).hexdigest()
    rows = _spread(dataset.data.num_rows, NUM_ROWS)
    for name, values in islice(columns_at(dataset, rows), MAX_PARTS) if len(rows) else ():
        yield name
        for value in values:
            yield from _value_items(value, 0)


def _is_being_filled(column: Any) -> bool:
    if not isinstance(column, list | tuple):
        return False
    return any(column[position] is None for position in _spread(len(column), NUM_SAMPLES))


def _index_items(indices: Any) -> Iterator[DigestItem]:
    if not isinstance(indices, Tensor | np.ndarray | list | tuple | range):
        return
    positions = _spread(len(indices), NUM_INDICES)
    if isinstance(indices, Tensor | np.ndarray):
        sampled = np.asarray(_elements(indices, [positions]))
    elif len(positions) == len(indices):
        sampled = np.asarray(indices)
    else:
        sampled = np.asarray([indices[position] for position in positions])
    yield len(indices)
    if sampled.dtype.kind in "iu":
        yield sha256(sampled.astype("<i8").tobytes()).hexdigest()
    else:
        for each in sampled.tolist():
            yield from _scalar_items(each)


def _value_items(value: object, depth: int) -> Iterator[DigestItem]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Tensor | np.ndarray):
        yield from _array_items(value)
    elif type(value) is dict:
        for name in list(value)[:MAX_PARTS]:
            yield from _value_items(name, depth + 1)
            yield from _value_items(value[name], depth + 1)
    elif type(value) is list or isinstance(value, tuple):
        yield len(value)
        for each in value[:MAX_PARTS]:
            yield from _value_items(each, depth + 1)
    else:
        yield from _scalar_items(value.item() if isinstance(value, np.generic) else value)


def _scalar_items(value: object) -> Iterator[DigestItem]:
    if isinstance(value, int):
        yield int(value)
    elif isinstance(value, float):
        yield _rough(value)
    elif isinstance(value, complex):
        yield from (_rough(value.real), _rough(value.imag))
    elif isinstance(value, str | os.PathLike):
        # Only the file's name counts: folders may differ between hosts.
        path = value if isinstance(value, str) else os.fsdecode(value)
        yield path[-MAX_TEXT:].rsplit("/", 1)[-1]
    elif isinstance(value, bytes):
        yield sha256(value[:MAX_TEXT]).hexdigest()
    else:
        yield type(value).__name__


def _array_items(array: "Tensor | np.ndarray[Any, Any]") -> Iterator[DigestItem]:
    if isinstance(array, Tensor) and not _is_plain(array):
        return
    sizes = tuple(array.shape)
    yield str(sizes)
    if math.prod(sizes) == 0:
        return
    rows = _spread(sizes[0], NUM_SAMPLES) if sizes else [0]
    width = math.prod(sizes[1:])
    count = min(width, NUM_EXACT if _is_exact(array) else NUM_ROUGH)
    # Rows are read at different positions: an image's corners, for example, never differ.
    flat = [
        (row * 7919 + k * width // count) % width for row in range(len(rows)) for k in range(count)
    ]
    positions = [[row for row in rows for _ in range(count)]]
    for size in reversed(sizes[1:]):
        positions.insert(1, [each % size for each in flat])
        flat = [each // size for each in flat]
    for value in _elements(array, positions if sizes else []):
        yield from _scalar_items(value)


def _elements(
    array: "Tensor | np.ndarray[Any, Any]", positions: Sequence[Sequence[int]]
) -> list[Any]:
    # NumPy, as torch would use the script's default device.
    index = tuple(np.asarray(each, dtype=np.int64) for each in positions)
    if not isinstance(array, Tensor):
        return list(np.asarray(array[index]).flatten().tolist())
    on_device = tuple(torch.from_numpy(each).to(array.device) for each in index)
    elements = array.detach()[on_device].cpu()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    exact = elements.dtype in _INTEGERS
    return list(elements.to(torch.int64 if exact else torch.float64).flatten().tolist())


def _is_exact(array: "Tensor | np.ndarray[Any, Any]") -> bool:
    if isinstance(array, Tensor):
        return array.dtype in _INTEGERS
    return array.dtype.kind in "biu"


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
        and (tensor.dtype in _INTEGERS or tensor.is_floating_point() or tensor.is_complex())
    )


def _spread(size: int, most: int) -> Sequence[int]:
    """Return at most `most` positions below `size`, spread evenly."""
    if size <= most:
        return range(size)
    return [k * (size - 1) // (most - 1) for k in range(most)]


def _rough(value: float) -> DigestItem:
    if math.isnan(value) or math.isinf(value):
        return "nan" if math.isnan(value) else str(value)
    return RoughNumber(math.floor(math.asinh(value / SMALLEST) + OFFSET))
