"""Contents of the columns of Hugging Face's `datasets.Dataset`, read without loading a sample.

A sample would be decoded, formatted and put through the script's transform. Its fingerprint would
not do: it differs for the same samples if files differ in age or a function could not be pickled.
Its Arrow table is memory, or a file in memory, of which single rows can be read.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_BYTES = 4096
"""Bytes read from the end of a longer text or file."""
MAX_ELEMENTS = 4
"""Elements read of a list within a row."""
MAX_DEPTH = 4
_CHOSEN = "_indices"
"""Attribute in which a data set keeps the rows of the table that it has; None: all of them."""


def is_arrow(dataset: object) -> bool:
    """True if this is a data set whose rows can be read here."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "Dataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return False
    return _CHOSEN in vars(dataset) and hasattr(getattr(dataset, "data", None), "fast_gather")


def rows_taken(dataset: Any, places: Callable[[int], Sequence[int]]) -> list[int] | None:
    """The rows of the table that its samples at `places` of so many are. None: all, in order."""
    taken = vars(dataset)[_CHOSEN]
    if taken is None or not len(taken):
        return None if taken is None else []
    return list(taken.fast_gather(places(len(taken))).column(0).to_pylist())


def columns_at(dataset: Any, rows: Sequence[int]) -> Iterator[tuple[str, list[object]]]:
    """The name of each column, and its values in these rows: of long ones a part."""
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
        # An extension type by its storage; a point in time by its number.
        stored = scalar.value
        return _value(stored, depth + 1) if hasattr(stored, "is_valid") else stored
    plain: object = scalar.as_py()
    return plain


def _end_of(scalar: Any) -> object:
    """Return the end of a text, or of bytes."""
    content = scalar.as_buffer()
    end = content.slice(max(0, content.size - MAX_BYTES)).to_pybytes()
    is_text = "string" in str(scalar.type)
    return end.decode(errors="ignore") if is_text else end
