"""Output that cannot be printed ends no training."""

import fcntl
import io
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.launcher import output as module
from shoal.launcher.output import ReaderGone, WorkerOutput, say
from shoal_client import cli

DEADLINE_S = 60.0


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
        with output:
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
        with output:
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


def test_a_reader_that_pauses_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: WorkerOutput
) -> None:
    """`shoal run | less` may wait for a key: memory is bounded, messages are shown, and the reader
    gets the earlier lines in order once it goes on."""
    monkeypatch.setattr(module, "PAUSED_S", 1.0)
    monkeypatch.setattr(module, "MAX_WAITING", 20_000)
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as reader, open(reading) as shown:  # noqa: PTH123 - a descriptor
        with open_at(writing) as stdout, output:
            monkeypatch.setattr(sys, "stdout", stdout)
            for number in range(20_000):
                output.print(f"{number:08}")
            say("message")
            assert capsys.readouterr().err == "shoal run: message\n"
            lines = reader.submit(shown.readlines)
            said, give_up_s = "", time.monotonic() + DEADLINE_S
            while not said.endswith("\n") and time.monotonic() < give_up_s:
                said += capsys.readouterr().err
            output.print("last")
        *printed, last = lines.result(DEADLINE_S)
    assert last == "last\n"
    assert printed == [f"{number:08}\n" for number in range(len(printed))]
    num_lost = 20_000 - len(printed)
    assert num_lost > 0
    assert said == (
        f"shoal run: the reader of stdout paused: {num_lost} of the workers' lines were not"
        " printed. `shoal logs` shows them.\n"
    )


def test_the_launcher_waits_once_for_a_reader_that_pauses(
    monkeypatch: pytest.MonkeyPatch, output: WorkerOutput
) -> None:
    """Restarts of many workers, and a second Ctrl-C, must not wait for it one after the other."""
    monkeypatch.setattr(module, "OUTPUT_S", 1.0)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open_at(writing) as stdout, output:
        monkeypatch.setattr(sys, "stdout", stdout)
        output.print("x" * 10_000)
        began_s = time.monotonic()
        for _ in range(20):
            output.flush()
        assert time.monotonic() - began_s < 10.0
        os.close(reading)


def test_a_stream_without_a_descriptor_gets_the_lines(
    monkeypatch: pytest.MonkeyPatch, output: WorkerOutput
) -> None:
    """A test's, or a notebook's."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    with output:
        output.print("line")
    assert shown.getvalue() == "line\n"


def test_a_slow_reader_gets_every_line(
    monkeypatch: pytest.MonkeyPatch, output: WorkerOutput
) -> None:
    """Workers wait for it, and so does the end of the run."""
    monkeypatch.setattr(module, "MAX_WAITING", 1000)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    texts = [f"{number:08}" for number in range(5000)]
    with ThreadPoolExecutor(1) as reader, open(reading) as shown:  # noqa: PTH123
        with open_at(writing) as stdout, output:
            monkeypatch.setattr(sys, "stdout", stdout)
            lines = reader.submit(shown.read)
            for text in texts:
                output.print(text)
        assert lines.result(DEADLINE_S).splitlines() == texts


def test_characters_that_the_terminal_does_not_have_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: WorkerOutput
) -> None:
    """A worker under a Latin-1 locale may print bytes that are not UTF-8."""

    def run() -> int:
        with output:
            output.print(b"caf\xe9".decode("utf-8", "replace"))
        return 0

    monkeypatch.setattr(cli, "parse", lambda given: run)
    shown = tmp_path / "stdout"
    with shown.open("w", encoding="latin-1") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["run"]) == 0
    assert shown.read_bytes() == b"caf?\n"
