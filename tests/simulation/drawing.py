"""Curves as an SVG: few enough to be written by hand, and the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLOURS = ("#1b6ca8", "#d98032", "#3a8f5c", "#8a5fb0", "#7a7a7a")
WIDTH, HEIGHT = 430, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 42


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: curves by name over the same places, from 0 to `most`."""

    title: str
    unit: str
    places: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    most: float


def draw(panels: Sequence[Panel]) -> str:
    """The panels side by side, with one legend."""
    names = [*dict.fromkeys(name for panel in panels for name in panel.curves)]
    colours = dict(zip(names, COLOURS, strict=False))
    width, height = WIDTH * len(panels), HEIGHT + 24 * -(-len(names) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{'; '.join(panel.title for panel in panels)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH} 0)">')
        parts += _panel(panel, colours)
        parts.append("</g>")
    for number, name in enumerate(names):
        x, y = LEFT + (number % 2) * WIDTH, HEIGHT + 8 + 24 * (number // 2)
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colours[name]}" '
            f'stroke-width="2.5"/><text x="{x + 32}" y="{y + 4}" fill="#222">{name}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    left, right = LEFT, WIDTH - RIGHT
    top, bottom = TOP, HEIGHT - BOTTOM

    def x_of(place: float) -> float:
        return left + (right - left) * place

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * min(value, panel.most) / panel.most

    parts = [f'<text x="{left}" y="18" font-weight="600" fill="#222">{panel.title}</text>']
    for step in range(5):
        value = panel.most * step / 4
        y = y_of(value)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e3e3"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>'
        )
    parts += [
        f'<text x="{x_of(place):.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">'
        f"{place:g}</text>"
        for place in panel.places
    ]
    parts.append(
        f'<text x="{(left + right) / 2}" y="{bottom + 32}" text-anchor="middle" fill="#555">'
        f"load of the workers; {panel.unit} upwards</text>"
    )
    for name, values in panel.curves.items():
        points = " ".join(
            f"{x_of(place):.1f},{y_of(value):.1f}"
            for place, value in zip(panel.places, values, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2.5"/>'
        )
    return parts
