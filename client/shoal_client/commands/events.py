"""`shoal events`: shows the events of a job, a line each, and follows new ones."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import Json, StatusClient
from shoal_proto.errors import RetryError
from shoal_proto.names import check_name

ASK_EACH_S = 0.5
MAX_EVENTS = 1000
BAD = frozenset(
    {
        *("shards_lost", "server_lost", "job_quarantined", "bring_up_failed", "phase_failed"),
        *("phase_lost", "member_refused"),
    }
)


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """Shows what happened to a job: a line for each change of its members, with the cause, the
    pause and the steps lost; and a line for each loss, promotion, move and snapshot on its
    parameter servers."""

    job: str = field(kw_only=False)
    """Name of the job."""
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative=())] = False
    """Keep showing new events, until Ctrl-C."""
    number: Annotated[int, Parameter(name="-n", metavar="N")] = 20
    """Number of newest events to show first; at most 1000 are kept."""
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], negative=())] = False
    """Also show details: members that join and propose, and each phase of an agreement."""
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print each event as a line of JSON."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        if not 0 <= self.number <= MAX_EVENTS:
            raise ValueError(f"bad -n; saw {self.number}; expected 0 to {MAX_EVENTS}")


def show(config: EventsConfig) -> int:
    """Print the newest events, and with -f all later ones."""
    console = Console(highlight=False)
    with StatusClient(config.address.urls()) as client:
        for event in _events(client, config):
            if config.as_json:
                print(json.dumps(event), flush=True)
            else:
                console.print(line_of(event), soft_wrap=True)
    return 0


def _events(client: StatusClient, config: EventsConfig) -> Iterator[Json]:
    details, after = config.verbose, 0
    known: list[Json] = []
    while page := client.events(config.job, after, details=details)["events"]:
        known, after = [*known, *page][-MAX_EVENTS:], page[-1]["id"]
    yield from known[len(known) - min(config.number, len(known)) :]
    is_away = False
    while config.follow:
        try:
            answer = client.events(config.job, after, details=details)
        except RetryError:
            # The next leader's events count as later ones, also if its clock is behind.
            if not is_away:
                Console(stderr=True, highlight=False).print(
                    "[dim]no coordinator leads; waiting[/dim]"
                )
            is_away = True
        else:
            is_away, after = False, answer["next_after"]
            yield from answer["events"]
            if answer["events"]:
                continue
        time.sleep(ASK_EACH_S)


def line_of(event: Json) -> Text:
    """A line, like "08:15:52 generation 4: lost vm-2 (SIGKILL); 3 go on; paused 0.06 s"."""
    at = time.strftime("%H:%M:%S", time.localtime(event["unix_s"]))
    style = "red" if event["kind"] in BAD else "dim" if event["detail"] else ""
    text = event["reason"]
    if event["kind"] != "generation_changed":
        text = f"{event['kind'].replace('_', ' ')}: {text}"
    return Text.assemble((f"{at} ", "dim"), (text, style))
