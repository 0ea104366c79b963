"""Since when somebody is gone. Pure: times are arguments."""

from collections.abc import Collection
from math import inf
from typing import Generic, TypeVar

Who = TypeVar("Who")


class Absences(Generic[Who]):
    """Of those that are asked about again and again. Who is back, or asked about no longer, is
    forgotten: a later absence begins anew."""

    def __init__(self, longest_gap_s: float = inf) -> None:
        """After a pause of more than that between two questions, nobody counts as gone before the
        second: they may have been there meanwhile."""
        self._longest_gap_s = longest_gap_s
        self._asked_s = -inf
        self._since_s: dict[Who, float] = {}

    def away_s(
        self, who: Collection[Who], now_s: float, *, asked_s: float | None = None
    ) -> dict[Who, float]:
        """For how many seconds each of them has been gone for certain: those that are gone, all of
        them, as is known now of the time when it was asked for."""
        asked_s = now_s if asked_s is None else asked_s
        if now_s - self._asked_s > self._longest_gap_s:
            self._since_s = {}
        self._asked_s = asked_s
        self._since_s = {each: self._since_s.get(each, now_s) for each in who}
        return {each: max(0.0, asked_s - since_s) for each, since_s in self._since_s.items()}
