"""docker-compose.yml agrees with itself and with the program; test_compose.py runs it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_client.cli import installed_commands, read_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_parts_are_there(compose: dict[str, Any]) -> None:
    """etcd, a coordinator, two parameter servers, three workers."""
    services = compose["services"]
    assert set(services) == {"etcd", "coordinator", "ps-0", "ps-1", "worker"}
    assert services["worker"]["scale"] == 3


def test_commands_parse(compose: dict[str, Any]) -> None:
    """The program itself understands each flag; servers advertise the name of their service."""
    for name in ("coordinator", "ps-0", "ps-1"):
        options = read_config(compose["services"][name]["command"], installed_commands())
        assert options.advertise.split(":")[0] == name
        assert f"0.0.0.0:{options.advertise.split(':')[1]}" == options.listen
        assert f"--etcd=etcd:{etcd_port(compose)}" in compose["services"][name]["command"]


def etcd_port(compose: dict[str, Any]) -> str:
    flags = dict(flag.split("=", 1) for flag in compose["services"]["etcd"]["command"])
    port: str = flags["--advertise-client-urls"].rpartition(":")[2]
    return port


def test_every_service_is_checked(compose: dict[str, Any]) -> None:
    """Each service has a health check, and waits until those that it needs are healthy."""
    for service in compose["services"].values():
        assert service["healthcheck"]["test"]
        for condition in service.get("depends_on", {}).values():
            assert condition == {"condition": "service_healthy"}
    assert set(compose["services"]["worker"]["depends_on"]) == {"coordinator", "ps-0", "ps-1"}


def test_workers_come_back_when_they_fail_only(compose: dict[str, Any]) -> None:
    """A worker that finished stays away; all others are kept up; all have time to stop."""
    for name, service in compose["services"].items():
        assert service["restart"] == ("on-failure:3" if name == "worker" else "unless-stopped")
        assert service["stop_grace_period"]


def test_the_worker_is_started_by_shoal_run(compose: dict[str, Any]) -> None:
    """With the job's own settings, under the container's name, and with time to drain."""
    worker = compose["services"]["worker"]
    shell, _, script, _ = worker["entrypoint"]
    assert shell == "sh"
    setting, execute, *command = shlex.split(script.replace("$$", "$"))
    assert setting == "SHOAL_MEMBER_ID=$HOSTNAME"
    assert [execute, command[0]] == ["exec", "shoal"]
    settings = {name: _by_default(value) for name, value in worker["environment"].items()}
    words = [*command[1:-1], *worker["command"]]
    options = [re.sub(r"\$([A-Z_]+)$", lambda match: settings[match[1]], each) for each in words]
    run = read_config(options, installed_commands())
    assert run.job == settings["SHOAL_JOB"]
    bounds = (run.min_members, run.desired_members, run.max_members)
    names = ("SHOAL_MIN_MEMBERS", "SHOAL_DESIRED_MEMBERS", "SHOAL_MAX_MEMBERS")
    assert bounds == tuple(int(settings[name]) for name in names)
    assert run.target[:2] == ("-m", "shoal.demo.digits")
    assert run.restart.grace_s + 10 <= float(worker["stop_grace_period"].removesuffix("s"))


def _by_default(setting: str) -> str:
    """What Compose makes of `${NAME:-value}` where the name is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(setting))


def test_one_image_and_no_privileges(compose: dict[str, Any]) -> None:
    """All run the image that the coordinator's service builds, with nothing they do not need."""
    assert len({service["image"] for service in compose["services"].values()}) == 1
    assert [name for name, service in compose["services"].items() if "build" in service] == [
        "coordinator"
    ]
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_the_page_is_for_this_machine_only(compose: dict[str, Any]) -> None:
    """Only the status page is published, and only on the loopback address."""
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if "ports" in service
    }
    assert published == {"coordinator": ["127.0.0.1:${SHOAL_HTTP_PORT:-7780}:7780"]}


def test_ignored_by_the_build(compose: dict[str, Any]) -> None:
    """What the Dockerfile copies from the checkout enters the build; git's files do not."""
    admitted = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    dockerfile = (ROOT / compose["services"]["coordinator"]["build"]["dockerfile"]).read_text()
    copies = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY ")]
    sources = {item.rstrip("/") for copy in copies if "--from" not in copy[0] for item in copy}
    assert sources == admitted
    assert all((ROOT / source).exists() for source in sources)


def test_the_build_names_no_package_index(compose: dict[str, Any]) -> None:
    """pip's own configuration and build arguments do, which compose passes on if they are set."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "://" not in dockerfile
    passed = compose["services"]["coordinator"]["build"]["args"]
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
        assert f"\nARG {name}\n" in dockerfile, "without a default"
        assert passed[name] is None
