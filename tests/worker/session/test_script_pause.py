"""The pause of a script that fails to begin."""

from typing import Any

import pytest

from shoal.session.session import ScriptPause


class Controller:
    """A controller whose first pause fails, as if its strategy could not rest."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self, reason: str, limit_s: float) -> None:
        self.calls.append(reason)
        if len(self.calls) == 1:
            raise ConnectionError("no server")

    def resume(self) -> None:
        self.calls.append("resumed")


def test_a_pause_that_could_not_begin_is_no_pause() -> None:
    """The next one begins, nested in nothing, and an evaluation still suspends hang detection."""
    controller: Any = Controller()
    pause = ScriptPause(controller)
    with pytest.raises(ConnectionError), pause.hold("first", 1.0):
        raise AssertionError("the block ran")
    with pause.hold_unless_paused("second", 1.0):
        assert pause.is_on
    assert controller.calls == ["first", "second", "resumed"]
    assert not pause.is_on
