"""Micro-batches of a member's share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from shoal import step_context
from shoal.step_context import PartsOfStep
from shoal_proto.errors import InvalidSpec


def of_step() -> PartsOfStep:
    """Return the parts of the open step. Raises InvalidSpec if no step is open."""
    parts = step_context.current().parts
    if parts is None:
        raise InvalidSpec(
            "batch.parts outside a step",
            expected="with session.step(): for part in batch.parts(4): ...",
        )
    return parts


def cut(values: Any, start: int, stop: int, size: int) -> Any:
    """Return the samples [start, stop) of `values`, which hold `size` samples.

    `values`: a tensor with the samples along its first dimension, a list or tuple with an item for
    each sample, None, or a tuple, list or mapping of these. Raises InvalidSpec for other values.
    """
    if values is None:
        return None
    if isinstance(values, Tensor):
        if not values.ndim or len(values) != size:
            raise _not_by_sample(f"a tensor of shape {tuple(values.shape)}", size)
        return values[start:stop]
    if isinstance(values, Mapping):
        make: Any = type(values)
        return make({key: cut(value, start, stop, size) for key, value in values.items()})
    if isinstance(values, list | tuple):
        return _cut_sequence(values, start, stop, size)
    raise _not_by_sample(f"a {type(values).__name__}", size)


def has_all_rows(values: Any, size: int) -> bool:
    """True for a tensor with `size` rows: a quick check before `rows_of_fewer`."""
    return type(values) is Tensor and not values.is_nested and values.shape[:1] == (size,)


def rows_of_fewer(values: Iterable[Any], size: int) -> int | None:
    """Return the number of samples in a batch if a collate function left some out; None if all
    `size` samples are there, or if the number is unclear.

    In such a batch all tensors have the same number of rows, below `size`. The number is unclear if
    a tensor with the fewest dimensions has another dimension of length `size`: the samples may lie
    along it.
    """
    shapes = [shape for each in values for shape in _shapes(each, size)]
    rows = {shape[0] for shape in shapes}
    if len(rows) != 1 or rows.pop() >= size:
        return None
    fewest = min(map(len, shapes))
    if any(size in shape for shape in shapes if len(shape) == fewest):
        return None
    return shapes[0][0]


def _shapes(values: Any, size: int) -> Iterator[tuple[int, ...]]:
    if isinstance(values, Tensor):
        if values.ndim:
            yield (len(values),) if values.is_nested else tuple(values.shape)
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _shapes(each, size)
    elif isinstance(values, list | tuple):
        if len(values) == size:
            yield (size,)
        else:
            for each in values:
                yield from _shapes(each, size)


class OnePerSample(tuple[Any, ...]):
    """A collated tuple with one item a sample."""


class ListPerSample(list[Any]):
    """A collated list with one item a sample."""


class PerColumn(list[Any]):
    """A list of columns, which all cover all samples."""


def columns_marked(collated: Any, size: int, of_one: Callable[[], Any]) -> Any:
    """Mark tuples and lists in a collated batch that hold one item a sample, and lists of columns.

    In a batch of three images with three channels, `tuple(images)` looks like three columns.
    `of_one()` returns the collated batch of one sample, which decides.
    """
    if size < 2 or not _in_doubt(collated, size):
        return collated
    return _marked(collated, of_one(), size)


def _in_doubt(values: Any, size: int) -> bool:
    if isinstance(values, Mapping):
        return any(_in_doubt(each, size) for each in values.values())
    if not isinstance(values, list | tuple):
        return False
    return _may_be_either(values, size) or any(_in_doubt(each, size) for each in values)


def _may_be_either(values: Any, size: int) -> bool:
    return type(values) in (list, tuple) and len(values) == size and _are_columns(values, size)


def _marked(values: Any, one: Any, size: int) -> Any:
    if type(values) is dict and isinstance(one, Mapping):
        return {name: _marked(each, one.get(name), size) for name, each in values.items()}
    if type(values) not in (list, tuple) or not isinstance(one, list | tuple):
        return values
    is_in_doubt = _may_be_either(values, size)
    if is_in_doubt and len(one) == 1:
        return ListPerSample(values) if isinstance(values, list) else OnePerSample(values)
    if len(values) != len(one):
        return values
    parts = [_marked(each, single, size) for each, single in zip(values, one, strict=True)]
    if isinstance(values, tuple):
        return tuple(parts)
    return PerColumn(parts) if is_in_doubt else parts


def _are_columns(values: Any, size: int) -> bool:
    return bool(values) and all(_is_column(value, size) for value in values)


def _cut_sequence(values: Any, start: int, stop: int, size: int) -> Any:
    if isinstance(values, OnePerSample | ListPerSample):
        return values[start:stop]
    columns = _are_columns(values, size)
    is_known = isinstance(values, PerColumn)
    if columns and isinstance(values, list) and len(values) == size > 1 and not is_known:
        raise InvalidSpec(
            "a list that may hold a tensor for each sample, or a tensor for each column",
            seen=f"{size} tensors of {size} rows, for {size} samples",
            expected="a tuple or a dict where each tensor has a row for each sample",
        )
    if columns:
        parts = [cut(value, start, stop, size) for value in values]
        if hasattr(values, "_fields"):
            return type(values)(*parts)
        return type(values)(parts)
    if len(values) == size:
        return values[start:stop]
    raise _not_by_sample(f"a {type(values).__name__} of {len(values)} items", size)


def _is_column(value: Any, size: int) -> bool:
    if isinstance(value, Tensor):
        return bool(value.ndim) and len(value) == size
    if isinstance(value, Mapping):
        return all(_is_column(each, size) for each in value.values())
    if isinstance(value, list | tuple):
        return len(value) == size or _are_columns(value, size)
    return value is None


def _not_by_sample(seen: str, size: int) -> InvalidSpec:
    return InvalidSpec(
        "a batch that cannot be cut into parts",
        seen=seen,
        expected=f"tensors whose first dimension is the samples ({size} here), or lists of them",
        fix="Let `collate` return such tensors, in a tuple or a dict; or leave out batch.parts and"
        " cut the batch in the script (docs/loop.md).",
    )
