"""Durations of absences."""

from collections.abc import Collection
from math import inf
from typing import Generic, TypeVar

ServerT = TypeVar("ServerT")


class ServerAbsences(Generic[ServerT]):
    """Absences of servers, updated by `away_s`. An absence ends when a call does not name the
    server."""

    def __init__(self, longest_gap_s: float = inf) -> None:
        """`longest_gap_s`: time between two calls after which all absences count from 0, as servers
        may have been present meanwhile."""
        self._longest_gap_s = longest_gap_s
        self._asked_s = -inf
        self._since_s: dict[ServerT, float] = {}

    def away_s(
        self, gone: Collection[ServerT], now_s: float, *, asked_s: float | None = None
    ) -> dict[ServerT, float]:
        """Seconds for which each server has certainly been gone. `gone`: servers missing from a
        list that was requested at `asked_s` (None: at `now_s`) and arrived at `now_s`."""
        asked_s = now_s if asked_s is None else asked_s
        if now_s - self._asked_s > self._longest_gap_s:
            self._since_s = {}
        self._asked_s = asked_s
        self._since_s = {each: self._since_s.get(each, now_s) for each in gone}
        return {each: max(0.0, asked_s - since_s) for each, since_s in self._since_s.items()}
