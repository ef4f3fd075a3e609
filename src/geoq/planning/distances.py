r"""How bounds fall when data come nearer: a power of the distance, fitted to the calibration.

.. math:: \widehat E(x) \approx s(x) \, g(d(x)), \qquad g(d) = (d + d_0)^p

Here d is the distance to the nearest point of the data. The exponent p is the slope of log bound over log distance at the calibration
tuples, and the local factor s makes the law equal to the bound at each query.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat, take
from geoq.bounds.protocol import bounds_of
from geoq.checks import core_of
from geoq.core.agreement import mean_of_each
from geoq.core.fitted import Fitted
from geoq.core.geometry import Features
from geoq.neighbors import Neighbors

# The law is fitted to at most this many tuples, or this many numbers of fields; d_0 is this fraction of their median distance.
MAX_TUPLES, MAX_NUMBERS, OFFSET = 2000, 2**22, 0.1
# The limits of the exponent.
EXPONENTS = (0.25, 2.0)


def calibration_of(estimator: Any) -> Fitted:
    """What a fitted ``GeoQ`` has found; raises for rollouts and for files without the calibration."""
    fitted = core_of(estimator).fitted_
    if not isinstance(fitted, Fitted):
        raise TypeError(
            f"planning works with bounds of single answers, got {type(estimator).__name__}; pass a fitted GeoQ or GeoQRegressor."
        )
    if fitted.tuples is None:
        raise ValueError(
            "planning needs the calibration tuples, but the file was saved with calibration=False; save it with them."
        )
    return fitted


def mean_over_field(values: np.ndarray) -> Float[np.ndarray, " n"]:
    """One number per row: the mean of the values that count, 0 without any."""
    return np.nan_to_num(mean_of_each(values), posinf=np.inf)


@dataclass(frozen=True)
class Located:
    """Rows of inputs with their coordinates, the mean bounds over their fields, the predictions and the flags."""

    rows: Any
    z: Float[np.ndarray, " n m"]
    bound: Float[np.ndarray, " n"]
    prediction: Float[np.ndarray, " n *output"]
    safe: Any

    @staticmethod
    def of(fitted: Fitted, x: Any, name: str) -> "Located":
        """Ask the calibration; raises for rows of another shape and for rows without an answer."""
        try:
            rows = fitted.rows_of(x)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from exc

        def parts(features: Features, gaps: Any) -> dict[Any, np.ndarray]:
            safe = fitted.flags(features)[1]
            bound = mean_over_field(fitted.scaled_bound(features, gaps, safe))
            z = features.inputs if fitted.metric is None else fitted.metric(features.inputs)
            return {"z": flat(z), "bound": bound, "prediction": features.prediction, "safe": safe}

        found, lost = fitted.of_all(rows, parts)
        if lost.any():
            row = int(lost.argmax())
            raise ValueError(f"{name}[{row}] has no bound: {fitted.why_lost(rows, row, None)}.")
        return Located(rows, **found)

    def __len__(self) -> int:
        return len(self.bound)

    def of_rows(self, chosen: np.ndarray) -> "Located":
        """Some of the rows."""
        values = (v[chosen] for v in (self.z, self.bound, self.prediction, self.safe))
        return Located(take(self.rows, chosen), *values)


@dataclass(frozen=True)
class DistanceLaw:
    """The power law g and the points of the data."""

    exponent: float
    offset: float
    points: Float[np.ndarray, " n m"]

    @staticmethod
    def of(fitted: Fitted) -> "DistanceLaw":
        """Fit the exponent to the bounds of some calibration tuples."""
        assert fitted.tuples is not None
        tuples = fitted.tuples
        some = tuples.subsample(max(64, min(MAX_TUPLES, MAX_NUMBERS // fitted.error[:1].size)))
        bound = mean_over_field(bounds_of(fitted.bound, some.features))
        distance, weight = some.relation.nearest, some.weight
        offset = OFFSET * max(float(np.median(distance)), 1e-12)
        a, b = np.log(distance + offset), np.log(np.maximum(bound, 1e-300))
        a, b = a - weight @ a / weight.sum(), b - weight @ b / weight.sum()
        slope = float((weight * a * b).sum() / max(float((weight * a * a).sum()), 1e-300))
        return DistanceLaw(
            float(np.clip(slope, *EXPONENTS)), offset, flat(fitted.geometry.points.normalized)
        )

    def __call__(self, distance: Any) -> Any:
        """The law g."""
        return (distance + self.offset) ** self.exponent

    def nearest(self, z: Float[np.ndarray, " n m"]) -> tuple[np.ndarray, np.ndarray]:
        """The distance to the nearest point of the data, and its row."""
        distance, row = Neighbors(self.points).nearest(z, 1)
        return distance[:, 0], row[:, 0]
