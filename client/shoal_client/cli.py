"""The `shoal` command: it finds its sub-commands in the parts that are installed."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version

from shoal_proto.errors import ShoalError

COMMANDS_GROUP = "shoal.commands"


def build_parser() -> argparse.ArgumentParser:
    """The parser with the sub-commands of every installed part.

    Each entry point of the group is a function that adds its sub-commands to the subparsers it is
    given and sets `handler`, a function of the parsed arguments that returns the exit code.
    """
    parser = argparse.ArgumentParser(
        prog="shoal", description="Elastic training for PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"shoal {version('shoal')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
        entry.load()(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad arguments, 130 Ctrl-C."""
    # gRPC's C core prints what Shoal's own errors say already, in words for its developers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.handler(options)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code
