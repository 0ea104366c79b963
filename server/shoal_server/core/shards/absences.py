"""Since when somebody is gone. Pure: the time is an argument."""

from collections.abc import Collection
from typing import Generic, TypeVar

Who = TypeVar("Who")


class Absences(Generic[Who]):
    """Of those that are asked about again and again. Who is back, or asked about no longer, is
    forgotten: a later absence begins anew."""

    def __init__(self) -> None:
        self._since_s: dict[Who, float] = {}

    def away_s(self, who: Collection[Who], now_s: float) -> dict[Who, float]:
        """For how many seconds each of them has been gone: those that are gone now, all of
        them."""
        self._since_s = {each: self._since_s.get(each, now_s) for each in who}
        return {each: now_s - since_s for each, since_s in self._since_s.items()}
