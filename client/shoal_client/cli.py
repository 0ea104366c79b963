"""The `shoal` command, with the sub-commands of all installed packages."""

import atexit
import errno
import gc
import io
import os
import re
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

import structlog
from cyclopts import App, Parameter
from cyclopts.exceptions import (
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.help import DefaultFormatter, PanelSpec
from rich import box

from shoal_proto.errors import ShoalError
from shoal_proto.terminal import StderrLogger, printable
from shoal_proto.tls import identity
from shoal_proto.tls.options import TlsOptions
from shoal_proto.traces import tracing

COMMANDS_GROUP = "shoal.commands"
FAILED = 1
BAD_ARGUMENTS = 2
DESTRUCTIVE = frozenset({"--fresh", "--from-scratch", "--insecure", "--yes", "--apply"})
"""Options that remove or expose data: never suggested for a mistyped option."""
_SUGGESTION = re.compile(r"Did you mean \"?(--[\w-]+)\"?\?")
INTERRUPTED = 130
NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of the file that stdout is: they do not name it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command. `config` and `run` are `module:name`, imported only when the command is
    called."""

    summary: str
    """Line in `shoal --help`."""
    config: str
    """The dataclass whose fields are the options."""
    run: str
    """Takes an instance of `config`; returns the exit code."""


def installed_commands() -> dict[str, Command]:
    """Return the sub-commands of all installed packages, by name. An entry point of COMMANDS_GROUP
    is a function that calls its argument, `add`, for each sub-command.
    """
    found: dict[str, Command] = {}

    def add(name: str, summary: str, config: str, run: str) -> None:
        found[name] = Command(summary=summary, config=config, run=run)

    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
        entry.load()(add)
    return found


def build_app(commands: Mapping[str, Command]) -> App:
    """Return the parser, which parses arguments into an instance of the command's config."""
    app = App(
        name="shoal",
        help="Elastic training for PyTorch.",
        version=f"shoal {version('shoal')}",
        help_flags=("-h", "--help"),
        help_formatter=DefaultFormatter(panel_spec=PanelSpec(box=box.SIMPLE_HEAD, padding=(0, 0))),
        default_parameter=Parameter(
            negative=(),
            allow_repeating=True,
            show_default=_shown,
            # By default a list's variable is split at spaces: "a:1, b:2" would be two values.
            env_var_split=lambda kind, text, delimiter=None: [text],
        ),
    )
    for name, command in commands.items():
        app.command(command.config, name=name, help=command.summary)
    return app


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """Return a function that runs the named command, and returns the exit code. Raises
    CycloptsError, or the ValueError of a config, for arguments that are refused.
    """
    commands = installed_commands()
    config = read_config(arguments, commands)
    if config is None:
        return lambda: 0 if arguments else BAD_ARGUMENTS
    needs_cluster = getattr(config, "needs_cluster", True)
    for options in (each for each in vars(config).values() if isinstance(each, TlsOptions)):
        addresses: Sequence[str] = ()
        if needs_cluster:  # to look for it may raise
            addresses = (*getattr(config, "coordinators", ()), *options.addresses)
        files = options.files or identity.files_at(addresses, *options.roles)
        if files is not None:
            identity.use(files)
    run: Callable[[Any], int] = _load(commands[_name_of(arguments)].run)
    return lambda: run(config)


def read_config(arguments: Sequence[str], commands: Mapping[str, Command]) -> Any:
    """The command's config; None if the arguments are empty, or if the help or version was
    printed."""
    app = build_app(commands)
    name, tokens = _name_of(arguments), list(arguments)
    if name in commands:
        app[name].help = None  # its help page begins with the docstring of its config instead
        tokens = _end_options(app[name], tokens)
    parsed, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    result = parsed(*bound.args, **bound.kwargs)
    return result if isinstance(parsed, type) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 1 after a ShoalError, an error of a file, or if
    stdout was closed before the command was done, 2 for bad arguments, 130 after Ctrl-C, else what
    the command returns."""
    # gRPC's C core prints texts for its own developers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _open_standard_streams()
    # At exit the garbage collector would visit all objects twice, for 80 ms of CPU.
    atexit.register(gc.freeze)
    given = sys.argv[1:] if arguments is None else arguments
    _forget_empty_variables()
    if not structlog.is_configured():
        # stdout is for what the command prints: JSON, or lines of workers.
        structlog.configure(logger_factory=StderrLogger)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines of workers may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        return _carry_out(given)
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise  # a socket or another pipe broke
        return FAILED
    finally:
        _discard_unwritten()


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream without which this process was started: commands use
    the streams, and workers inherit them. Otherwise the next file or socket would get the number,
    and what a worker prints."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, mode))


def _discard_unwritten() -> None:
    """Discard output that stdout does not take: Python would complain again in its last flush."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_stdout_closed() -> bool:
    polled = select.poll()
    polled.register(sys.stdout.fileno(), 0)  # errors are always reported
    return bool(polled.poll(0))


def _carry_out(given: Sequence[str]) -> int:
    try:
        try:
            run = parse(given)
        except (CycloptsError, ValueError) as error:
            print(f"{f'shoal {_name_of(given)}'.rstrip()}: {_sentence(error)}", file=sys.stderr)
            return BAD_ARGUMENTS
        tracing.from_environment(_name_of(given))
        code = run()
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_unwritten()  # whoever read it has seen enough
        return code
    except ShoalError as error:
        message = printable(str(error), lines=True)
        print(f"shoal: {message} [{type(error).__name__}]", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.filename is None and error.errno not in NOT_WRITTEN:
            raise
        print(f"shoal: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _name_of(arguments: Sequence[str]) -> str:
    return arguments[0] if arguments and not arguments[0].startswith("-") else ""


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _end_options(app: App, tokens: list[str]) -> list[str]:
    """Put `--` before the first positional token if the rest belongs to a script."""
    arguments = app.assemble_argument_collection()
    if not any(each.index is not None and each.token_count()[1] for each in arguments):
        return tokens
    flags = {name for each in arguments if each.token_count()[0] == 0 for name in each.names}
    known = {name for each in arguments for name in each.names}
    at = 1
    while at < len(tokens) and tokens[at].startswith("-") and tokens[at] != "--":
        # As in torchrun, an option may be written with underscores.
        at += 2 if tokens[at].replace("_", "-") in known - flags else 1
    return tokens if tokens[at : at + 1] in ([], ["--"]) else [*tokens[:at], "--", *tokens[at:]]


def _forget_empty_variables() -> None:
    """Delete empty `SHOAL_` variables: they count as not set."""
    for name in [each for each, value in os.environ.items() if each.startswith("SHOAL_")]:
        if not os.environ[name]:
            del os.environ[name]


def _shown(default: object) -> object:
    """Return a default as the help shows it; None if the option's text explains it."""
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or None
    return None if default == "" or default is False else default


def _sentence(error: Exception) -> str:
    if isinstance(error, UnknownOptionError):
        message = " ".join(str(error).split())
        suggestion = _SUGGESTION.search(message)
        if suggestion is not None and suggestion[1] in DESTRUCTIVE:
            return f"{message[: suggestion.start()].rstrip()} --help shows the options."
        return message
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected arguments: {' '.join(error.unused_tokens or ())}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.argument.index is not None:
            return f"{error.argument.names[0].lstrip('-').upper()} is required"
        return f"{error.argument.name} is required, with a value"
    return " ".join(str(error).split())
