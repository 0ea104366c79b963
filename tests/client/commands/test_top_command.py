"""`shoal top` as it refreshes its screen."""

import sys
import time
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.clusters.status_world import World

from shoal_client.cli import parse
from shoal_client.commands import status, top
from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import StatusClient
from shoal_client.commands.top import TopConfig
from shoal_proto.errors import Unavailable

HOME = "\x1b[H"


def test_an_error_is_shown_once_above_the_newest_table(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one refresh after the other fails."""
    terminal = Console(file=StringIO(), force_terminal=True, width=100, height=20)
    refreshes = iter(range(3))

    def meanwhile(seconds: float) -> None:
        if next(refreshes, None) is None:
            raise KeyboardInterrupt

    def no_answer(client: StatusClient) -> None:
        raise Unavailable("nobody leads")

    def first_answer(client: StatusClient) -> object:
        answer = jobs(client)
        monkeypatch.setattr(StatusClient, "jobs", no_answer)
        return answer

    jobs = StatusClient.jobs
    monkeypatch.setattr(StatusClient, "jobs", first_answer)
    monkeypatch.setattr(top, "Console", lambda **options: terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=meanwhile))
    with pytest.raises(KeyboardInterrupt):
        top.top(TopConfig(address=StatusAddress(http=url)))
    assert isinstance(terminal.file, StringIO)
    screens = [each for each in terminal.file.getvalue().split(HOME) if "jobs that have" in each]
    assert screens[-1].count("nobody leads") == 1
    assert "digits" in screens[-1]


def test_output_to_a_pipe_is_printed_once(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with FORCE_COLOR, which systems for continuous integration set."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(top, "time", SimpleNamespace())
    assert top.top(TopConfig(address=StatusAddress(http=url))) == 0
    assert "digits" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["top --once --job digits", "status --job digits"])
def test_ages_do_not_depend_on_the_clock_of_this_host(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The coordinator sends its own time with its answer."""
    own = SimpleNamespace(time=lambda: time.time() + 8 * 3600, monotonic=time.monotonic)
    monkeypatch.setattr(status, "time", own)
    monkeypatch.setenv("COLUMNS", "200")
    assert parse([*command.split(), "--http", url])() == 0
    shown = capsys.readouterr().out
    assert "w0" in shown and "8 h" not in shown
