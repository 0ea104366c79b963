"""Commands on hosts, and what ssh tells them of its connection."""

import subprocess
import sys

import pytest

from shoal_client.remote.ssh import LOCALHOST, command_on, connection_addresses

SHOW = "from shoal_client.remote.ssh import connection_addresses as a; print(*a())"


def test_a_command_on_localhost_has_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own login says nothing about the hosts of a run."""
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.7 50000 10.0.0.1 22")
    command = command_on(LOCALHOST, (sys.executable, "-c", SHOW))
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


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
