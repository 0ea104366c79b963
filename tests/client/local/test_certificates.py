"""Certificates of a local cluster, which are renewed while it runs."""

import errno
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from shoal_client.certificates import folder
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
