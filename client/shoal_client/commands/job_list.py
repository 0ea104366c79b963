"""`shoal jobs`: lists jobs with their state and result, a line each."""

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import Json, StatusClient, now_of

RECENT_S = 24 * 3600.0
State = Literal[
    "waiting",
    "starting",
    "running",
    "interrupted",
    "finished",
    "failed",
    "stopped",
    "lost",
    "quarantined",
]
_STYLES = {
    "running": "green",
    "interrupted": "red",
    "failed": "red",
    "lost": "red",
    "quarantined": "red",
}


@dataclass(frozen=True, kw_only=True)
class JobListConfig:
    """Lists the jobs that have not ended, and those that ended in the last 24 hours."""

    every: Annotated[bool, Parameter(name=["--all", "-a"], negative=())] = False
    """Show all jobs that the cluster still has a record of."""
    state: Annotated[State | None, Parameter(name="--state")] = None
    """Show only jobs in this state, whenever they ended."""
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print JSON instead of a table."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)


def show(config: JobListConfig) -> int:
    """Print the jobs, the newest last."""
    with StatusClient(config.address.urls()) as client:
        jobs = [job for job in client.jobs() if _is_wanted(job, config)]
    jobs.sort(key=lambda job: job["begun_unix_s"])
    if config.as_json:
        print(json.dumps(jobs, indent=2))
        return 0
    console = Console(highlight=False)
    if not jobs:
        console.print(_no_jobs_text(config))
        return 0
    console.print(_table(jobs))
    for job in jobs:
        if ending := job.get("last_ending"):
            message = f"{job['job']} is {job['shown_state']}; the last member to leave was {ending}"
            console.print(escape(message), style="red", soft_wrap=True)
    return 0


def _no_jobs_text(config: JobListConfig) -> str:
    if config.state is not None:
        return f"no job is {config.state}"
    return (
        "no job"
        if config.every
        else "no job; --all also shows jobs that ended more than 24 hours ago"
    )


def _is_wanted(job: Json, config: JobListConfig) -> bool:
    if config.state is not None:
        return bool(job["shown_state"] == config.state)
    ended_s = job["ended_unix_s"]
    return config.every or not ended_s or now_of(job) - ended_s < RECENT_S


def _table(jobs: list[Json]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    table.add_column("job", overflow="fold", ratio=1)
    table.add_column("state", no_wrap=True)
    for column in ("step", "loss", "members", "restarts", "took"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in jobs:
        state = job["shown_state"]
        style = _STYLES.get(state, "")
        table.add_row(
            escape(job["job"]),
            f"[{style}]{state}[/{style}]" if style else state,
            str(job["step"]),
            _loss(job["loss"]),
            str(job["num_members"]),
            str(job["num_restarts"]),
            _took(job),
        )
    return table


def _loss(loss: float | str | None) -> str:
    # JSON lacks infinity and NaN: they come as text.
    return "" if loss is None else f"{float(loss):.4g}"


def _took(job: Json) -> str:
    if not job["begun_unix_s"]:
        return ""
    seconds = (job["ended_unix_s"] or now_of(job)) - job["begun_unix_s"]
    hours, rest = divmod(math.floor(max(seconds, 0.0)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
