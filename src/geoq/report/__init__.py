"""A report about a calibration that can be sent to others: one HTML page, or the same content as a model card or as JSON."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from geoq.checks import core_of
from geoq.data.masks import masked_where_nan
from geoq.report.contents import PLANNED, TEST, of_pairs, of_rollouts
from geoq.report.render import FORMATS

__all__ = ["report"]


def report(
    estimator: Any,
    path: str | Path,
    x_test: Any = None,
    y_test: Any = None,
    planned: Any = None,
    *,
    names: Any = None,
    outputs: Any = None,
) -> None:
    """Write what is known about a calibration to one file: the same calibration gives the same bytes.

    Args:
        estimator: a fitted ``GeoQ``, ``RolloutGeoQ``, ``GeoQRegressor`` or ``Labelled``.
        path: ``.html`` is a page without scripts and references; ``.md`` and ``.json`` have its sentences and tables.
        x_test: inputs of pairs that neither surrogate nor ``fit`` has seen; initial states for forecasts, or a pair of initial
            states and forcing. Without them, the held-out errors are counted.
        y_test: their reference outputs; for forecasts the true states after each step.
        planned: queries without reference outputs: how many are safe, and where they are.
        names: names of the inputs; the columns of the table or their numbers if None.
        outputs: names of the outputs, with units if you like.

    Example:
        >>> from geoq import GeoQ, RandomFolds
        >>> from geoq.report import report
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> report(estimator, "report.html", planned=x + 0.5)  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(
            f"path={str(path)!r} has the suffix {path.suffix!r}; choose {', '.join(FORMATS)}."
        )
    if (x_test is None) != (y_test is None):
        raise ValueError("x_test and y_test belong together; pass both, or queries as planned.")
    cases = {TEST: (x_test, y_test), PLANNED: (planned, None)}
    cases = {label: case for label, case in cases.items() if case[0] is not None}
    if hasattr(estimator, "like_"):
        own = estimator
        cases = {n: (_array(own, x, "x"), _array(own, y, "y")) for n, (x, y) in cases.items()}
        names, outputs = names or _names(own, "x"), outputs or _names(own, "y")
    core = core_of(estimator)
    contents = of_rollouts if hasattr(core.fitted_, "reference") else of_pairs
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of means of nothing
        found = contents(core, cases, names, outputs)
    path.write_text(FORMATS[path.suffix](found), encoding="utf-8")


def _array(labelled: Any, part: Any, name: str) -> np.ndarray | None:
    """Samples of labelled arrays in the order of ``fit``; raises for other labels or units."""
    if part is None:
        return None
    like = labelled.like_[name]
    grid = import_module("geoq.xarray").on_grid(part, like, name)
    values = np.ascontiguousarray(grid.transpose(labelled.dim, ..., *like.dims).values)
    if not like.dims and not hasattr(labelled.estimator_.fitted_, "layout"):
        values = values[..., None]
    return masked_where_nan(values) if name == "y" else values


def _names(labelled: Any, name: str) -> list[str] | None:
    """The labels of the values of a row, without the labels of cells."""
    like, layout = labelled.like_[name], getattr(labelled.estimator_.fitted_, "layout", None)
    cells = like.dims[-len(layout.cells) :] if layout and layout.holds(like.shape) else ()
    found = import_module("geoq.xarray").names_of(like.isel(dict.fromkeys(cells, 0)))
    units = like.attrs.get("units")
    return found or ([f"{like.name or name} ({units})"] if units else None)
