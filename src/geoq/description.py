"""A fitted estimator in a few sentences: its data, its folds, its bound and its safe region."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from geoq.checks import check_fitted
from geoq.conformal import ConformalFactors
from geoq.crossfit import CalibrationSet

if TYPE_CHECKING:
    from geoq.estimator import GeoQ


@runtime_checkable
class Describes(Protocol):
    """A fitted increment model that can be described in words."""

    def describe(self) -> str: ...


def describe(geoq: "GeoQ") -> str:
    """The text of ``GeoQ.describe``."""
    check_fitted(geoq, "probes_")
    return " ".join([_calibration(geoq), _bound(geoq), _region(geoq)])


def _calibration(geoq: "GeoQ") -> str:
    if not isinstance(geoq.calibration_, CalibrationSet):
        return f"{len(geoq.error_)} points; the file was saved without the calibration tuples."
    calibration = geoq.calibration_
    n_folds = len(calibration.fold.unique())
    return (
        f"{len(geoq.error_)} points, held out {len(calibration)} times in all by {n_folds} folds; the mean error of the deployed "
        f"surrogate at these points is {float(geoq.error_size_.mean()):.3g}, and the mean error of the fold surrogates at held-out "
        f"points of the random folds is {float(calibration.error[calibration.interpolating].mean()):.3g}."
    )


def _bound(geoq: "GeoQ") -> str:
    model, metric = geoq.increment_model_, geoq.metric_
    text = f"The increment model is {type(model).__name__}."
    if isinstance(model, Describes):
        text = model.describe().rstrip(".") + "."
    if metric is None:
        return text
    names = None if geoq.schema_ is None else list(geoq.schema_.names)
    influence = metric.describe(names)
    return f"{text} {influence[:1].upper()}{influence[1:]}."


def _region(geoq: "GeoQ") -> str:
    text = f"Safe means {geoq.safe_region_.meaning[0]}."
    factors = geoq.conformal_factors_
    if factors == ConformalFactors():
        return f"{text} No coverage is guaranteed, since conformalize was not called."
    return (
        f"{text} The bounds are multiplied by the conformal factors {factors.safe:.3g} (safe) and {factors.unsafe:.3g} (not safe), "
        f"from {factors.n_pairs} pairs that were set aside."
    )
