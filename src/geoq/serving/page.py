"""The page of the service: one file without references, and what it shows of the estimator."""

from pathlib import Path
from typing import Any

import numpy as np

from geoq.arrays import flat, to_numbers
from geoq.data.coordinates import Part
from geoq.serving.served import Served

HTML = (Path(__file__).parent / "page.html").read_text()
# With more inputs there are no sliders. Sliders reach beyond the data by this fraction of their range.
MOST, BEYOND = 24, 0.25


def content(served: Served) -> dict[str, Any]:
    """The inputs with the ends of their sliders, the names of the outputs, and the quantile level."""
    fitted, columns = served.estimator.fitted_, served.columns
    start, shape = flat(to_numbers(fitted.probes, "probes")), fitted.coordinates.input_shape
    known = {"quantile": fitted.quantile, "outputs": fitted.output_names or ()}
    if start.shape[1] > MOST:
        return {"inputs": [], **known}
    low, high = np.nanmin(start, axis=0), np.nanmax(start, axis=0)
    values = flat(fitted.coordinates.inverse(fitted.geometry.points.inputs))
    for j in np.flatnonzero(fitted.coordinates.is_part(Part.VALUE)):
        place = fitted.coordinates.input_of[j]
        low[place], high[place] = values[:, j].min(), values[:, j].max()
    margin = BEYOND * (high - low)
    inputs: list[dict[str, Any]] = [
        {"name": f"input {j}", "kind": "number", "ends": ends, "start": start[0, j]}
        for j, ends in enumerate(zip(low - margin, high + margin, strict=True))
    ]
    for own, name in zip(inputs, served.names or (), strict=False):
        own["name"] = name
    for own, column in zip(inputs, columns or (), strict=False):
        own |= {"name": column.name, "kind": column.kind, "levels": column.levels}
    return {"inputs": inputs, "shape": shape if columns is None else None, **known}
