"""Draws docs/async-tradeoff.svg from bench/results/async_tradeoff.json.

.venv/bin/python bench/async_tradeoff_plot.py
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rows import RESULTS

TARGET = Path(__file__).parents[1] / "docs" / "async-tradeoff.svg"
WIDTH, HEIGHT = 360, 240
LEFT, TOP, RIGHT, BOTTOM = 52, 30, 14, 40
COLOURS = {"damp": "#2266bb", "compensate": "#b06a00", "none": "#b02a37"}
METRIC = re.compile(r"async_(right|staleness|steps)_(damp|none|compensate)_(\d+)")

Series = Mapping[str, Sequence[tuple[float, float]]]


def read() -> dict[str, dict[str, dict[int, float]]]:
    """Read results by figure, policy and number of workers."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in json.loads((RESULTS / "async_tradeoff.json").read_text()):
        match = METRIC.fullmatch(row["metric"])
        if match:
            what, policy, size = match.groups()
            found.setdefault(what, {}).setdefault(policy, {})[int(size)] = row["value"]
    return found


def panel(title: str, series: Series, high: float, unit: str) -> str:
    """Draw one diagram over the number of workers, with its origin at 0."""
    low = 0.0
    most = max(x for points in series.values() for x, _ in points)

    def at_x(value: float) -> float:
        return LEFT + value / most * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{title}</text>']
    for i in range(5):
        value = low + i * (high - low) / 4
        y = at_y(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
        )
        label = f"{value:.0%}" if unit == "%" else f"{value:.0f}"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in sorted({x for points in series.values() for x, _ in points}):
        parts.append(
            f'<text x="{at_x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{value:g}</text>"
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "workers</text>"
    )
    for policy, points in series.items():
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        colour = COLOURS[policy]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour}">'
            f"<title>{policy}, {x:g}: {y:.4g}</title></circle>"
            for x, y in points
        ]
    return "\n".join(parts)


def drawn(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """The whole picture."""

    def series(what: str) -> Series:
        return {
            policy: [(float(size), values[size]) for size in sorted(values)]
            for policy, values in found[what].items()
        }

    fastest = max(value for values in found["steps"].values() for value in values.values())
    ceiling = -(-fastest // 50) * 50 or 50
    panels: list[Callable[[], str]] = [
        lambda: panel("held-out digits classified correctly", series("right"), 1.0, "%"),
        lambda: panel("steps a second, all workers", series("steps"), ceiling, ""),
    ]
    if not fastest:
        panels.pop()  # workers took turns
    body = "\n".join(
        f'<g transform="translate({i * WIDTH} 0)">{draw()}</g>' for i, draw in enumerate(panels)
    )
    legend = "".join(
        f'<text x="{LEFT + 130 * i}" y="{HEIGHT + 16}" fill="{colour}">staleness="{policy}"</text>'
        for i, (policy, colour) in enumerate(COLOURS.items())
        if policy in found["right"]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(panels) * WIDTH} {HEIGHT + 26}"'
        ' font-family="sans-serif" font-size="11" fill="#777">\n'
        f"{body}\n{legend}\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(drawn(read()))
    print(TARGET)
