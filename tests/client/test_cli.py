"""The command line as a whole: help, wrong arguments, refusals, and completion."""

import dataclasses
import errno
import importlib.util
import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import structlog
from cyclopts import Parameter
from support.processes.load import unhurried

from shoal.launcher.run_config import RunConfig
from shoal_client import cli
from shoal_client.cli import build_app, installed_commands, main, parse

COMMANDS = sorted(installed_commands())


def _loaded(reference: str) -> object:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _options(config: type) -> list[tuple[str, object]]:
    """Options and defaults of the fields of a config, and of the configs nested in it."""
    found: list[tuple[str, object]] = []
    hints = get_type_hints(config, include_extras=True)
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        marks = [each for each in get_args(hint) if isinstance(each, Parameter)]
        if any(each.parse is False or each.show is False for each in marks):
            continue
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        names = [name for each in marks for name in each.name or ()]
        inner = [each for each in (kind, *get_args(kind)) if dataclasses.is_dataclass(each)]
        if inner and not any(name.startswith("--") for name in names):
            assert isinstance(inner[0], type)
            found += [
                (option, None if field.default is None else default)
                for option, default in _options(inner[0])
            ]
            continue
        option = names[0] if names else f"--{field.name.replace('_', '-')}"
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append((option, default))
    return found


@pytest.mark.sampled()
@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_with_its_default(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of the config are the options, and their defaults stand only in the config."""
    monkeypatch.setenv("COLUMNS", "600")
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    config = _loaded(installed_commands()[name].config)
    assert isinstance(config, type) and callable(_loaded(installed_commands()[name].run))
    for option, default in _options(config):
        # Texts of other options may name this one.
        named = [line for line in lines[1:] if option in line.split()]
        shown = min(named, key=lambda line: line.index(option))
        text = shown.strip().split("  ")[-1]
        assert len(text) > 10, f"{option} says nothing: {shown}"
        if default is dataclasses.MISSING:
            assert "[required]" in shown
        elif default not in (None, "", (), False) or isinstance(default, float):
            value = f"{default:g}" if isinstance(default, float) else default
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert f"[default: {value}]" in shown


def shown_by(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_commands_objects_are_frozen_before_it_ends() -> None:
    program = (
        "import atexit, gc; atexit.register(lambda: print('left alone', gc.get_freeze_count()));"
        "from shoal_client.cli import main; main(['--version'])"
    )
    shown = shown_by(program)
    words, _, count = shown.splitlines()[-1].rpartition(" ")
    assert words == "left alone"
    assert int(count) > 10_000


@pytest.mark.long
def test_the_list_of_commands_imports_no_command() -> None:
    """Imports would make `shoal --help` slow."""
    program = (
        "import sys; from shoal_client.cli import main; main(['--help']);"
        "print(sorted({'torch', 'grpc', 'httpx', 'fastapi', 'numpy'} & set(sys.modules)))"
    )
    shown = shown_by(program)
    assert shown.splitlines()[-1] == "[]"
    assert all(name in shown for name in COMMANDS)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["statsu"], 'Did you mean "status"?'),
        (["coordinator", "--heartbeet-s", "1"], "Did you mean --heartbeat-s?"),
        (["run", "--corodinator", "h:1", "train.py"], "Did you mean --coordinator?"),
        (["drain", "--job", "j"], "shoal drain: MEMBER is required\n"),
        (["run"], "SCRIPT is required"),
        (["status", "more"], "unexpected arguments: more"),
        (["ps", "--bulk-port", "many"], "--bulk-port"),
        (["ps", "--bulk-port", "70000"], "bad --bulk-port; saw 70000; expected 0 to 65535"),
        (["ps", "--memory-limit-bytes", "0"], "bad --memory-limit-bytes; saw 0"),
        (["ps", "--silence-s", "0.1"], "bad --silence-s"),
        (["ps", "--id", "a b"], "bad --id"),
        (["coordinator", "--copies", "0"], "bad --copies; saw 0; expected 1 or more"),
        (["coordinator", "--snapshot-keep", "0"], "bad --snapshot-keep"),
        (["coordinator", "--http", "x"], "bad --http; saw 'x'"),
        (["coordinator", "--etcd", "nowhere"], "--etcd: bad etcd endpoint"),
        (["coordinator", "--etcd-password-file", "/none"], "password file cannot be read"),
        (["up", "--prefix", "team"], "bad --prefix; saw 'team'; expected names of letters"),
        (
            ["up", "--insecure", "--http-tokens", "tokens"],
            "--insecure contradicts --http-tokens; saw both",
        ),
        (["up", "--ps", "-1"], "bad --ps; saw -1; expected 0 or more"),
        (["up", "--http-port", "99999"], "bad --http-port; saw 99999; expected 0 to 65535"),
        (["rm", "a b"], "bad name of a job"),
        *[
            ([command, "../x"], "bad name of a job; saw '../x'; expected 1 to 128 letters")
            for command in (
                *("accept-loss", "events", "repair", "restore", "retry", "rm", "snapshot"),
                *("snapshots", "stop", "top", "why"),
            )
        ],
        *[
            ([command, "../x", "--job", "j"], "bad name of a member; saw '../x'")
            for command in ("drain", "logs", "why")
        ],
        *[
            ([command, *member, "--job", "../x"], "bad name of a job; saw '../x'")
            for command, member in (
                *((name, ["m"]) for name in ("drain", "logs", "why")),
                ("status", []),
            )
        ],
        (["why", "x" * 200], "bad name of a job"),
        (["drain", "m", "--job", "j", "--timeout", "0"], "bad --timeout; saw 0; expected above 0"),
        (["snapshot", "j", "--timeout", "-1"], "bad --timeout"),
        (["restore", "j", "--number", "-1"], "bad --number"),
        (["completion", "fish"], '"bash", "zsh"'),
    ],
)
def test_a_bad_argument_gives_one_line_with_the_option(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and the message names the fault; for a mistyped word it has a similar
    one."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--min", "3", "--max", "2", "t.py"], "--min is above --max"),
        (["run", "--min", "2", "t.py"], "fewer workers than --min; saw 1 workers, and --min 2"),
        (["run", "--desired", "5", "--max", "2", "t.py"], "--desired is out of bounds"),
        (["coordinator", "--snapshot-every-s", "5"], "Give --snapshot-url."),
        (["coordinator", "--etcd-user", "me"], "both --etcd-user and --etcd-password-file"),
        (["coordinator", "--etcd-cert", "a"], "both --etcd-cert and --etcd-key"),
        (["config", "--heartbeat-s", "9", "--join-s", "30"], "Raise --join-s"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        (["-n", "2", "train.py", "-n", "4", "--lr=3"], ("train.py", "-n", "4", "--lr=3")),
        (["-n2", "--", "train.py", "--lr", "3"], ("train.py", "--lr", "3")),
        (["-n=2", "train.py", "--", "--help"], ("train.py", "--", "--help")),
        (["--fresh", "-n", "2", "train.py", "--job", "x"], ("train.py", "--job", "x")),
    ],
)
def test_arguments_after_a_script_belong_to_it(
    arguments: list[str], script: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments after the script are passed to it, with `--` before them or without, even if they
    are named like options of the launcher."""
    seen: list[RunConfig] = []

    def note(config: RunConfig) -> int:
        seen.append(config)
        return 7

    monkeypatch.setattr("shoal.launcher.command.run", note)
    assert main(["run", *arguments]) == 7
    assert tuple(seen[0].target) == script
    assert (seen[0].num_workers, seen[0].job) == (2, "train")


def test_a_module_is_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr("shoal.launcher.command.run", lambda config: seen.append(config) or 0)
    assert parse(["run", "-m", "mine.train", "--epochs", "3"])() == 0
    assert tuple(seen[0].target) == ("-m", "mine.train", "--epochs", "3")
    assert seen[0].job == "train"


def test_variables_replace_missing_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option overrides its variable, and an empty variable counts as unset."""
    seen: list[RunConfig] = []
    monkeypatch.setattr("shoal.launcher.command.run", lambda config: seen.append(config) or 0)
    monkeypatch.setenv("SHOAL_COORDINATOR", "a:1,b:2")
    main(["run", "t.py"])
    main(["run", "--coordinator", "c:3", "t.py"])
    monkeypatch.setenv("SHOAL_COORDINATOR", "")
    main(["run", "t.py"])
    assert [tuple(each.coordinators) for each in seen] == [("a:1", "b:2"), ("c:3",), ()]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script also has the commands' options."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert all(option in script for option in ("--coordinator", "--heartbeat-s", "--restart-on"))


@pytest.mark.long
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real bash completes `shoal co<TAB>`."""
    main(["completion", "bash"])
    path = tmp_path / "shoal.bash"
    path.write_text(capsys.readouterr().out)
    asked = (
        f"source {path}; COMP_WORDS=(shoal co); COMP_CWORD=1; COMP_LINE='shoal co'; COMP_POINT=8;"
        " _shoal shoal co shoal; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, timeout=30, check=True
    )
    assert sorted(done.stdout.split()) == ["completion", "config", "coordinator"], done.stderr


def test_without_a_command_the_list_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "coordinator" in capsys.readouterr().out
    assert build_app(installed_commands()).name[0] == "shoal"


@pytest.mark.long
def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    """A command whose output is closed early, as by `shoal completion zsh | head -1`, has exit code
    1 and writes no error."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "shoal_client", "completion", "zsh"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


def test_an_error_after_output_that_nobody_reads_has_its_own_exit_code() -> None:
    """Python would end with 120 after its last flush, and say so."""
    reading, writing = os.pipe()
    os.close(reading)
    program = (
        "from shoal_client import cli\n"
        "cli._carry_out = lambda given: print('a line') or 2\n"
        "raise SystemExit(cli.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(writing)
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 2, done.stderr


def test_a_command_that_is_done_keeps_its_code_if_nobody_reads_the_rest(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "shoal_client", "certs", "init", "--dir", f"{tmp_path}/c"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_command_runs_without_a_standard_stream(closed: str) -> None:
    """Wrappers such as those of cron may close the streams. What a command writes to a stream that
    is closed goes nowhere else."""
    command = [sys.executable, "-m", "shoal_client"]
    for argument, code in (("--version", 0), ("--unknown", 2)):
        done = subprocess.run(
            ["bash", "-c", f'"$@" {closed}', "bash", *command, argument],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert bool(done.stdout) == (code == 0 and closed != ">&-"), done.stdout
        assert bool(done.stderr) == (code == 2 and closed != "2>&-"), done.stderr


def test_a_full_disk_under_stdout_is_an_error_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shoal_client", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == "shoal: [Errno 28] No space left on device\n"
    assert done.returncode == 1


def test_a_pipe_that_is_not_stdout_is_no_closed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken socket of a command is shown with its traceback, as any unexpected error."""

    def run() -> int:
        raise BrokenPipeError(errno.EPIPE, "a socket")

    monkeypatch.setattr(cli, "parse", lambda given: run)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["status"])


def test_a_file_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the system names its file, and needs no traceback."""

    def run() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/x")

    monkeypatch.setattr(cli, "parse", lambda given: run)
    assert main(["status"]) == 1
    assert capsys.readouterr() == ("", "shoal: [Errno 13] Permission denied: '/root/x'\n")


def test_certificates_that_cannot_be_read_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Path.exists` raises an error for a path in a directory that is closed to this user."""

    def refused(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    assert main(["status", "--tls", "/closed", "--http", "https://127.0.0.1:1"]) == 2
    assert "the folder of the certificates cannot be read" in capsys.readouterr().err


def test_log_lines_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands print JSON and lines of workers on stdout."""

    def run() -> int:
        print("{}")
        structlog.get_logger().info("certificate_reloaded")
        return 0

    monkeypatch.setattr(cli, "parse", lambda given: run)
    structlog.reset_defaults()
    assert main(["status"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "{}\n" and "certificate_reloaded" in shown.err


def test_an_interrupt_ends_a_command_that_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main(["status"]) == 130


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("coordinator", "grpc_health", "coordinator"), ("ps", "torch", "server")],
)
def test_missing_packages_of_a_server_are_reported_with_the_extra(
    command: str,
    module: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )
    assert main([command]) == 1
    assert f"pip install 'shoal[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [command, "j"]
            for command in (
                *("events", "repair", "restore", "retry", "rm", "snapshot", "snapshots"),
                *("stop", "top", "why"),
            )
        ),
        ["accept-loss", "j", "--yes"],
        ["drain", "m", "--job", "j"],
        ["jobs"],
        ["status"],
        ["why", "m", "--job", "j"],
    ],
    ids=lambda arguments: "-".join(arguments[:1] + arguments[2:3]),
)
def test_a_command_fails_at_once_without_a_listener(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the address and a remedy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    begun_s = time.monotonic()
    assert main([*arguments, "--coordinator", address]) == 1
    took_s = time.monotonic() - begun_s
    errors = capsys.readouterr().err
    assert f"no coordinator answers at {address}" in errors
    assert "`shoal up`" in errors and "[Unavailable]" in errors
    assert took_s < unhurried(2.0)
