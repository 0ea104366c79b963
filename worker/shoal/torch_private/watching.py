"""Of any function of torch's: to look at what it is called with, whoever calls it."""

import functools
from collections.abc import Callable
from typing import Any

_WATCHED = "_shoal_watched"


def before_calls(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of each call of `owner.name`, ahead of it, from now on; what
    it raises keeps the call from being made. The first call counts."""
    plain: Any = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return plain(*args, **kwargs)

    _replace(owner, name, plain, watched)


def after_calls(owner: Any, name: str, look: Callable[[], None]) -> None:
    """Call `look` behind each call of `owner.name` from now on, also behind one that raised. The
    first call counts."""
    plain: Any = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            look()

    _replace(owner, name, plain, watched)


def _replace(owner: Any, name: str, plain: Any, watched: Any) -> None:
    if not hasattr(plain, _WATCHED):
        setattr(watched, _WATCHED, True)
        setattr(owner, name, functools.wraps(plain)(watched))
