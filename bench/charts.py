"""Plots as SVG, in colours that show on light and on dark pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, BAR, LABEL, FIGURE = 720, 18, 250, 110
OWN = "#00796b"
OTHERS = ("#9e9e9e", "#b0803c", "#7b6fa8", "#a85a6a", "#5f8aa8")
HEAD = ' font-family="sans-serif" font-size="12" fill="#808080">'
PLOT_HEIGHT, LEFT, BOTTOM, LEGEND = 320, 48, 36, 20


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    value: float
    unit: str
    is_own: bool
    """True for Shoal's figures."""


def bars(groups: Mapping[str, Sequence[Bar]]) -> str:
    """Groups of bars, each group to its own scale, as units differ."""
    heights = [len(group) * BAR + 16 for group in groups.values()]
    height = sum(heights) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"{HEAD}']
    width, top = WIDTH - LABEL - FIGURE, 10
    for (name, group), own_height in zip(groups.items(), heights, strict=True):
        most = max(bar.value for bar in group) or 1.0
        parts.append(f'<text x="0" y="{top + len(group) * BAR // 2 + 4}">{escape(name)}</text>')
        for row, bar in enumerate(group):
            y, length = top + row * BAR, max(1.0, width * bar.value / most)
            colour = OWN if bar.is_own else OTHERS[0]
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{length:.1f}"'
                f' height="{BAR - 4}" fill="{colour}"/>'
            )
            label = escape(f"{bar.label}: {bar.value:.3g} {bar.unit}".rstrip())
            parts.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + BAR - 7}">{label}</text>')
        top += own_height
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line, or published points of peers if `is_points`."""

    label: str
    points: Sequence[tuple[float, float]]
    is_own: bool = False
    is_points: bool = False


def lines(series: Sequence[Line], *, x_title: str, x_ticks: Sequence[float]) -> str:
    """Shares of 0 to 1 over a logarithmic axis."""
    low, high = math.log(x_ticks[0]), math.log(x_ticks[-1])
    bottom = PLOT_HEIGHT - BOTTOM

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * (math.log(value) - low) / (high - low)

    def y_of(share: float) -> float:
        return 10 + (bottom - 10) * (1 - share)

    height = PLOT_HEIGHT + LEGEND * len(series)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"{HEAD}']
    for tenth in range(0, 11, 2):
        y = y_of(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="#808080" opacity="0.3"/>')
        parts.append(f'<text x="4" y="{y + 4:.1f}">{10 * tenth} %</text>')
    for tick in x_ticks:
        parts.append(
            f'<text x="{x_of(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.0f}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{PLOT_HEIGHT - 4}">{escape(x_title)}</text>')
    others = 0
    for place, line in enumerate(series):
        colour = OWN if line.is_own else OTHERS[others % len(OTHERS)]
        others += not line.is_own
        at = [(x_of(x), y_of(y)) for x, y in line.points]
        key = PLOT_HEIGHT + LEGEND * place + 8
        if line.is_points:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in at]
            parts.append(f'<circle cx="{LEFT + 12}" cy="{key}" r="4" fill="{colour}"/>')
        else:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
            parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
            parts.append(f'<path d="M{LEFT} {key}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 32}" y="{key + 4}">{escape(line.label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
