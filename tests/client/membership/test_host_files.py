"""Answers that the processes of one host share: each is requested once."""

import threading
from pathlib import Path

import pytest

from shoal_client.membership.host_files import MAX_FILES, HostFiles, locked

ASKED = "job 3 0 1"


def values(directory: Path, wait_s: float = 10.0) -> HostFiles:
    return HostFiles(directory / "values", threading.Event(), wait_s)


def refuse() -> bytes:
    raise AssertionError("asked for what is there")


def test_a_later_process_reads_the_stored_answer(tmp_path: Path) -> None:
    assert values(tmp_path).get(ASKED, lambda: b"all") == b"all"
    assert values(tmp_path).get(ASKED, refuse) == b"all"
    assert values(tmp_path).get(f"{ASKED} 2", lambda: b"more") == b"more"


def test_an_incomplete_answer_is_requested_again(tmp_path: Path) -> None:
    values(tmp_path).get(ASKED, lambda: b"all")
    (kept,) = (path for path in (tmp_path / "values").iterdir() if path.name != "lock")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert values(tmp_path).get(ASKED, lambda: b"again") == b"again"


def test_a_halted_requester_is_not_awaited(tmp_path: Path) -> None:
    values(tmp_path).get("another", lambda: b"")
    with locked(tmp_path / "values", threading.Event(), 10.0):
        assert values(tmp_path, wait_s=0.1).get(ASKED, lambda: b"own") == b"own"


def test_a_failed_request_is_not_shared(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        values(tmp_path).get(ASKED, fail)
    assert values(tmp_path).get(ASKED, lambda: b"all") == b"all"


def test_without_a_directory_each_process_requests_the_answer(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert values(gone).get(ASKED, lambda: b"all") == b"all"


def test_only_a_few_answers_are_kept(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 4):
        values(tmp_path).get(str(number), lambda: b"all")
    assert len(list((tmp_path / "values").iterdir())) == MAX_FILES + 1
