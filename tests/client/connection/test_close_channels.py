"""Closing of channels: a channel that hangs delays the end of a worker only up to a bound."""

import threading
import time

import pytest

from shoal_client.connection.coordinators import CLOSE_WITHIN_S, close_channels


class Channel:
    """A channel that closes once `end` is set."""

    def __init__(self, end: threading.Event) -> None:
        self._end = end
        self.closed = threading.Event()

    def close(self) -> None:
        self._end.wait()
        self.closed.set()


def test_a_channel_that_does_not_close_is_waited_for_up_to_a_bound() -> None:
    """The other channels are closed, and the call returns within the bound."""
    never, at_once = threading.Event(), threading.Event()
    at_once.set()
    stuck, good = Channel(never), Channel(at_once)
    began_s = time.monotonic()
    try:
        close_channels([stuck, good])
        assert CLOSE_WITHIN_S <= time.monotonic() - began_s < CLOSE_WITHIN_S + 5
        assert good.closed.is_set()
        assert not stuck.closed.is_set()
    finally:
        never.set()


def test_channels_are_closed_when_the_call_returns() -> None:
    """The call waits for channels that can be closed."""
    at_once = threading.Event()
    at_once.set()
    channels = [Channel(at_once), Channel(at_once)]
    close_channels(channels)
    assert all(channel.closed.is_set() for channel in channels)


def test_channels_are_closed_without_a_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread once the script has ended, and publications end later."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    at_once = threading.Event()
    at_once.set()
    channels = [Channel(at_once), Channel(at_once)]
    monkeypatch.setattr(threading.Thread, "start", refuse)
    close_channels(channels)
    assert all(channel.closed.is_set() for channel in channels)
