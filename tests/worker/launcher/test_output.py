"""Output that cannot be printed ends no training."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.launcher.output import ReaderGone, WorkerOutput, say
from shoal_client import cli

DEADLINE_S = 60.0
MESSAGE_S = 5.0
"""Time for a message on a busy machine; the test waits for as long only if it fails."""


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
    """A single message reports the error."""
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


def test_messages_are_printed_again_once_the_disk_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the message that could not be written is lost."""
    full = os.open("/dev/full", os.O_WRONLY)
    shown = tmp_path / "stderr"
    with shown.open("w") as stderr:
        disk = os.dup(stderr.fileno())
        monkeypatch.setattr(sys, "stderr", stderr)
        os.dup2(full, stderr.fileno())
        say("first")
        os.dup2(disk, stderr.fileno())
        say("second")
    assert shown.read_text() == "shoal run: second\n"
    os.close(full)
    os.close(disk)


def test_a_reader_that_pauses_delays_no_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: WorkerOutput
) -> None:
    """`shoal run | less` may wait for a key, while Ctrl-C must be passed on."""
    is_writing, goes_on = threading.Event(), threading.Event()

    class PausedPipe(io.StringIO):
        def write(self, text: str) -> int:
            is_writing.set()
            assert goes_on.wait(DEADLINE_S)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", PausedPipe())
    printing = threading.Thread(target=output.print, args=("line",), daemon=True)
    saying = threading.Thread(target=say, args=("message",), daemon=True)
    printing.start()
    assert is_writing.wait(DEADLINE_S)
    saying.start()
    saying.join(MESSAGE_S)
    shown = capsys.readouterr().err
    goes_on.set()
    for thread in (printing, saying):
        thread.join(DEADLINE_S)
    assert shown == "shoal run: message\n"


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
