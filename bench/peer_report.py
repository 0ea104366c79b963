"""Tables and figures of docs/report.md, from the recorded results: part of `make report`.

The page's text is written by hand. The tables between `<!-- NAME -->` and `<!-- /NAME -->` are made
from docs/benchmarks/results/NAME.json; there are none if that bench has not been recorded. The list
between `<!-- ahead -->` and `<!-- /ahead -->` is made from all of them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from charts import Bar, bars
from rows import cell_text
from training.changes import OF_CHANGES

Entries = Sequence[Mapping[str, Any]]
PAGE = "report.md"
AHEAD = "ahead"
"""Name of the block that lists where a peer is better."""
PEERS = ("torchrun", "torchft")


def page_with(page: str, results: Mapping[str, Entries]) -> str:
    """The page with every block filled from the results. Raises ValueError unless the page has each
    block once."""
    for name, block in BLOCKS.items():
        entries = results.get(name, ())
        parts = []
        if entries:
            parts = [block(ended(entries)), *failures(entries), origin(name, entries)]
        page = filled(page, name, parts)
    return filled(page, AHEAD, ahead(results))


def filled(page: str, name: str, parts: Sequence[str]) -> str:
    """The page with the paragraphs in this block."""
    pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    text = "".join(f"\n{part}\n" for part in parts)
    page, found = pattern.subn(lambda match: text, page)
    if found != 1:
        raise ValueError(f"{PAGE} has {found} blocks {name}, expected one")
    return page


def figures(results: Mapping[str, Entries]) -> dict[str, str]:
    """Figures as SVG, by file name; figures that a bench writes itself are left out."""
    entries = ended(results.get("trace", ()))
    return {"trace": bars(effective_bars(entries))} if entries else {}


def ended(entries: Entries) -> Entries:
    """Entries of the runs that got to their end."""
    return [entry for entry in entries if "failed" not in entry]


def failures(entries: Entries) -> list[str]:
    """A sentence on the runs that have no row; none if there are none."""
    named = [
        f"`{entry['system']}` with seed {entry['seed']} ({entry['failed']})"
        for entry in entries
        if "failed" in entry
    ]
    return [f"Did not get to the end: {', '.join(named)}."] if named else []


def origin(name: str, entries: Entries) -> str:
    """Markdown with the days, the machines and the commands of the measurements."""
    days = sorted({entry["day"] for entry in entries})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    machines = "; ".join(sorted({entry["machine"] for entry in entries}))
    commands = sorted({entry["command"] for entry in entries})
    how = "Computed" if name == "goodput_model" else "Measured"
    return "\n".join(
        [f"{how} {span} ({machines}):\n", "```sh", *map(_with_python, commands), "```"]
    )


def _with_python(command: str) -> str:
    return f".venv/bin/python {command}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell_text, row))} |" for row in rows)])


def grouped(entries: Entries, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Any]]:
    """Entries by the values of these keys."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for entry in entries:
        found.setdefault(tuple(entry.get(key) for key in keys), []).append(entry)
    return found


def in_order(groups: Mapping[tuple[Any, ...], list[Any]]) -> list[tuple[Any, list[Any]]]:
    """Groups in the order of traces, Shoal's systems first in each."""
    traces = list(dict.fromkeys(key[:-1] for key in groups))
    systems = dict.fromkeys(key[-1] for key in groups)
    names = sorted(systems, key=lambda name: not name.startswith("shoal"))
    keys = [(*trace, name) for trace in traces for name in names]
    return [(key, groups[key]) for key in keys if key in groups]


def middle(entries: Entries, key: str) -> float:
    return median(entry[key] for entry in entries)


def trace_name(entry: Mapping[str, Any]) -> str:
    """The changes of an entry, with the options that are not the bench's defaults."""
    mtbf_min, notice_s, most = (entry.get(key) for key in ("mtbf_min", "notice_s", "max_machines"))
    name = entry["trace"] if mtbf_min is None else f"a loss every {mtbf_min:g} min"
    notice = f", notice {notice_s:g} s" if notice_s else ""
    return f"{name}, {entry['speed']:g} x{notice}" + (f", 1 to {most} machines" if most else "")


def distance(entries: Entries) -> str:
    """The largest distance, and the number of runs in which nothing trained at the end."""
    found = [entry["distance"] for entry in entries if entry["distance"] is not None]
    stopped = len(entries) - len(found)
    # A NaN is the largest: `max` alone skips one that is not the first.
    largest = max(found, key=lambda each: (math.isnan(each), each), default=0.0)
    parts = [f"{largest:.1e}"] if found else []
    return " ".join([*parts, f"({stopped} had stopped)"] if stopped else parts)


OF_TRACE = (*OF_CHANGES, "system")


def trace_table(entries: Entries) -> str:
    rows = []
    for (*_, system), own in in_order(grouped(entries, OF_TRACE)):
        changed = [entry for entry in own if entry["changes"]]
        low, high = (of(entry["effective"] for entry in own) for of in (min, max))
        spread = f" ({100 * low:.1f} to {100 * high:.1f})" if len(own) > 1 else ""
        rows.append(
            (
                trace_name(own[0]),
                system,
                len(own),
                f"{100 * middle(own, 'effective'):.1f} %{spread}",
                middle(own, "steps_per_s"),
                1e3 * middle(own, "step_s"),
                round(middle(own, "changes")),
                middle(changed, "paused_per_change_s") if changed else None,
                max(entry["longest_pause_s"] for entry in own),
                round(middle(own, "steps_twice")),
                max(entry["steps_lost"] for entry in own),
                distance(own),
            )
        )
    head = (
        *("changes of machines", "system", "seeds", "effective time", "useful steps a second"),
        *("step, ms", "changes", "paused per change, s", "longest pause, s", "steps trained twice"),
        *("steps lost", "distance to one process"),
    )
    picture = "![Effective time by system](benchmarks/trace.svg)\n\n"
    return picture + table(head, rows)


def effective_bars(entries: Entries) -> dict[str, list[Bar]]:
    found: dict[str, list[Bar]] = {}
    for (*_, system), own in in_order(grouped(entries, OF_TRACE)):
        found.setdefault(trace_name(own[0]), []).append(
            Bar(
                label=system,
                value=100 * middle(own, "effective"),
                unit="%",
                is_own=system.startswith("shoal"),
            )
        )
    return found


def async_trace_table(entries: Entries) -> str:
    rows = [
        (
            trace_name(entry),
            *(entry["seed"], entry["changes"], entry["losses"]),
            *(entry["pushes"], entry["pushes_per_s"], entry["longest_pause_s"]),
            *(entry["samples_lost"], entry["samples_unlogged"]),
        )
        for entry in entries
    ]
    head = (
        *("changes of machines", "seed", "changes", "losses", "pushes", "pushes a second"),
        *("longest time without a push, s", "samples lost", "samples not written down"),
    )
    return table(head, rows)


def long_run_table(entries: Entries) -> str:
    rows = []
    for (system, steps), own in grouped(entries, ("system", "steps")).items():
        rows.append(
            (
                system,
                len(own),
                steps,
                round(middle(own, "kills")),
                middle(own, "seconds_without"),
                middle(own, "seconds"),
                f"{middle(own, 'relative'):.3f}",
                round(middle(own, "steps_twice")),
                max(entry["steps_lost"] for entry in own),
                distance(own),
            )
        )
    head = (
        *("system", "seeds", "steps", "kills", "s without kills", "s with kills", "relative"),
        *("steps trained twice", "steps lost", "distance to one process"),
    )
    return table(head, rows)


def kills_table(entries: Entries) -> str:
    runs = [
        (
            *(entry["system"], entry["kills"], f"{entry['kills_per_minute']:.1f}"),
            *(entry["steps"], f"{entry['distance']:.1e}"),
            f"{entry['shm_files'][0]} to {entry['shm_files'][-1]}",
            f"{entry['shm_bytes'][0]:,} to {entry['shm_bytes'][-1]:,}",
        )
        for entry in entries
    ]
    head = ("system", "kills", "kills a minute", "steps", "distance to one process")
    first = table((*head, "files in /dev/shm", "bytes in /dev/shm"), runs)
    growth = [
        (
            *(entry["system"], process),
            *(
                f"{entry['samples'][0][process][key]:,} to {entry['samples'][-1][process][key]:,}"
                for key in ("memory_kib", "threads", "files")
            ),
            own["memory_kib"],
        )
        for entry in entries
        for process, own in entry["growth_per_kill"].items()
    ]
    second = ("system", "process", "memory, KiB", "threads", "files", "KiB per kill")
    return f"{first}\n\n{table(second, growth)}"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure in which systems are compared, as the tables show it."""

    key: str
    name: str
    form: str = "{:.4g}"
    of: Callable[[Iterable[float]], float] = median
    is_more_better: bool = False

    def value(self, entries: Entries) -> float | None:
        """The figure of these runs; None if no run has it."""
        found = [entry[self.key] for entry in entries if entry[self.key] is not None]
        return self.of(found) if found else None

    def text(self, value: float) -> str:
        return self.form.format(value).replace("%", " %")

    def is_better(self, value: float, other: float) -> bool:
        return value > other if self.is_more_better else value < other


SECONDS = "{:.4g} s"
IN_TRACE = (
    Compared(key="effective", name="effective time", form="{:.1%}", is_more_better=True),
    Compared(key="steps_per_s", name="useful steps a second", is_more_better=True),
    Compared(key="step_s", name="step", form=SECONDS),
    Compared(key="paused_per_change_s", name="paused per change", form=SECONDS),
    Compared(key="longest_pause_s", name="longest pause", form=SECONDS, of=max),
    Compared(key="steps_twice", name="steps trained twice"),
    Compared(key="steps_lost", name="steps lost", of=max),
)
IN_LONG_RUN = (
    Compared(key="seconds_without", name="time without kills", form=SECONDS),
    Compared(key="seconds", name="time with kills", form=SECONDS),
    Compared(key="relative", name="relative", form="{:.3f}"),
    Compared(key="steps_twice", name="steps trained twice"),
    Compared(key="steps_lost", name="steps lost", of=max),
)


def ahead(results: Mapping[str, Entries]) -> list[str]:
    """A list of all figures in which a peer was better than Shoal; empty without results."""
    lines: list[str] = []
    for entries in grouped(ended(results.get("trace", ())), OF_CHANGES).values():
        lines += lines_ahead(trace_name(entries[0]), entries, IN_TRACE)
    for (steps,), entries in grouped(ended(results.get("long_run", ())), ("steps",)).items():
        lines += lines_ahead(f"{steps:,} steps", entries, IN_LONG_RUN)
    for (metric,), entries in grouped(results.get("rows", ()), ("metric",)).items():
        value = entries[0]["value"]
        better = {
            entry["peer"]: entry["peer_value"] for entry in entries if entry["peer_value"] > value
        }
        if better:
            others = ", ".join(f"{peer} {cell_text(other)}" for peer, other in better.items())
            lines.append(f"- `{metric}`, million rows a second: {cell_text(value)} ({others}).")
    return ["\n".join(lines)] if lines else []


def lines_ahead(protocol: str, entries: Entries, compared: Sequence[Compared]) -> list[str]:
    """A line for each system of Shoal with the figures in which a peer is better."""
    by_system = {system: own for (system,), own in grouped(entries, ("system",)).items()}
    peers = [name for name in by_system if name in PEERS]
    lines = []
    for system in (name for name in by_system if name.startswith("shoal")):
        found = []
        for figure in compared:
            value = figure.value(by_system[system])
            others = {peer: figure.value(by_system[peer]) for peer in peers}
            better = [
                f"{peer} {figure.text(other)}"
                for peer, other in others.items()
                if value is not None and other is not None and figure.is_better(other, value)
            ]
            if value is not None and better:
                found.append(f"{figure.name} {figure.text(value)} ({', '.join(better)})")
        if found:
            lines.append(f"- {protocol}, `{system}`: {'; '.join(found)}.")
    return lines


SHOWN_MACHINES = ("8", "128", "2048", "32768", "131072")


def goodput_table(entries: Entries) -> str:
    computed = [entry for entry in entries if entry["what"] == "computed"]
    rows = [
        (
            *(entry["system"], entry["constants"], entry["pause_s"], entry["checkpoint_s"]),
            round(entry["machine_mtbf_h"]),
            *(f"{100 * entry['effective'][number]:.1f} %" for number in SHOWN_MACHINES),
        )
        for entry in computed
    ]
    head = ("computed for", "constants", "pause, s", "checkpoint, s", "hours between failures")
    first = table((*head, *(f"{int(number):,} machines" for number in SHOWN_MACHINES)), rows)
    published = [
        (entry["system"], entry["gpus"], f"{100 * entry['effective']:.0f} %", entry["source"])
        for entry in entries
        if entry["what"] == "published"
    ]
    sources = [
        (entry["system"], entry["source"])
        for entry in computed[: len(computed) // 2]
        if entry["constants"] == "published"
    ]
    second = table(("published by others", "GPUs", "effective time", "source"), published)
    third = table(("constants of others", "source"), sources)
    picture = "![Effective time by number of machines](benchmarks/goodput_model.svg)\n\n"
    return f"{picture}{first}\n\n{second}\n\n{third}"


def rows_table(entries: Entries) -> str:
    metrics = list(dict.fromkeys(entry["metric"] for entry in entries))
    peers = list(dict.fromkeys(entry["peer"] for entry in entries))
    rows = []
    for metric in metrics:
        own = {entry["peer"]: entry for entry in entries if entry["metric"] == metric}
        value = next(iter(own.values()))["value"]
        rows.append((metric, value, *(own[peer]["peer_value"] for peer in peers)))
    return table(("million rows a second", "Shoal", *peers), rows)


BLOCKS: Mapping[str, Callable[[Entries], str]] = {
    "trace": trace_table,
    "async_trace": async_trace_table,
    "long_run": long_run_table,
    "kills": kills_table,
    "goodput_model": goodput_table,
    "rows": rows_table,
}
