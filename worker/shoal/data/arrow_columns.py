"""Contents of the columns of Hugging Face's `datasets.Dataset`, without loading a sample.

Loading a sample would run the script's transform. The data set's own fingerprint depends on the age
of its files.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_BYTES = 4096
"""Number of bytes that are read at the end of a text or of bytes."""
MAX_ELEMENTS = 4
MAX_DEPTH = 4
_ROWS = "_indices"
"""Attribute of a `datasets.Dataset`: the table rows of its samples; None: all rows."""


def is_arrow(dataset: object) -> bool:
    """True for a `datasets.Dataset` with readable rows."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "Dataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return False
    return _ROWS in vars(dataset) and hasattr(getattr(dataset, "data", None), "fast_gather")


def selected_rows(dataset: Any, positions_of: Callable[[int], Sequence[int]]) -> list[int] | None:
    """Return the table rows of the samples at `positions_of(number of samples)`; None: all rows."""
    indices = vars(dataset)[_ROWS]
    if indices is None or not len(indices):
        return None if indices is None else []
    return list(indices.fast_gather(positions_of(len(indices))).column(0).to_pylist())


def columns_at(dataset: Any, rows: Sequence[int]) -> Iterator[tuple[str, list[object]]]:
    """Yield each column's name, and its values in these rows; long values are cut."""
    table = dataset.data.fast_gather(rows)
    for name, column in zip(table.column_names, table.columns, strict=True):
        yield name, [_value(each, 0) for each in column]


def _value(scalar: Any, depth: int) -> object:
    if not scalar.is_valid:
        return None
    if hasattr(scalar, "as_buffer"):
        return _end_of(scalar)
    if isinstance(scalar, Mapping):
        return [_value(scalar[name], depth + 1) for name in scalar] if depth < MAX_DEPTH else None
    if hasattr(scalar, "values"):
        values = scalar.values
        inner = [] if depth >= MAX_DEPTH else values.slice(0, MAX_ELEMENTS)
        return [len(values), *(_value(each, depth + 1) for each in inner)]
    if hasattr(scalar, "value"):
        stored = scalar.value
        return _value(stored, depth + 1) if hasattr(stored, "is_valid") else stored
    plain: object = scalar.as_py()
    return plain


def _end_of(scalar: Any) -> object:
    content = scalar.as_buffer()
    end = content.slice(max(0, content.size - MAX_BYTES)).to_pybytes()
    is_text = "string" in str(scalar.type)
    return end.decode(errors="ignore") if is_text else end
