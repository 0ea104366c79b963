"""The time limits of a cluster that a command starts, as options of that command."""

import argparse
from collections.abc import Mapping

OPTIONS = {
    "--heartbeat-s": "between heartbeats (default 0.5)",
    "--join-s": "longest wait of a member for a generation (default 120)",
    "--collective-s": "longest wait in a collective before it counts as hung (default: a quarter"
    " of --join-s)",
}


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options; `shoal config` says what follows from them."""
    group = parser.add_argument_group(
        "time limits of the cluster that is started", "as of shoal coordinator; see shoal config"
    )
    for option, meaning in OPTIONS.items():
        group.add_argument(option, type=float, metavar="SECONDS", help=meaning)


def given_limits(options: argparse.Namespace) -> Mapping[str, float]:
    """Those that were given, by option."""
    values = {option: getattr(options, _attribute(option), None) for option in OPTIONS}
    return {option: value for option, value in values.items() if value is not None}


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
