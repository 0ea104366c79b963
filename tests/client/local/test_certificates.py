"""Certificates of a local cluster, which are renewed while it runs."""

import errno
import threading
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal_client.certificates import authority, folder
from shoal_client.local import access
from shoal_client.local.access import LocalAccess

DEADLINE_S = 30.0


def test_certificates_are_renewed_though_a_failure_cannot_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk with certificates and messages is full, and has room again later."""
    monkeypatch.setattr(access, "RENEW_EVERY", timedelta(0))
    monkeypatch.setattr(folder, "LOOK_EVERY_S", 0.001)
    renewed = threading.Event()
    is_full = True

    def say(text: str) -> None:
        nonlocal is_full
        is_full = False
        raise OSError(errno.ENOSPC, "No space left on device")

    class Folder(access.CertificateFolder):
        def renew(self) -> list[Path]:
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            renewed.set()
            return []

    monkeypatch.setattr(access, "CertificateFolder", Folder)
    local = LocalAccess({}, made=tmp_path / "certs", say=say)
    local.make()
    try:
        assert renewed.wait(DEADLINE_S)
    finally:
        local.close()


class Ahead(datetime):
    """A clock that is a year ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Ahead":
        return super().now(tz) + timedelta(days=365)


def test_certificates_are_renewed_up_to_the_end_of_their_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be valid for ten further years."""
    made = folder.CertificateFolder(tmp_path / "certs")
    made.init(authority.MAX_VALID)
    monkeypatch.setattr(authority, "datetime", Ahead)
    made.renew()
    ends = {
        authority.read(path.read_bytes()).not_valid_after_utc for path in made.path.glob("*.crt")
    }
    assert len(ends) == 1


def test_an_authority_made_while_the_clock_was_ahead_is_valid_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewed certificates would be of no use under an authority that is not valid yet."""

    made = folder.CertificateFolder(tmp_path / "certs")
    with monkeypatch.context() as patched:
        patched.setattr(authority, "datetime", Ahead)
        made.init()
    made.renew()
    for path in made.path.glob("*.crt"):
        found = authority.read(path.read_bytes())
        assert found.not_valid_before_utc < datetime.now(UTC) < found.not_valid_after_utc


def test_certificates_are_renewed_once_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Certificates of a host whose clock was ahead are valid later only: connections are
    refused."""
    hour_s = 3600.0
    clock_s = 100 * hour_s
    steps_s = iter([60.0, -60.0, -10 * hour_s, *[60.0] * 4])
    renewed_at_s = []

    def wait(seconds: float) -> bool:
        nonlocal clock_s
        step_s = next(steps_s, None)
        clock_s += step_s or 0.0
        return step_s is None

    monkeypatch.setattr(folder, "time", SimpleNamespace(time=lambda: clock_s))
    folder.keep_renewed(
        lambda: renewed_at_s.append(clock_s), timedelta(hours=8), wait=wait, say=print
    )
    assert renewed_at_s == [90 * hour_s]
