"""Sub-commands that the client adds to `shoal`."""

from collections.abc import Callable

_HERE = "shoal_client.commands"
_DEMO = "shoal_client.demo.command"


def add(command: Callable[[str, str, str, str], None]) -> None:
    """Add the commands whose modules import neither `shoal_server` nor `shoal`."""
    for name, summary, config, run in (
        (
            "up",
            "run a cluster on this machine until Ctrl-C, or a control plane on several hosts",
            "up:UpConfig",
            "up:up",
        ),
        ("down", "end a control plane of `shoal up --hosts`", "down:DownConfig", "down:down"),
        (
            "status",
            "show jobs, members, generations and shards",
            "status:StatusConfig",
            "status:status",
        ),
        (
            "events",
            "show what happened to a job, and follow new events",
            "events:EventsConfig",
            "events:show",
        ),
        ("logs", "show the output of the workers of a job", "logs:LogsConfig", "logs:logs"),
        ("top", "show jobs and members on one screen, refreshed", "top:TopConfig", "top:top"),
        ("why", "show what a member is waiting for", "status:WhyConfig", "status:why"),
        (
            "drain",
            "let a member finish its step, hand over and leave",
            "drain:DrainConfig",
            "drain:drain",
        ),
        ("kill", "kill a member's process on this host", "kill:KillConfig", "kill:kill"),
        (
            "jobs",
            "list jobs with state, step, loss and duration",
            "job_list:JobListConfig",
            "job_list:show",
        ),
        (
            "wait",
            "wait for the end of a job, with its outcome as exit code",
            "jobs:WaitConfig",
            "jobs:wait",
        ),
        ("stop", "stop a job at a step boundary", "jobs:StopConfig", "jobs:stop"),
        (
            "retry",
            "let workers join a failed, stopped or lost job again",
            "jobs:RetryConfig",
            "jobs:retry",
        ),
        (
            "rm",
            "remove all records of a job that has no workers",
            "jobs:RemoveConfig",
            "jobs:remove",
        ),
        (
            "repair",
            "show why a job is quarantined, and repair it",
            "repair:RepairConfig",
            "repair:repair",
        ),
        (
            "snapshot",
            "save a job's parameters as they are now",
            "snapshots:TakeConfig",
            "snapshots:take",
        ),
        (
            "snapshots",
            "list the snapshots of a job",
            "snapshots:SnapshotListConfig",
            "snapshots:show",
        ),
        (
            "restore",
            "load a snapshot into the parameter servers",
            "snapshots:RestoreConfig",
            "snapshots:restore",
        ),
        (
            "accept-loss",
            "give up lost shards, which start over",
            "accept_loss:AcceptLossConfig",
            "accept_loss:accept_loss",
        ),
        (
            "weights",
            "list published weights, pin and export versions, roll back",
            "weights:WeightsConfig",
            "weights:weights",
        ),
        (
            "certs",
            "make the certificates with which the parts of a cluster authenticate each other",
            "certs:CertsConfig",
            "certs:certs",
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
        "train on a local cluster, kill a worker during training, show what happened",
        f"{_DEMO}:DemoConfig",
        f"{_DEMO}:demo",
    )
