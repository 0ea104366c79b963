"""A name whose address changes, as that of a pod that is replaced."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.network.ports import free_port

SCRIPT = Path(__file__).with_name("moved_name.py")
WITHIN_S = 15.0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_the_new_address_of_a_name_is_found_within_seconds(tmp_path: Path) -> None:
    """The default of gRPC would use the old one for half a minute."""
    hosts = tmp_path / "hosts"
    hosts.touch()
    own = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    command = (sys.executable, str(SCRIPT), "/etc/hosts", str(free_port()))
    done = subprocess.run(
        ("unshare", "--mount", "sh", "-c", own, "sh", *command),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < WITHIN_S
