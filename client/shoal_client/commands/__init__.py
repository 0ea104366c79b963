"""What the client adds to the `shoal` command, a module for each family of sub-commands."""

from collections.abc import Callable

_HERE = "shoal_client.commands"
_DEMO = "shoal_client.demo.command"


def add(command: Callable[[str, str, str, str], None]) -> None:
    """Add every command that needs no server and no worker package."""
    for name, summary, config, run in (
        ("up", "run a cluster on this machine until Ctrl-C", "up:UpConfig", "up:up"),
        (
            "status",
            "show jobs, members, generations and shards",
            "status:StatusConfig",
            "status:status",
        ),
        ("why", "show what a member is waiting for", "status:WhyConfig", "status:why"),
        (
            "drain",
            "let a member finish its step, hand over and leave",
            "drain:DrainConfig",
            "drain:drain",
        ),
        (
            "jobs",
            "list jobs: their states, steps, losses and how long they took",
            "job_list:ListConfig",
            "job_list:show",
        ),
        ("stop", "have a job's members end at a step boundary", "jobs:StopConfig", "jobs:stop"),
        (
            "retry",
            "let a job be joined again that failed, was stopped or is lost",
            "jobs:RetryConfig",
            "jobs:retry",
        ),
        (
            "rm",
            "remove a job that is over, or whose workers are gone",
            "jobs:RemoveConfig",
            "jobs:remove",
        ),
        (
            "repair",
            "show why a job is quarantined, and let it go on",
            "repair:RepairConfig",
            "repair:repair",
        ),
        (
            "snapshot",
            "save a job's parameters as they are now",
            "snapshots:TakeConfig",
            "snapshots:take",
        ),
        ("snapshots", "list the snapshots of a job", "snapshots:ListConfig", "snapshots:show"),
        (
            "restore",
            "load a snapshot into the parameter servers",
            "snapshots:RestoreConfig",
            "snapshots:restore",
        ),
        (
            "accept-loss",
            "give up shards that are lost, so that they begin anew",
            "accept_loss:AcceptLossConfig",
            "accept_loss:accept_loss",
        ),
        (
            "completion",
            "print a completion script for bash or zsh",
            "completion:CompletionConfig",
            "completion:completion",
        ),
    ):
        command(name, summary, f"{_HERE}.{config}", f"{_HERE}.{run}")
    command(
        "demo",
        "train on a local cluster, kill a worker on the way, show what happened",
        f"{_DEMO}:DemoConfig",
        f"{_DEMO}:demo",
    )
