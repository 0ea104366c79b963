"""Members that could not bring a generation up: when each retries, and which are left out.

Three own failures in a row, counted by name, leave a member out. A shared failure, which another
member caused, only delays a newcomer, so that it does not stop a running generation again and
again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_TRIES = 3
FIRST_PAUSE_S = 1.0
PAUSE_GROWTH = 3.0
MAX_PAUSE_S = 300.0
REMEMBERED_S = 600.0
"""Time after a member's newest failure at which its failures are forgotten."""
MAX_NAMES_KEPT = 10_000


@dataclass(kw_only=True)
class Setback:
    at_s: float
    """Time of the newest failure."""
    own: int = 0
    shared: int = 0
    """Failures that other members caused while this member joined."""
    error: str = ""
    not_before_s: float | None = None
    """Time of the next try; None: at once."""


class Setbacks:
    """Setbacks of one job's members, by member id."""

    def __init__(self) -> None:
        self._setbacks: dict[str, Setback] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setbacks) and self._setbacks == other._setbacks

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[str]:
        return iter(self._setbacks)

    def __repr__(self) -> str:
        return f"Setbacks({self._setbacks!r})"

    def count_failure(self, member_id: str, error: str, now_s: float) -> int:
        """Count a failure of the member's own; return their number in a row."""
        setback = self._of(member_id, now_s)
        setback.own, setback.error = setback.own + 1, error
        self._put_off(setback, setback.own, now_s)
        return setback.own

    def count_shared_failure(self, member_id: str, now_s: float) -> None:
        """Count a failed bring-up that the member did not cause."""
        setback = self._of(member_id, now_s)
        setback.shared += 1
        self._put_off(setback, setback.shared, now_s)

    def succeeded(self, member_ids: Iterable[str]) -> None:
        if self._setbacks:
            for name in member_ids:
                self._setbacks.pop(name, None)

    def release(self, now_s: float) -> None:
        """Let members with a past delay try again, and forget old failures."""
        for name, setback in list(self._setbacks.items()):
            if setback.not_before_s is not None and now_s >= setback.not_before_s:
                setback.not_before_s = None
            if now_s >= setback.at_s + REMEMBERED_S:
                del self._setbacks[name]

    def waits(self, member_id: str) -> bool:
        """True if the member's next try is put off."""
        setback = self._setbacks.get(member_id)
        return setback is not None and setback.not_before_s is not None

    def num_own_failures(self, member_id: str) -> int:
        setback = self._setbacks.get(member_id)
        return setback.own if setback is not None else 0

    def is_first(self, member_id: str) -> bool:
        """True for one failure of the member's own and no shared one."""
        setback = self._setbacks.get(member_id)
        return setback is not None and setback.own == 1 and not setback.shared

    def left_out(self, member_id: str, now_s: float) -> str:
        """Return the error of a member that is left out; else empty."""
        setback = self._setbacks.get(member_id)
        if setback is None or setback.own < MAX_TRIES or now_s >= setback.at_s + REMEMBERED_S:
            return ""
        return setback.error

    def left_out_errors(self, now_s: float) -> Iterator[tuple[str, str]]:
        """Names and errors of the members that are left out."""
        for name in self._setbacks:
            if error := self.left_out(name, now_s):
                yield name, error

    def next_release_s(self, member_ids: Iterable[str]) -> Iterator[float]:
        """Times at which delayed members may try again."""
        if self._setbacks:
            for name in member_ids:
                setback = self._setbacks.get(name)
                if setback is not None and setback.not_before_s is not None:
                    yield setback.not_before_s

    def postpone(self, by_s: float) -> None:
        """Move all times: see `JobState.postpone`."""
        for setback in self._setbacks.values():
            setback.at_s += by_s
            if setback.not_before_s is not None:
                setback.not_before_s += by_s

    def _of(self, member_id: str, now_s: float) -> Setback:
        setback = self._setbacks.pop(member_id, None)
        if setback is None or now_s >= setback.at_s + REMEMBERED_S:
            setback = Setback(at_s=now_s)
        setback.at_s = now_s
        self._setbacks[member_id] = setback
        if len(self._setbacks) > MAX_NAMES_KEPT:
            del self._setbacks[next(iter(self._setbacks))]
        return setback

    @staticmethod
    def _put_off(setback: Setback, count: int, now_s: float) -> None:
        # The exponent is bounded, since the count is not.
        pause_s = min(FIRST_PAUSE_S * PAUSE_GROWTH ** min(count - 1, 10), MAX_PAUSE_S)
        setback.not_before_s = max(setback.not_before_s or 0.0, now_s + pause_s)
