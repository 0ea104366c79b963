"""Text from other processes, made safe to show on a terminal, and the level of the log.

Any process that joins a job may send escape sequences, line feeds that imitate lines of Shoal, or
direction marks that show a different text.
"""

import logging
import re
import sys
import unicodedata
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Self, TextIO, cast

import structlog

from shoal_proto.errors import InvalidSpec

_ENDS_OF_LINES = ("\n", "\u2028", "\u2029")
_DIRECTIONS = (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C)
_CONTROLS = [code for code in range(0x100) if unicodedata.category(chr(code)) == "Cc"]
_ALL = {
    code: repr(chr(code))[1:-1] if code < 0x100 else f"\\u{code:04x}"
    for code in (*_CONTROLS, *_DIRECTIONS, *map(ord, _ENDS_OF_LINES))
    if chr(code) != "\t"
}
_WITHIN_LINES = {code: shown for code, shown in _ALL.items() if chr(code) != "\n"}
OF_SEVERAL_LINES = frozenset({"exception", "stack", "last_error"})
"""Keys whose values may have several lines."""


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text with escapes for characters that a terminal obeys. `lines`: True to keep line
    feeds."""
    return text.translate(_WITHIN_LINES if lines else _ALL)


def printable_json(value: Any, name: str = "") -> Any:
    """Return a value from JSON with printable texts; `name`: its key."""
    if isinstance(value, str):
        return printable(value, lines=name in OF_SEVERAL_LINES)
    if isinstance(value, list):
        return [printable_json(each, name) for each in value]
    if isinstance(value, dict):
        return {printable(key): printable_json(each, key) for key, each in value.items()}
    return value


def printable_event(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Make the texts of an event printable, as a processor of structlog."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value, lines=name in OF_SEVERAL_LINES)
    return event


_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, erasing
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and the like: titles, links
    r"|[ -/]*[0-~]"  # all other sequences of two or three characters
    r")?"
)


def plain_lines(data: bytes) -> list[str]:
    """Return the lines of the bytes, without escape sequences. Of a line that a progress bar has
    overwritten, only the newest state is kept."""
    text = data.decode("utf-8", "replace")
    return [_plain(line) for line in text.removesuffix("\n").split("\n")] if text else []


def _plain(line: str) -> str:
    line = _SEQUENCE.sub("", line)
    shown = [part for part in line.split("\r") if part]
    return printable(shown[-1]) if shown else ""


def log_level(environment: Mapping[str, str]) -> int:
    """Number of the level in SHOAL_LOG_LEVEL, by default info. Raises InvalidSpec for an unknown
    one."""
    name = environment.get("SHOAL_LOG_LEVEL") or "INFO"
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise InvalidSpec(
            "SHOAL_LOG_LEVEL is not a level", seen=name, expected="debug, info, warning or error"
        )
    return level


class LogStream:
    """The standard error stream, for log lines. A line is dropped if the stream does not take it
    (disk full, pipe closed): threads that send heartbeats must not end for it."""

    def write(self, text: str) -> int:
        # None: the process was started without the stream.
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.flush()


_LOG_STREAM = LogStream()
"""structlog keeps a lock for each stream that it has seen."""


class StderrLogger(structlog.PrintLogger):
    """Logger to `LogStream`. It can be copied and pickled, as part of a script's objects."""

    def __init__(self, *_: object) -> None:
        super().__init__(cast(TextIO, _LOG_STREAM))

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, memodict: dict[str, object]) -> Self:
        return type(self)()


def configure_script_log(environment: Mapping[str, str]) -> None:
    """Set log level and stream, unless the script has configured structlog: stdout belongs to the
    script. Raises InvalidSpec for an unknown level."""
    level = log_level(environment)
    if not structlog.is_configured():
        # Log lines contain text from other members, which a terminal would interpret.
        *processors, renderer = structlog.get_config()["processors"]
        structlog.configure(
            processors=[*processors, printable_event, renderer],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=StderrLogger,
        )
