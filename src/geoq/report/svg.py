"""Pictures as SVG text; their colours are classes of the page, so that one picture serves light and dark."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

# Pictures are 400 units wide; the frame of the square picture has these ends.
WIDTH, LEFT, RIGHT, TOP, BASE = 400, 56, 390, 12, 300


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: object, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{more}>{escape(str(text))}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line {ends} class="{kind}"/>'


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    start = f'<svg viewBox="0 0 {WIDTH} {_n(height)}" role="img"><title>{escape(title)}</title>'
    return f"{start}{''.join(parts)}</svg>"


def _ticks(low: float, high: float, *, log: bool) -> list[tuple[float, str]]:
    """A few round numbers within the ends with their texts; ends of logarithmic axes are exponents."""
    step = 10.0 ** math.floor(math.log10(high - low) - 0.3)
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    step = max(1.0, round(step)) if log else step
    marks = [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]
    if log and len(marks) < 3:
        marks = [
            n + math.log10(m)
            for n in range(math.floor(low), math.ceil(high))
            for m in (1, 1.5, 2, 3, 5, 7)
        ]
    return [(m, f"{10**m if log else m:.4g}") for m in marks if low <= m <= high]


def _wide(values: Sequence[float], margin: float = 0.03) -> tuple[float, float]:
    low, high = min(values), max(values)
    extra = margin * (high - low) or 0.5
    return low - extra, high + extra


def _axis(ends: tuple[float, float], start: float, stop: float) -> Callable[[Any], Any]:
    return lambda v: start + (v - ends[0]) / (ends[1] - ends[0]) * (stop - start)


def exponents(values: np.ndarray) -> np.ndarray:
    """Logarithms of nonnegative numbers; the least ones are at the quantile 0.005 of the positive ones."""
    positive = values[values > 0]
    return np.log10(values.clip(np.quantile(positive, 0.005) if positive.size else 1e-12))


def scatter(series: dict[tuple[str, str], np.ndarray], labels: tuple[str, str], title: str) -> str:
    """Exponents x and y of points, two rows for each kind of mark and name, with the diagonal."""
    ends = _wide([float(f(points)) for points in series.values() for f in (np.min, np.max)])
    across, up, parts = _axis(ends, LEFT, RIGHT), _axis(ends, BASE, TOP), []
    for mark, text in _ticks(*ends, log=True):
        parts += [_line(across(mark), TOP, across(mark), BASE, "grid")]
        parts += [_line(LEFT, up(mark), RIGHT, up(mark), "grid")]
        parts += [_text(across(mark), BASE + 13, text, "middle")]
        parts += [_text(LEFT - 4, up(mark) + 4, text, "end")]
    parts += [_text((LEFT + RIGHT) / 2, BASE + 30, labels[0], "middle")]
    parts += [_text(10, 156, labels[1], "middle", ' transform="rotate(-90 10 156)"')]
    for (kind, name), (x, y) in series.items():
        look = "h0" if kind == "dot" else "m-2 -2l4 4m0 -4l-4 4"
        path = "".join(f"M{_n(a)} {_n(b)}{look}" for a, b in zip(across(x), up(y), strict=True))
        row = TOP + 14 + 15 * [*series].index((kind, name))
        key = f"M{LEFT + 12} {row - 4}{look}"
        parts += [f'<path class="{kind}" d="{path}{key}"/>', _text(LEFT + 20, row, name)]
    parts.append(_line(across(ends[0]), up(ends[0]), across(ends[1]), up(ends[1]), "level"))
    return _picture(BASE + 36, title, parts)


def intervals(rows: Sequence[Sequence[Any]], title: str, level: float, *, log: bool) -> str:
    """A name, a value and the ends of an interval for each row, and the level as a line; more columns are not drawn."""
    left, right, height = 140, RIGHT - 48, 18 * len(rows) + 30
    numbers = np.array([row[1:4] for row in rows], dtype=float)
    drawn, line = (exponents(numbers), math.log10(level)) if log else (numbers, level)
    ends = _wide([*drawn.reshape(-1).tolist(), line])
    across, parts = _axis(ends, left, right), []
    for mark, text in _ticks(*ends, log=log):
        parts += [_line(across(mark), 4, across(mark), height - 22, "grid")]
        parts += [_text(across(mark), height - 8, text, "middle")]
    parts += [_line(across(line), 4, across(line), height - 22, "level")]
    for place, (row, (value, low, high)) in enumerate(zip(rows, drawn, strict=True)):
        at, name = 16 + 18 * place, str(row[0])
        label = name if len(name) <= 23 else f"{name[:22]}…"
        parts += [
            _text(left - 8, at + 4, label, "end"),
            _text(WIDTH - 2, at + 4, f"{row[1]:.3g}", "end"),
        ]
        parts += [_line(across(low), at, across(high), at, "bar")]
        parts += [_line(across(value), at, across(value), at, "point")]
    return _picture(height, title, parts)


def cells(values: np.ndarray, places: np.ndarray | None, title: str) -> str:
    """A map of a grid, its first axis upwards, or of values at places in the plane; darker cells have larger values."""
    wide, tall, round_ = 6.0, 6.0, ' rx="3"'
    if places is None:
        wide = 380 / values.shape[1]
        tall, round_ = 40.0 if len(values) == 1 else min(wide, 300 / len(values)), ""
        places = np.argwhere(np.ones(values.shape))[:, ::-1] * (wide, tall)
    else:
        places = (places - places.min(axis=0)) * (370 / np.ptp(places, axis=0).max())
    height, known = float(places[:, 1].max()) + tall, ~np.isnan(values.reshape(-1))
    low, high = _wide(values.reshape(-1)[known].tolist(), 1e-9)
    strength = 0.04 + 0.95 * (values.reshape(-1)[known] - low) / (high - low)
    size, parts = f'width="{_n(wide + 0.4)}" height="{_n(tall + 0.4)}"{round_}', []
    for (x, y), s in zip(places[known], strength, strict=True):
        at = f'x="{_n(10 + x)}" y="{_n(height - tall - y)}"'
        parts.append(f'<rect {at} {size} opacity="{s:.2f}"/>')
    for i in range(20):
        at = f'x="{100 + 10 * i}" y="{_n(height + 10)}" width="10.4" height="9"'
        parts.append(f'<rect {at} opacity="{0.04 + 0.05 * i:.2f}"/>')
    parts += [_text(95, height + 19, f"{low:.3g}", "end"), _text(305, height + 19, f"{high:.3g}")]
    return _picture(height + 26, title, ['<g class="map">', *parts, "</g>"])
