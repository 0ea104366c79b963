"""The command `shoal config`: prints all time limits, most derived from a few that users choose."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from shoal_server.core.limits import Limits
from shoal_server.serving.options import FLAT

_CHOSEN = {
    "heartbeat_s": "The time between a member's heartbeats. You choose it: --heartbeat-s.",
    "join_s": "The longest wait of a joining member for a generation; then it gets an error with"
    " the reason. You choose it: --join-s.",
    "collective_s": "The time after which a collective counts as hung. Also the longest time for a"
    " trainer to stop after a break. You may choose it: --collective-s.",
    "wait_for_members_s": "How long a job that has trained waits while it has fewer members than"
    " its minimum. You may choose it: --wait-for-members-s.",
}


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Prints the time limits of a coordinator with these settings, what each is for, and the order
    that must hold between them. Starts nothing."""

    limits: Annotated[Limits, FLAT] = field(default_factory=Limits)
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print JSON instead of a table."""


def show(config: ShowConfig) -> int:
    """Print every limit with its meaning, and the order in which the limits must be."""
    limits = config.limits
    if config.as_json:
        print(json.dumps(_as_dict(limits), indent=2))
        return 0
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    table.add_column("limit", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("meaning", overflow="fold", ratio=1)
    for name, meaning in limit_descriptions():
        table.add_row(name, limit_text(limits, name), meaning)
    console.print(table)
    console.print("\nEach must be below the next, or the coordinator does not start:", style="dim")
    for chain in _chains(limits):
        console.print("  " + " < ".join(f"{name} ({seconds:g})" for name, seconds in chain))
    return 0


def limit_descriptions() -> Iterator[tuple[str, str]]:
    """Yield each limit's name and its meaning, without line breaks."""
    yield from _CHOSEN.items()
    for name, attribute in vars(Limits).items():
        if isinstance(attribute, property):
            yield name, " ".join((attribute.__doc__ or "").split())


def limit_text(limits: Limits, name: str) -> str:
    """The limit of this name in seconds, or "none"."""
    seconds: float | None = getattr(limits, name)
    return "none" if seconds is None else f"{seconds:g}"


def _as_dict(limits: Limits) -> dict[str, object]:
    return {
        "limits": {
            name: {"seconds": getattr(limits, name), "meaning": meaning}
            for name, meaning in limit_descriptions()
        },
        "hierarchy": [
            {
                "smaller": {"name": smaller[0], "seconds": smaller[1]},
                "larger": {"name": larger[0], "seconds": larger[1]},
            }
            for smaller, larger in limits.hierarchy()
        ],
    }


def _chains(limits: Limits) -> list[list[tuple[str, float]]]:
    """Join the pairs of the hierarchy into chains: a < b and b < c become a < b < c."""
    chains: list[list[tuple[str, float]]] = []
    for smaller, larger in limits.hierarchy():
        if chains and chains[-1][-1] == smaller:
            chains[-1].append(larger)
        else:
            chains.append([smaller, larger])
    return chains
