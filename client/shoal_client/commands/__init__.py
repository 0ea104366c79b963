"""What the client adds to the `shoal` command, a module for each family of sub-commands."""

import argparse


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shoal up`, `demo`, `status`, `why`, `drain`, `rm` and those of snapshots."""
    from shoal_client.commands.up import add as add_all  # noqa: PLC0415

    add_all(subparsers)
