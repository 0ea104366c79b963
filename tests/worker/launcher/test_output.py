"""Output that cannot be printed ends no training."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.launcher.output import ReaderGone, WorkerOutput, say
from shoal_client import cli


@contextmanager
def open_at(descriptor: int) -> Iterator[io.TextIOWrapper]:
    """Open a stream that loses nothing without an error, also when it is closed."""
    stream = os.fdopen(descriptor, "w")
    yield stream
    stream.close()


@pytest.fixture
def noted() -> list[ReaderGone]:
    return []


@pytest.fixture
def output(noted: list[ReaderGone]) -> WorkerOutput:
    return WorkerOutput(noted.append)


def test_lines_for_a_full_disk_are_lost(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: WorkerOutput,
    noted: list[ReaderGone],
) -> None:
    """One message says so."""
    with open_at(os.open("/dev/full", os.O_WRONLY)) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        output.print("first")
        output.print("second")
    assert noted == []
    assert capsys.readouterr().err == (
        "shoal run: workers' output is no longer printed: No space left on device."
        " `shoal logs` shows it.\n"
    )


def test_a_reader_that_is_gone_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, output: WorkerOutput, noted: list[ReaderGone]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open_at(writing) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        output.print("first")
        output.print("second")
    assert noted == [ReaderGone()]


def test_messages_for_a_full_disk_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_at(os.open("/dev/full", os.O_WRONLY)) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        say("first")
        say("second")


def test_characters_that_the_terminal_does_not_have_are_replaced(
    monkeypatch: pytest.MonkeyPatch, output: WorkerOutput
) -> None:
    """A worker under a Latin-1 locale may print bytes that are not UTF-8."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))

    def run() -> int:
        output.print(b"caf\xe9".decode("utf-8", "replace"))
        return 0

    monkeypatch.setattr(cli, "parse", lambda given: run)
    assert cli.main(["run"]) == 0
    assert shown.getvalue() == b"caf?\n"
