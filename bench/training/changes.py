"""Changes of a set of machines: read from a trace, or drawn by a seed.

A trace and a seed give the same changes for every system.
"""

import argparse
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

SETTLED_S = 15.0
"""Time after its start at which a machine is settled: its worker then trains. The last settled
machine is never lost, since no system keeps its state if all machines with a copy are lost."""
REPLACED_AFTER_MIN = 5.0
MOST_MACHINES = 4
_LINE = re.compile(r"(\d+),(add|remove),([^,]+)")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A machine that joins or is lost."""

    at_s: float
    machine: str
    joins: bool


@dataclass(frozen=True, kw_only=True)
class Level:
    """Number of machines from a time on."""

    at_s: float
    machines: int


def read_trace(lines: Iterable[str], speed: float) -> list[Level]:
    """Read the number of machines over time from lines `milliseconds,add|remove,node`; times are
    divided by `speed`.

    Lines of one time are applied in the order of the file: a node may be removed and added again.
    Raises ValueError for a line of another form, or one that adds a present node or removes an
    absent one.
    """
    rows = [_row(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError("the trace is empty")
    present: set[str] = set()
    levels = []
    for at_ms, own in groupby(sorted(rows, key=_at_ms), key=_at_ms):
        for row in own:
            if (row.node in present) == row.adds:
                state = "present already" if row.adds else "not present"
                raise ValueError(f"line {row.number}: {row.node} is {state}")
            (present.add if row.adds else present.remove)(row.node)
        levels.append(Level(at_s=at_ms / 1e3 / speed, machines=len(present)))
    return levels


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int
    at_ms: int
    adds: bool
    node: str


def _row(line: str, number: int) -> _Row:
    found = _LINE.fullmatch(line.strip())
    if not found:
        expected = "expected milliseconds,add|remove,node"
        raise ValueError(f"line {number}: {line.strip()!r}, {expected}")
    at_ms, kind, node = found.groups()
    return _Row(number=number, at_ms=int(at_ms), adds=kind == "add", node=node)


def _at_ms(row: _Row) -> int:
    return row.at_ms


def scaled(levels: Sequence[Level], most: int) -> list[Level]:
    """Map the levels to 1 to `most` machines.

    A trace of at most `most` machines keeps its numbers. In a larger one each number of 1 to `most`
    has an equal share of the time: a number of machines is mapped by its quantile, the share of the
    trace's time with that many or fewer. The time before the first machine and the instant of the
    last change do not count. A time without machines continues with the number before it.
    """
    weights: dict[int, float] = {}
    for before, after in pairwise(levels):
        if before.machines:
            weights[before.machines] = weights.get(before.machines, 0.0) + after.at_s - before.at_s
    total_s = sum(weights.values())
    if not total_s:
        raise ValueError("the trace needs two changes at different times, the first not to 0 nodes")

    fits = max(level.machines for level in levels) <= most

    def number(machines: int) -> int:
        if fits:
            return machines
        quantile = sum(share for each, share in weights.items() if each <= machines) / total_s
        # The margin allows for sums that are rounded up above a whole number.
        return max(1, math.ceil(most * quantile - 1e-9))

    found: list[Level] = []
    for level in levels:
        machines = number(level.machines)
        if level.machines and (not found or found[-1].machines != machines):
            found.append(Level(at_s=level.at_s, machines=machines))
    start_s = found[0].at_s
    return [Level(at_s=level.at_s - start_s, machines=level.machines) for level in found]


def changes_of(levels: Sequence[Level], seed: int) -> list[Change]:
    """Return joins and losses of named machines; the seed draws which machine is lost.

    A loss for which no machine can be spared is left out, and so is the join that would follow it.
    """
    drawn = random.Random(seed)
    since: dict[str, float] = {}
    found: list[Change] = []
    number = 0
    for level in levels:
        while len(since) < level.machines:
            name, number = f"machine-{number}", number + 1
            # The first machines train when the clock starts.
            since[name] = level.at_s or -SETTLED_S
            found.append(Change(at_s=level.at_s, machine=name, joins=True))
        while len(since) > level.machines:
            candidates = expendable(since, level.at_s)
            if not candidates:
                break
            victim = drawn.choice(candidates)
            del since[victim]
            found.append(Change(at_s=level.at_s, machine=victim, joins=False))
    return found


def poisson(
    *, seed: int, mtbf_s: float, replaced_after_s: float, num_machines: int, length_s: float
) -> list[Change]:
    """Draw losses as a Poisson process of the whole job; a new machine replaces each lost one.

    The replacement joins after an exponentially distributed time of mean `replaced_after_s`. A loss
    for which no machine can be spared is left out.
    """
    drawn = random.Random(seed)
    since = {f"machine-{number}": 0.0 for number in range(num_machines)}
    found = [Change(at_s=0.0, machine=name, joins=True) for name in since]
    # The first machines train when the clock starts.
    since = dict.fromkeys(since, -SETTLED_S)
    joins: list[float] = []
    number = num_machines
    at_s = drawn.expovariate(1 / mtbf_s)
    while at_s < length_s or any(join_s < length_s for join_s in joins):
        if joins and min(joins) <= at_s:
            join_s = min(joins)
            joins.remove(join_s)
            if join_s >= length_s:
                break
            name, number = f"machine-{number}", number + 1
            since[name] = join_s
            found.append(Change(at_s=join_s, machine=name, joins=True))
            continue
        if at_s >= length_s:
            break
        candidates = expendable(since, at_s)
        if candidates:
            victim = drawn.choice(candidates)
            del since[victim]
            found.append(Change(at_s=at_s, machine=victim, joins=False))
            joins.append(at_s + drawn.expovariate(1 / replaced_after_s))
        at_s += drawn.expovariate(1 / mtbf_s)
    return found


def expendable(since: dict[str, float], at_s: float) -> list[str]:
    """Return the machines that may be lost: at least one settled machine stays. `since`: start of
    each machine."""
    settled = [name for name, start_s in since.items() if at_s - start_s >= SETTLED_S]
    if len(settled) > 1:
        return sorted(since)
    return sorted(set(since) - set(settled)) if settled else []


def starting(changes: Sequence[Change]) -> tuple[list[str], list[Change]]:
    """Split changes into the machines of the start and later changes."""
    first = [each.machine for each in changes if each.at_s == 0.0 and each.joins]
    return first, [each for each in changes if each.at_s > 0.0]


def interruption_s(changes: Sequence[Change], length_s: float) -> float:
    """Return the mean time between changes after the start: each restarts a job of torchrun."""
    later = [each for each in changes if 0.0 < each.at_s < length_s]
    return length_s / max(1, len({each.at_s for each in later}))


OF_CHANGES = ("trace", "mtbf_min", "speed", "notice_s", "max_machines")
"""Keys of an entry that describe its changes; a row of a table has the entries of one value."""
KEYS = (*OF_CHANGES, "seed", "system")
"""Keys of a measured entry. An entry of a later run with the same values of these keys replaces
it."""


def positive(text: str) -> float:
    """A finite number above zero, as the type of an option."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def positive_number(text: str) -> int:
    """A whole number above zero, as the type of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def seconds(text: str) -> float:
    """A finite time that may be zero, as the type of an option."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the changes to replay."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="a file of lines milliseconds,add|remove,node: 0,add,a")
    source.add_argument(
        "--mtbf",
        type=positive,
        help="minutes of the trace's time between two losses, on average: 10 at --speed 60 is a"
        " loss every 10 s",
    )
    parser.add_argument("--speed", type=positive, default=60.0, help="trace time over real time")
    parser.add_argument(
        "--max", type=positive_number, default=MOST_MACHINES, help="machines at once, at most"
    )
    parser.add_argument("--seconds", type=positive, help="length of the run (600 without a trace)")
    parser.add_argument("--seed", type=int, default=1, help="draws the changes of machines")
    parser.add_argument("--notice", type=seconds, default=0.0, help="seconds from SIGTERM to loss")


def changes_asked(
    parser: argparse.ArgumentParser, asked: argparse.Namespace
) -> tuple[list[Change], float]:
    """Return the changes, and the length of the replay in seconds. Ends the program with a message
    if the trace cannot be read."""
    if asked.trace is not None:
        try:
            with Path(asked.trace).open() as lines:
                levels = read_trace(lines, asked.speed)
            scaled_levels = scaled(levels, asked.max)
        except (OSError, ValueError) as error:
            parser.error(f"--trace {asked.trace}: {error}")
        whole_s = levels[-1].at_s - levels[0].at_s
        return changes_of(scaled_levels, asked.seed), asked.seconds or whole_s
    length_s = asked.seconds or 600.0
    changes = poisson(
        seed=asked.seed,
        mtbf_s=60.0 * asked.mtbf / asked.speed,
        replaced_after_s=60.0 * REPLACED_AFTER_MIN / asked.speed,
        num_machines=asked.max,
        length_s=length_s,
    )
    return changes, length_s


def described(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the options under the names that entries of the results use. An entry without
    `max_machines` has MOST_MACHINES."""
    return {
        "trace": "poisson" if asked.trace is None else Path(asked.trace).stem,
        "mtbf_min": asked.mtbf,
        "speed": asked.speed,
        "seed": asked.seed,
        "notice_s": asked.notice,
        **({} if asked.max == MOST_MACHINES else {"max_machines": asked.max}),
    }
