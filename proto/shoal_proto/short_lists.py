"""Texts of messages, cut to a bound."""

from collections.abc import Iterable
from itertools import islice


def short_list(names: Iterable[str], limit: int, num_names: int | None = None) -> str:
    """The first `limit` names, and the number of the others: "a, b and 3 more"; empty for none.
    `num_names`: the number of all names; None: `names` is read to its end."""
    if num_names is None:
        names = list(names)
        num_names = len(names)
    more = f" and {num_names - limit} more" if num_names > limit else ""
    return ", ".join(islice(names, limit)) + more


def sendable(text: str, limit: int | None = None) -> str:
    """The text as a message can hold it, cut to `limit` characters. Bytes that are not UTF-8, as in
    names of files, become escapes: Python has them as lone surrogates, which protobuf and JSON
    refuse."""
    return text.encode(errors="backslashreplace").decode()[:limit]
