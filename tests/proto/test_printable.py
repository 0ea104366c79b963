"""Texts from other processes: their control sequences are shown, and never reach a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from shoal_proto.terminal import printable, printable_json

LOGS = """
import structlog
{configure}
log = structlog.get_logger()
log.info("member_joined", host="\\x1b[2J", reason="a\\x1b[2J\\n2026-11-25 [info] forged")
"""
OF_A_SERVER = "from shoal_server.serving.command import _configure_logging; _configure_logging()"
OF_A_WORKER = "from shoal_proto.terminal import configure_script_log; configure_script_log({})"


@pytest.mark.parametrize(
    ("text", "shown", "of_lines"),
    [
        ("plain \u00e9 \u6f22 \U0001f41f\ttab", "plain \u00e9 \u6f22 \U0001f41f\ttab", None),
        ("\x1b[31m", "\\x1b[31m", None),
        ("\x9b31m\x7f\x00\r", "\\x9b31m\\x7f\\x00\\r", None),
        ("user\u202egnp.exe", "user\\u202egnp.exe", None),
        ("one\ntwo", "one\\ntwo", "one\ntwo"),
        ("one\u2028two", "one\\u2028two", None),
    ],
)
def test_control_sequences_are_escaped(text: str, shown: str, of_lines: str | None) -> None:
    assert printable(text) == shown
    assert printable(text, lines=True) == (of_lines or shown)


def test_control_sequences_in_an_answer_are_escaped() -> None:
    """Keys are escaped, too; an error keeps its line breaks."""
    given = {"a\x1b": ["\n", 1, None, {"last_error": "x\ny\x1b"}], "b": 0.5}
    assert printable_json(given) == {
        "a\\x1b": ["\\n", 1, None, {"last_error": "x\ny\\x1b"}],
        "b": 0.5,
    }


@pytest.mark.sampled()
@pytest.mark.parametrize("configure", [OF_A_SERVER, OF_A_WORKER])
def test_a_log_message_is_one_line_on_a_terminal(configure: str) -> None:
    ours, theirs = pty.openpty()
    script = LOGS.format(configure=configure)
    with os.fdopen(ours, "rb", buffering=0) as shown:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=theirs, stderr=theirs, timeout=120, check=False
        )
        printed = shown.read(65536).decode()
        os.close(theirs)
    assert done.returncode == 0, printed
    (line,) = (each for each in printed.splitlines() if "forged" in each)
    assert "member_joined" in line
    assert "\x1b[2J" not in printed


@pytest.mark.parametrize("configure", [OF_A_SERVER, OF_A_WORKER])
@pytest.mark.parametrize("stream", ["2>/dev/full", "2>&-"])
def test_a_log_message_that_cannot_be_written_is_dropped(configure: str, stream: str) -> None:
    """A full disk must not end the thread that logs; stdout stays the script's own."""
    script = LOGS.format(configure=configure) + "\nprint('goes on')\n"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {stream}', sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "goes on\n"


def test_a_scripts_logger_is_copied_and_pickled_with_the_object_that_has_it() -> None:
    """A model may have one; strategies copy models, and loading processes get them pickled."""
    script = (
        "import copy, pickle, structlog\n"
        f"{OF_A_WORKER}\n"
        "log = structlog.get_logger().bind(net='n')\n"
        "for made in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):\n"
        "    made.info('made')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("net") == 2
