"""`shoal top`: jobs and members on one screen that is refreshed."""

import sys
import time
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.events import line_of
from shoal_client.commands.status import Json, StatusClient, duration, now_of, number, table_of
from shoal_proto.errors import RetryError
from shoal_proto.names import check_name

MAX_EVENTS = 5
NAME_WIDTH = 28


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    """Shows the jobs that have not ended, or the members of one job, and refreshes until Ctrl-C."""

    job: str = field(kw_only=False, default="")
    """Name of a job. By default all jobs that have not ended are shown."""
    every_s: Annotated[float, Parameter(name=["-d", "--every-s"], metavar="SECONDS")] = 1.0
    """Time between two refreshes."""
    once: Annotated[bool, Parameter(negative=())] = False
    """Print once, and exit."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        if self.job:
            check_name(self.job, "job")
        if not 0.1 <= self.every_s <= 3600:
            raise ValueError(f"bad --every-s; saw {self.every_s:g}; expected 0.1 to 3600 seconds")


def top(config: TopConfig) -> int:
    """Show and refresh until Ctrl-C; print once with `once`, or if stdout is not a terminal."""
    console = Console(highlight=False)
    with StatusClient(config.address.urls()) as client:
        if config.once or not sys.stdout.isatty():
            console.print(_screen(client, config.job, console.size.height))
            return 0
        newest = _screen(client, config.job, console.size.height)
        with Live(newest, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(config.every_s)
                try:
                    shown = newest = _screen(client, config.job, console.size.height)
                except RetryError as error:
                    shown = Group(Text(str(error), style="red"), newest)
                live.update(shown, refresh=True)


def _screen(client: StatusClient, job: str, height: int) -> RenderableType:
    if job:
        events = client.events(job, 0, details=False, newest=MAX_EVENTS)["events"]
        return _job_screen(client.job(job), events, max(3, height - MAX_EVENTS - 6))
    not_ended = [each for each in client.jobs() if not each["ended_unix_s"]]
    return _jobs_screen(not_ended, max(3, height - 3))


def _jobs_screen(jobs: Json, height: int) -> RenderableType:
    jobs = sorted(jobs, key=lambda job: -job["begun_unix_s"])
    table = _table("job", "state", "members>", "step>", "loss>", "goodput>", "restarts>")
    for job in jobs[:height]:
        table.add_row(
            escape(job["job"]),
            job["shown_state"],
            f"{job['num_training']}/{job['num_members']}",
            str(job["step"]),
            number(job["loss"], ".4g"),
            _share(job.get("goodput")),
            str(job["num_restarts"]),
        )
    more = len(jobs) - height
    parts: list[RenderableType] = [Text(f"jobs that have not ended: {len(jobs)}"), table]
    return Group(*parts, *([Text(f"and {more} more", style="dim")] if more > 0 else []))


def _job_screen(job: Json, events: Json, height: int) -> RenderableType:
    summary = job["summary"]
    speeds = [_health_figure(each, "samples_per_s") for each in job["members"]]
    total = sum(each for each in speeds if isinstance(each, int | float))
    head = Text.assemble(
        (summary["job"], "bold"),
        f"  {summary['shown_state']}, step {summary['step']}, {total:.0f} samples/s,"
        f" goodput {_share(summary.get('goodput'))}",
    )
    logged = [
        f"{name} {number(value, '.4g')} (step {step})"
        for name, (step, value) in job.get("course", {}).get("logged", {}).items()
    ]
    slow = slowest(job["members"])
    table = _table("member", "rank>", "state", "step>", "loss>", "ms/step>", "seen>")
    now_s = now_of(summary)
    for entry in job["members"][:height]:
        member = entry["member"]
        step_s = _health_figure(entry, "step_time_s")
        name = escape(member["member_id"])
        table.add_row(
            f"[yellow]{name} (slow)[/yellow]" if member["member_id"] in slow else name,
            "-" if member["rank"] is None else str(member["rank"]),
            member["state"],
            str(max(member["step"], _health_figure(entry, "step") or 0)),
            number(_health_figure(entry, "loss"), ".4g"),
            "-" if step_s is None else f"{1000 * step_s:.1f}",
            duration(now_s - member["last_seen_unix_s"]),
        )
    more = len(job["members"]) - height
    details = [Text(summary["reason"], style="dim"), *([Text("  ".join(logged))] if logged else [])]
    parts: list[RenderableType] = [head, *details, table]
    if more > 0:
        parts.append(Text(f"and {more} more", style="dim"))
    return Group(*parts, Text(""), *(line_of(event) for event in events))


def slowest(members: Json) -> set[str]:
    """Ids of members whose steps take more than 1.5 times the median; none if fewer than three
    report step times."""
    times = {
        entry["member"]["member_id"]: step_s
        for entry in members
        if isinstance(step_s := _health_figure(entry, "step_time_s"), int | float)
    }
    if len(times) < 3:
        return set()
    middle_s = sorted(times.values())[len(times) // 2]
    return {name for name, step_s in times.items() if step_s > 1.5 * middle_s}


def _health_figure(entry: Json, figure: str) -> Json:
    return (entry["health"] or {}).get(figure)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _table(*columns: str) -> Table:
    table = table_of(*columns)
    table.columns[0].max_width, table.columns[0].overflow = NAME_WIDTH, "ellipsis"
    return table
