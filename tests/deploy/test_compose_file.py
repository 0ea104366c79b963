"""docker-compose.yml agrees with itself and with the program; test_compose.py runs it."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.scripts import credentials

from shoal_client.cli import installed_commands, read_config
from shoal_proto.tls import identity

ROOT = Path(__file__).parents[2]
OWN = "/var/lib/shoal/own"


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_all_parts_are_present(compose: dict[str, Any]) -> None:
    """etcd, a coordinator, two parameter servers, three workers, and the service that makes
    certificates."""
    services = compose["services"]
    assert set(services) == {"certs", "etcd", "coordinator", "ps-0", "ps-1", "worker", "shoal"}
    assert services["shoal"]["profiles"] == ["tools"], "not started with the others"
    assert services["worker"]["scale"] == 3


def test_commands_parse(compose: dict[str, Any], tmp_path: Path) -> None:
    """The program itself parses each flag; servers advertise the name of their service."""
    assert credentials.main(["files", f"--to={tmp_path}"]) == 0
    for name in ("coordinator", "ps-0", "ps-1"):
        command = compose["services"][name]["command"]
        folder = tmp_path / ("server" if name.startswith("ps") else name)
        options = read_config([*command, f"--tls={folder}"], installed_commands())
        assert options.advertise.split(":")[0] == name
        assert f"0.0.0.0:{options.advertise.split(':')[1]}" == options.listen
        assert f"--etcd=etcd:{etcd_port(compose)}" in command


def etcd_port(compose: dict[str, Any]) -> str:
    command = compose["services"]["etcd"]["command"]
    flags = dict(flag.split("=", 1) for flag in command if "=" in flag)
    port: str = flags["--advertise-client-urls"].rpartition(":")[2]
    return port


def test_every_service_is_checked(compose: dict[str, Any]) -> None:
    """Services have a health check, and wait until those that they need are healthy."""
    for name, service in compose["services"].items():
        assert name == "shoal" or service["healthcheck"]["test"]
        for condition in service.get("depends_on", {}).values():
            assert condition == {"condition": "service_healthy"}
    assert set(compose["services"]["worker"]["depends_on"]) == {"coordinator", "ps-0", "ps-1"}


def test_workers_are_restarted_only_if_they_fail(compose: dict[str, Any]) -> None:
    """A worker that finished is not started again; all others are; all have time to stop."""
    for name, service in compose["services"].items():
        restarts = {"worker": "on-failure:3", "shoal": "no"}
        assert service["restart"] == restarts.get(name, "unless-stopped")
        assert service["stop_grace_period"]


def test_the_worker_is_started_by_shoal_run(compose: dict[str, Any]) -> None:
    """The command has the job's own settings, the container's name, and time to drain."""
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
    """The value of `${NAME:-value}` in Compose if the name is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(setting))


def test_each_role_has_one_image_and_no_privileges(compose: dict[str, Any]) -> None:
    """Images are built by one service each, from the lock of their role, and services have no
    privileges."""
    built = {s["image"]: s["build"] for s in compose["services"].values() if "build" in s}
    assert sum("build" in service for service in compose["services"].values()) == len(built)
    assert {service["image"] for service in compose["services"].values()} == set(built)
    for image, build in built.items():
        assert re.fullmatch(r"\$\{SHOAL_IMAGES:-shoal\}/\S+:\$\{SHOAL_TAG:-dev\}", image)
        role = re.fullmatch(r"shoal/(\w+):dev", _by_default(image))
        assert role is not None
        lock = _by_default(build["args"].get("LOCK", ""))
        assert role[1] == (lock or build["target"])
        if lock == "worker":  # with another lock it is another image, as in Kubernetes
            assert f"/{build['args']['LOCK']}:" in image
        assert not lock or (ROOT / "deploy" / "locks" / f"{lock}.x86_64.txt").exists()
    for service in compose["services"].values():
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_the_page_is_for_this_machine_only(compose: dict[str, Any]) -> None:
    """The status page alone is published, on the loopback address."""
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if "ports" in service
    }
    assert published == {"coordinator": ["127.0.0.1:${SHOAL_HTTP_PORT:-7780}:7780"]}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The path at which each volume is mounted, with its mode."""
    split = [entry.split(":") for entry in service.get("volumes", ())]
    return {volume: ":".join(rest) for volume, *rest in split}


def test_every_part_uses_tls_with_its_own_files(compose: dict[str, Any]) -> None:
    """Parts never use --insecure. Each mounts only the certificates of its role, read-only. The
    authority's key is only in `certs`, which has no network."""
    services = compose["services"]
    words = [word for service in services.values() for word in service.get("command", ())]
    assert not [word for word in words if "insecure" in word]
    parts = credentials.parts()
    roles = {"etcd": "etcd", "coordinator": "coordinator", "worker": "worker"}
    roles |= {"ps-0": "server", "ps-1": "server", "shoal": "operator"}
    assert set(roles) == set(services) - {"certs"}
    for name, role in roles.items():
        assert mounts(services[name]).pop(role) == f"{OWN}:ro"
        assert not set(mounts(services[name])) & (set(parts) | {"authority"}) - {role}
        if name != "etcd":
            assert services[name]["environment"]["SHOAL_TLS"] == OWN
    assert services["certs"]["network_mode"] == "none"
    options = credentials.build_parser().parse_args(
        [_by_default(word) for word in services["certs"]["command"]]
    )
    assert options.give is credentials.to_folders
    assert 2 * options.every <= options.valid
    assert mounts(services["certs"]) == {
        name: f"{options.to}/{name}" for name in (*parts, credentials.AUTHORITY)
    }


def test_each_part_uses_the_files_that_it_is_given(compose: dict[str, Any], tmp_path: Path) -> None:
    """Files that a command names, and the certificate that it uses, belong to its part."""
    command = [_by_default(word) for word in compose["services"]["certs"]["command"]]
    once = [word for word in command if "--to" not in word and "--every" not in word]
    assert credentials.main([*once, f"--to={tmp_path}"]) == 0
    for name, role in (("coordinator", "coordinator"), ("ps-0", "server"), ("ps-1", "server")):
        words = compose["services"][name]["command"]
        assert "https://" not in " ".join(words)
        folder = str(tmp_path / role)
        with identity.using(None):
            options = read_config(
                [*(word.replace(OWN, folder) for word in words), f"--tls={folder}"],
                installed_commands(),
            )
            assert options.reach.files.cert == tmp_path / role / f"{role}.crt"
            assert options.etcd.cert_file.exists()
    etcd = compose["services"]["etcd"]["command"]
    named = {word.split("=", 1)[1] for word in etcd if OWN in word}
    assert {Path(path).name for path in named} == {
        path.name for path in (tmp_path / "etcd").iterdir()
    }
    for part, files in credentials.parts().items():
        found = list((tmp_path / part).iterdir())
        assert {path.name for path in found} == set(files)
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600}


def test_the_build_gets_only_the_files_that_it_copies(compose: dict[str, Any]) -> None:
    """Files that the Dockerfile copies from the checkout enter the build; those of git do not."""
    admitted = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    dockerfile = (ROOT / compose["services"]["coordinator"]["build"]["dockerfile"]).read_text()
    copies = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY ")]
    sources = {item.rstrip("/") for copy in copies if "--from" not in copy[0] for item in copy}
    locks = {source for source in sources if source.startswith("deploy/locks/")}
    assert locks == {"deploy/locks/build.*.txt", "deploy/locks/${LOCK}.*.txt"}
    sources = sources - locks | {"deploy/locks"}
    assert sources == admitted
    assert all((ROOT / source).exists() for source in sources)
    for script in (each for each in sources if each.startswith("deploy/") and each.endswith(".py")):
        assert os.access(ROOT / script, os.X_OK), "it is copied as it is"


def test_the_build_names_no_package_index(compose: dict[str, Any]) -> None:
    """An index comes from pip's own configuration and from build arguments, which compose passes on
    if they are set."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "://" not in dockerfile
    passed = compose["services"]["coordinator"]["build"]["args"]
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
        assert f"\nARG {name}\n" in dockerfile, "without a default"
    assert passed["PIP_INDEX_URL"] is passed["PIP_TRUSTED_HOST"] is None
    # The index of torch without CUDA: the builds in the locks `server` and `worker` are only there.
    assert "download.pytorch.org" in passed["PIP_EXTRA_INDEX_URL"]
