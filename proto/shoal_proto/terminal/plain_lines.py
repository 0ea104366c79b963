"""Lines that a program wrote for a terminal, as text that shows the same and does nothing else."""

import re

from shoal_proto.terminal.printable import printable

_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, erasing
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and the like: titles, links
    r"|[ -/]*[0-~]"  # all of two or three characters
    r")?"
)


def plain_lines(data: bytes) -> list[str]:
    """The lines of the bytes, without escape sequences; what is not UTF-8 is replaced.

    Of a line that a progress bar wrote again and again the newest state is left.
    """
    text = data.decode("utf-8", "replace")
    return [_plain(line) for line in text.removesuffix("\n").split("\n")] if text else []


def _plain(line: str) -> str:
    line = _SEQUENCE.sub("", line)
    shown = [part for part in line.split("\r") if part]
    return printable(shown[-1]) if shown else ""
