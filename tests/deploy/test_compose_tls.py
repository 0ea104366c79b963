"""`deploy/compose-tls.yml` over the compose file: every part speaks TLS."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_client.cli import installed_commands, parse, read_config
from shoal_proto.tls import identity

ROOT = Path(__file__).parents[2]
SERVERS = ("coordinator", "ps-0", "ps-1")


@pytest.fixture
def over() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose-tls.yml").read_text())
    return loaded["services"]  # type: ignore[no-any-return]


@pytest.fixture
def below() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded["services"]  # type: ignore[no-any-return]


def test_it_changes_nothing_but_tls(over: dict[str, Any], below: dict[str, Any]) -> None:
    assert set(over) - set(below) == {"certs"}
    for name in SERVERS:
        assert over[name]["command"] == [a for a in below[name]["command"] if a != "--insecure"]
        assert over[name]["depends_on"] == {
            **below[name]["depends_on"],
            "certs": {"condition": "service_healthy"},
        }
    for name in ("coordinator", "worker"):
        (http,) = re.findall(
            r"https?://\S+?(?=[\"']|$)", " ".join(below[name]["healthcheck"]["test"])
        )
        (https,) = re.findall(
            r"https?://\S+?(?=[\"']|$)", " ".join(over[name]["healthcheck"]["test"])
        )
        assert https == http.replace("http://", "https://")


def test_the_certificates_that_it_makes_are_those_that_its_parts_take(
    over: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of the file themselves, with the folder elsewhere."""
    folder = over["certs"]["environment"]["SHOAL_TLS"]
    for service in over.values():
        assert service["environment"]["SHOAL_TLS"] == folder
        (mount,) = service["volumes"]
        assert Path(folder).parent == Path(mount.split(":")[1])
        assert mount.endswith(":ro") or service is over["certs"]
    monkeypatch.setenv("SHOAL_TLS", str(tmp_path / "certs"))
    script = over["certs"]["entrypoint"][-1]
    init, renew = (part.removeprefix("exec ").split()[1:] for part in script.split(" && "))
    assert parse(init)() == 0
    assert parse(init)() == 0, "started again, it renews"
    assert read_config(renew, installed_commands()).every_h > 0
    for name in SERVERS:
        with identity.using(None):
            parse(over[name]["command"])
            own = identity.own()
        assert own is not None
        assert own.files.cert.stem == ("server" if name.startswith("ps") else name)


def test_the_probe_needs_the_viewers_certificate(tmp_path: Path) -> None:
    """Without the folder it says what is missing."""
    environment = {key: text for key, text in os.environ.items() if key != "SHOAL_TLS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy/probe.py"), "http", "https://127.0.0.1:1/readyz"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1 and "SHOAL_TLS" in done.stderr
