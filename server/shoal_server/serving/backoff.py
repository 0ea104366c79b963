"""Pauses between attempts."""

import asyncio


class ExponentialBackOff:
    """Each pause is twice the last one, from `first_s` up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float | None = None) -> None:
        """Without `longest_s` every pause is as long as the first."""
        self._first_s = first_s
        self._longest_s = first_s if longest_s is None else longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """An attempt came to something: the next pause is the first one again."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """The length of the pause that is due now."""
        due_s = self._next_s
        self._next_s = min(2 * due_s, self._longest_s)
        return due_s

    async def pause(self) -> None:
        """Wait for that long."""
        await asyncio.sleep(self.next_s())
