"""Commands on hosts, and what ssh tells them of its connection."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_client.remote.ssh import (
    LOCALHOST,
    SSH_OPTIONS,
    command_on,
    connection_addresses,
)

SHOW = "from shoal_client.remote.ssh import connection_addresses as a; print(*a())"


def test_a_command_on_localhost_has_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own login says nothing about the hosts of a run."""
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.7 50000 10.0.0.1 22")
    command = command_on(LOCALHOST, (sys.executable, "-c", SHOW))
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_a_shared_connection_is_not_used(tmp_path: Path) -> None:
    """Through the user's master connection, ssh would not notice that the host is cut off."""
    config = tmp_path / "config"
    config.write_text("ControlMaster auto\nControlPath ~/.ssh/%C\nControlPersist 1h\n")

    def settings(*options: str) -> str:
        command = ("ssh", "-F", str(config), *options, "-G", "host")
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "\ncontrolpath " in settings()
    assert "\ncontrolpath " not in settings(*SSH_OPTIONS)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("203.0.113.7 50000 10.0.0.1 22", ("203.0.113.7", "10.0.0.1")),
        ("fd00::7 50000 fd00::1 22", ("fd00::7", "fd00::1")),
        ("UNKNOWN 65535 UNKNOWN 65535", ("", "")),
        ("", ("", "")),
    ],
)
def test_the_addresses_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, text: str, addresses: tuple[str, str]
) -> None:
    """An sshd behind a ProxyCommand or a vsock has no addresses."""
    monkeypatch.setenv("SSH_CONNECTION", text)
    assert connection_addresses() == addresses
