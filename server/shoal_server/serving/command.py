"""Commands that serve until SIGTERM or SIGINT: requirements, logs and exit codes."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Coroutine
from typing import Any

import structlog

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.terminal import StderrLogger, log_level, printable, printable_event

OTHERS = 0o077


def is_module_missing(command: str, *modules: str, extra: str = "") -> bool:
    """True if a module is not installed. Prints the first such module, and the extra to install, by
    default named like the command."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extra = extra or command
        print(
            f"shoal {command}: {missing[0]} is not installed; expected the extra '{extra}'."
            f" Run: pip install 'shoal[{extra}]'",
            file=sys.stderr,
        )
    return bool(missing)


def run(command: str, work: Coroutine[Any, Any, None]) -> int:
    """Run `work` and return the exit code: 0, EX_TEMPFAIL (75) for Unavailable, 1 for another
    ShoalError. Both errors are printed to stderr.

    Configures logging, and gives new files no permissions for others. Raises other errors of
    `work`, and InvalidSpec for an unknown level in SHOAL_LOG_LEVEL.
    """
    # Other users must not read a job's parameters.
    os.umask(os.umask(OTHERS) | OTHERS)
    _configure_logging()
    refusal, code = asyncio.run(_refusal_of(work))
    if refusal:
        print(f"shoal {command}: {printable(refusal, lines=True)}", file=sys.stderr)
    return code


async def _refusal_of(work: Coroutine[Any, Any, None]) -> tuple[str, int]:
    """Text of the ShoalError that ended `work` (empty: none), and the exit code.

    The error itself would keep gRPC objects beyond the end of the event loop, which their release
    needs.
    """
    try:
        await work
    except Unavailable as error:
        # Temporary: a supervisor may restart this process until etcd answers.
        return str(error), os.EX_TEMPFAIL
    except ShoalError as error:
        return str(error), 1
    return "", 0


def _configure_logging() -> None:
    level = log_level(os.environ)
    terminal = sys.stderr is not None and sys.stderr.isatty()
    # Do not print values of variables in tracebacks: tokens are among them.
    renderer = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *((printable_event,) if terminal else ()),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=StderrLogger,
        cache_logger_on_first_use=True,
    )
