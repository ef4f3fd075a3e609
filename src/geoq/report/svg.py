"""Pictures as SVG text; their colours are classes of the page, so that one picture serves light and dark."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

# Pictures are 400 units wide; the frame of the square picture has these ends.
WIDTH, LEFT, RIGHT, TOP, BASE = 400, 56, 390, 12, 300


def _tag(tag: str, text: object = "", **attributes: Any) -> str:
    """An element; numbers have at most one decimal."""
    own = ""
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
        own += f' {name.strip("_").replace("_", "-")}="{shown}"'
    return f"<{tag}{own}>{escape(str(text))}</{tag}>" if text != "" else f"<{tag}{own}/>"


def _text(x: float, y: float, text: object, anchor: str = "start", **more: str) -> str:
    return _tag("text", text, x=x, y=y, text_anchor=anchor, **more)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    box = f"0 0 {WIDTH} {height:.1f}".removesuffix(".0")
    return f'<svg viewBox="{box}" role="img">' + _tag("title", title) + "".join(parts) + "</svg>"


def _ticks(low: float, high: float, *, log: bool) -> list[tuple[float, str]]:
    """A few round numbers within the ends with their texts; ends of logarithmic axes are exponents."""
    step = 10.0 ** math.floor(math.log10(high - low) - 0.3)
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    step = max(1.0, round(step)) if log else step
    marks = step * np.arange(math.ceil(low / step), high / step + 1e-9)
    if log and len(marks) < 3:
        decades = np.arange(math.floor(low), math.ceil(high))
        marks = np.add.outer(decades, np.log10([1, 1.5, 2, 3, 5, 7])).reshape(-1)
    return [(m, f"{10**m if log else m:.4g}") for m in marks.tolist() if low <= m <= high]


def _wide(values: np.ndarray, margin: float = 0.03) -> tuple[float, float]:
    extra = margin * float(np.ptp(values)) or 0.5
    return float(values.min()) - extra, float(values.max()) + extra


def exponents(values: np.ndarray) -> np.ndarray:
    """Logarithms of nonnegative numbers; the least ones are at the quantile 0.005 of the positive ones."""
    positive = values[values > 0]
    return np.log10(values.clip(np.quantile(positive, 0.005) if positive.size else 1e-12))


def scatter(series: dict[tuple[str, str], np.ndarray], labels: tuple[str, str], title: str) -> str:
    """Exponents x and y of points, two rows for each kind of mark and name, with the diagonal."""
    ends, parts = _wide(np.concatenate([*series.values()], axis=1)), []
    for mark, text in _ticks(*ends, log=True):
        x, y = (float(np.interp(mark, ends, sides)) for sides in ((LEFT, RIGHT), (BASE, TOP)))
        parts += [_line(x, TOP, x, BASE, "grid"), _line(LEFT, y, RIGHT, y, "grid")]
        parts += [_text(x, BASE + 13, text, "middle"), _text(LEFT - 4, y + 4, text, "end")]
    turned = _text(10, 156, labels[1], "middle", transform="rotate(-90 10 156)")
    parts += [_text((LEFT + RIGHT) / 2, BASE + 30, labels[0], "middle"), turned]
    for row, ((kind, name), (x, y)) in enumerate(series.items()):
        look = "h0" if kind == "dot" else "m-2 -2l4 4m0 -4l-4 4"
        pairs = zip(np.interp(x, ends, (LEFT, RIGHT)), np.interp(y, ends, (BASE, TOP)), strict=True)
        path = "".join(f"M{a:.1f} {b:.1f}{look}".replace(".0", "") for a, b in pairs)
        key = f"M{LEFT + 12} {TOP + 10 + 15 * row}{look}"
        label = _text(LEFT + 20, TOP + 14 + 15 * row, name)
        parts += [_tag("path", class_=kind, d=path + key), label]
    parts.append(_line(LEFT, BASE, RIGHT, TOP, "level"))
    return _picture(BASE + 36, title, parts)


def intervals(rows: Sequence[Sequence[Any]], title: str, level: float, *, log: bool) -> str:
    """A name, a value and the ends of an interval for each row, and the level as a line; more columns are not drawn."""
    numbers, height = np.array([row[1:4] for row in rows], dtype=float), 18 * len(rows) + 30
    drawn, line = (exponents(numbers), math.log10(level)) if log else (numbers, level)
    ends, sides, parts = _wide(np.append(drawn, line)), (140, RIGHT - 48), []
    for mark, text in _ticks(*ends, log=log):
        x = float(np.interp(mark, ends, sides))
        parts += [_line(x, 4, x, height - 22, "grid"), _text(x, height - 8, text, "middle")]
    x = float(np.interp(line, ends, sides))
    parts += [_line(x, 4, x, height - 22, "level")]
    for place, (row, three) in enumerate(zip(rows, np.interp(drawn, ends, sides), strict=True)):
        at, name, (value, low, high) = 16 + 18 * place, str(row[0]), three.tolist()
        label = name if len(name) <= 23 else f"{name[:22]}…"
        parts += [_text(132, at + 4, label, "end"), _text(398, at + 4, f"{row[1]:.3g}", "end")]
        parts += [_line(low, at, high, at, "bar"), _line(value, at, value, at, "point")]
    return _picture(height, title, parts)


def cells(values: np.ndarray, places: np.ndarray | None, title: str) -> str:
    """A map of a grid, its first axis upwards, or of values at places in the plane; darker cells have larger values."""
    wide, tall, more = 6.0, 6.0, {"rx": 3}
    if places is None:
        wide, more = 380 / values.shape[1], {}
        tall = 40.0 if len(values) == 1 else min(wide, 300 / len(values))
        places = np.argwhere(np.ones(values.shape))[:, ::-1] * (wide, tall)
    else:
        places = (places - places.min(axis=0)) * (370 / np.ptp(places, axis=0).max())
    values, height = values.reshape(-1), float(places[:, 1].max()) + tall
    known, parts = ~np.isnan(values), []
    low, high = _wide(values[known], 1e-9)
    size = {"width": wide + 0.4, "height": tall + 0.4} | more
    for (x, y), s in zip(places[known], (values[known] - low) / (high - low), strict=True):
        at = {"x": 10 + x, "y": height - tall - y}
        parts.append(_tag("rect", **at, **size, opacity=f"{0.04 + 0.95 * s:.2f}"))
    size = {"y": height + 10, "width": 10.4, "height": 9}
    parts += [
        _tag("rect", x=100 + 10 * i, **size, opacity=f"{0.04 + i / 20:.2f}") for i in range(20)
    ]
    parts += [_text(95, height + 19, f"{low:.3g}", "end"), _text(305, height + 19, f"{high:.3g}")]
    return _picture(height + 26, title, ['<g class="map">', *parts, "</g>"])
