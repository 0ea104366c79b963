"""Of any function of torch's: to look at what it is called with, whoever calls it."""

import functools
from collections.abc import Callable
from typing import Any

_WATCHED = "_shoal_watched"


def before_calls(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of each call of `owner.name`, ahead of it, from now on; what
    it raises keeps the call from being made. The first call counts."""
    plain: Any = getattr(owner, name)
    if hasattr(plain, _WATCHED):
        return

    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(watched, _WATCHED, True)
    setattr(owner, name, watched)
