"""Servers that had no memory for a copy: left alone for a while, then asked again."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from shoal_proto.errors import Overloaded
from shoal_server.core.shards.assignments import Holder
from shoal_server.serving.backoff import ExponentialBackOff

log = structlog.get_logger(__name__)

LONGEST = 8
"""Times the first pause."""


@dataclass(slots=True)
class _Full:
    reason: str
    pauses: ExponentialBackOff
    timer: asyncio.TimerHandle | None = None
    """While it runs, nothing is offered."""


class FullPeers:
    """Lives on the event loop. `offer_again` is called with each holder whose pause is over, and
    tells whether there is anything to offer to it."""

    def __init__(self, first_pause_s: float, offer_again: Callable[[Holder], bool]) -> None:
        self._first_pause_s = first_pause_s
        self._offer_again = offer_again
        self._full: dict[Holder, _Full] = {}

    def close(self) -> None:
        """Ask nobody any more."""
        for full in self._full.values():
            if full.timer is not None:
                full.timer.cancel()

    @property
    def reasons(self) -> Mapping[Holder, str]:
        """What each of them said last."""
        return {holder: full.reason for holder, full in self._full.items()}

    def is_full(self, holder: Holder) -> bool:
        """Whether it is to be left alone for now."""
        full = self._full.get(holder)
        return full is not None and full.timer is not None

    def refused(self, holder: Holder, error: Overloaded) -> None:
        """It had no room; what was on its way to it meanwhile makes no pause longer."""
        full = self._full.get(holder)
        if full is None:
            pauses = ExponentialBackOff(self._first_pause_s, LONGEST * self._first_pause_s)
            full = self._full[holder] = _Full(str(error), pauses)
            log.warning(
                "copies_refused",
                server=holder.server_id,
                why=str(error),
                again_in_s=self._first_pause_s,
            )
        full.reason = str(error)
        if full.timer is None:
            loop = asyncio.get_running_loop()
            full.timer = loop.call_later(full.pauses.next_s(), self._pause_over, holder)

    def took(self, holder: Holder) -> None:
        """It has taken a copy."""
        full = self._full.get(holder)
        # One that was sent before the refusal says nothing.
        if full is not None and full.timer is None:
            self.forget(holder)
            log.info("copies_taken_again", server=holder.server_id)

    def forget(self, holder: Holder) -> None:
        """It is gone, or has room."""
        full = self._full.pop(holder, None)
        if full is not None and full.timer is not None:
            full.timer.cancel()

    def _pause_over(self, holder: Holder) -> None:
        self._full[holder].timer = None
        if not self._offer_again(holder):
            self.forget(holder)
