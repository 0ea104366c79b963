"""Hooks on calls of any function of torch, whichever code calls it."""

import functools
from collections.abc import Callable
from typing import Any

_WATCHED = "_shoal_watched"


def before_calls(
    owner: Any,
    name: str,
    look: Callable[..., None],
    *,
    failed: Callable[[], None] = lambda: None,
    mark: str = _WATCHED,
) -> None:
    """Install `look`, called with the arguments before each call of `owner.name`.

    If `look` raises, the call is not made. `failed` is called after a call that raised. Only the
    first hook on a function with the same `mark` has an effect.
    """
    plain: Any = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        try:
            return plain(*args, **kwargs)
        except BaseException:
            failed()
            raise

    _replace(owner, name, plain, watched, mark)


def after_calls(owner: Any, name: str, look: Callable[[], None]) -> None:
    """Install `look`, called after each call of `owner.name`, even if the call raised.

    Only the first hook on a function has an effect.
    """
    plain: Any = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            look()

    _replace(owner, name, plain, watched)


def _replace(owner: Any, name: str, plain: Any, watched: Any, mark: str = _WATCHED) -> None:
    if not hasattr(plain, mark):
        setattr(watched, mark, True)
        setattr(owner, name, functools.wraps(plain)(watched))
