"""A fitted estimator in a few sentences: its data, its folds, its bound and its safe region."""

from typing import TYPE_CHECKING

import numpy as np

from geoq.core.conformal import ConformalFactors
from geoq.core.opinion import Comparison

if TYPE_CHECKING:
    from geoq.core.fitted import Fitted


def describe(fitted: "Fitted") -> str:
    """The text of ``GeoQ.describe``."""
    return " ".join([_calibration(fitted), _bound(fitted), _guarantee(fitted)])


def _calibration(fitted: "Fitted") -> str:
    n, tuples, kind = len(fitted.error), fitted.tuples, fitted.layout.described()
    if tuples is None:
        return f"{n} {kind}; the file was saved without the calibration tuples."
    comparison = Comparison.of(tuples)
    also = "" if comparison is None else f" {comparison.sentence(fitted.output_names)}."
    inner = tuples[tuples.interpolating].error
    present = ~np.isnan(inner)
    held_out = float(inner[present].mean()) if present.any() else 0.0
    scheme = fitted.families[int(tuples[tuples.interpolating].family[0])]
    by_folds = f", and of the fold surrogates at held-out points of {scheme} it is {held_out:.3g}"
    return (
        f"{n} {kind}, held out {len(tuples)} times in all by {int(tuples.fold.max()) + 1} folds. The mean error of the deployed "
        f"surrogate at these points is {float(fitted.error_size.mean()):.3g}{by_folds if tuples.anchor_errors is not None else ''}.{also}"
    )


def _bound(fitted: "Fitted") -> str:
    bound, metric = fitted.bound, fitted.metric
    text = f"The bound is a {type(bound).__name__}."
    if hasattr(bound, "describe"):
        text = bound.describe().rstrip(".") + "."
    if metric is None:
        return text
    influence = metric.describe(fitted.schema)
    return f"{text} {influence[:1].upper()}{influence[1:]}."


def _guarantee(fitted: "Fitted") -> str:
    text = "Safe means within the region of the held-out points."
    factors = fitted.conformal
    if factors == ConformalFactors():
        return f"{text} No coverage is guaranteed, since conformalize was not called."
    return (
        f"{text} The bounds are multiplied by the conformal factors {factors.safe:.3g} (safe) and {factors.unsafe:.3g} (not safe), "
        f"from {factors.n_pairs} pairs that were set aside."
    )
