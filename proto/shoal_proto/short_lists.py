"""Lists of names in messages, cut to a bound."""

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
