r"""Optimisation on a surrogate: a constraint for the optimisers of SciPy, and a search whose trust region is the bound.

The search follows Yue and Meerbergen (2013) and Keil et al. (2021): the region is not a ball, but all safe inputs whose objective has
an error bound of at most the radius. A candidate is compared with the best simulated value J* in three cases. If J - e > J*, it cannot be
better, and it is left out without a simulation. Otherwise the simulator is asked. A value below J* is accepted, and the radius is
doubled if the decrease is at least 3/4 of the predicted one; any other value is rejected, and the radius is halved.
"""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import NonlinearConstraint
from scipy.stats import qmc

from geoq.arrays import flat, native
from geoq.checks import check_function, check_integer, core_of, is_number, shortened
from geoq.core.fitted import Fitted
from geoq.core.geometry import Features
from geoq.data.metric import rows_like
from geoq.data.process import Process
from geoq.planning.distances import calibration_of, mean_over_field
from geoq.regions.region import SAFE

# Logarithms of scores and bounds are clipped to this range, because optimisers do not accept infinite numbers.
LARGEST = 50.0
# Inputs that are compared in each round; widths of the clouds around the best input, as fractions of the box.
N_COMPARED, WIDTHS = 2048, (0.2, 0.05, 0.01)
# A decrease of at least this fraction of the predicted one doubles the radius; a new best value is this much lower, relative to the
# deviation of the objective in the data.
GOOD, SMALLEST = 0.75, 1e-3
# An input that is nearer to the data than this fraction of the typical distance is not asked.
NEAR = 1e-3


def constraint(estimator: Any, tolerance: Any = None) -> NonlinearConstraint:
    """A constraint for ``scipy.optimize.minimize``: the input is safe, and its bound is at most the tolerance.

    Both values are logarithms: of the support score, which is continuous, and of the bound divided by the tolerance, which jumps
    where the nearest point changes. The methods COBYQA and SLSQP accept it. The bound of several outputs or of a field is its mean.

    Args:
        estimator: a ``GeoQ`` or ``GeoQRegressor`` that was fitted on an array.
        tolerance: the largest bound; None leaves the bound out.

    Returns:
        A constraint for the argument ``constraints``.
    """
    fitted = calibration_of(estimator)
    if tolerance is not None and not (is_number(tolerance) and tolerance > 0):
        raise ValueError(
            f"tolerance={tolerance!r} must be one positive number, which the mean of the bounds of all outputs is compared with; for "
            "one output use an error_functional of this output."
        )

    def values(x: Any) -> np.ndarray:
        answer = fitted.parts_of(_rows(fitted, np.asarray(x, dtype=float)[None]))[0]
        found = [answer["support_score"]]
        if tolerance is not None:
            found.append(mean_over_field(answer["error_hat"]) / tolerance)
        with np.errstate(divide="ignore"):
            logs = np.log(np.nan_to_num(np.concatenate(found).astype(float), nan=np.inf))
        return logs.clip(-LARGEST, LARGEST)

    return NonlinearConstraint(values, -np.inf, np.log(SAFE))


def _rows(fitted: Fitted, x: np.ndarray) -> Any:
    """Flattened inputs as queries of the kind of the data."""
    shaped = x.reshape(len(x), *fitted.coordinates.input_shape)
    return fitted.rows_of(native(rows_like(shaped, fitted.probes)))


class TrustRegionSearch:
    """Minimise an objective of the simulator with few simulations, where the bound of the surrogate is small.

    Each ``ask`` returns an input to be simulated, and ``tell`` receives its output, with which a copy of the estimator is updated
    (``GeoQ.update``). Every accepted optimum is simulated. Where the calibration has a Gaussian process, the prediction that is
    minimised is the process, limited to the bounds around the surrogate; otherwise it is the surrogate. The search stays in the safe
    region: it improves a design, and it does not look for a global optimum outside the data.

    Args:
        estimator: a ``GeoQ`` or ``GeoQRegressor`` that was fitted on an array; it is not changed.
        objective: a function of predictions, one row per input, which returns one number per row.
        bounds: the lowest and the largest value of each input.
        radius: the first largest error of the objective in the region, in units of its standard deviation in the data.
        random_state: seed of the inputs that are compared.

    Attributes:
        best: the best simulated input, its output and its objective.
        estimator: the updated copy, a ``GeoQ``.
    """

    def __init__(
        self,
        estimator: Any,
        objective: Callable[[Any], Any],
        bounds: Any,
        *,
        radius: float = 0.25,
        random_state: int = 0,
    ) -> None:
        fitted = calibration_of(estimator)
        check_function(objective, "objective", "objective(predictions)")
        check_integer(random_state, "random_state")
        if fitted.schema is not None:
            raise TypeError(
                "the search moves numbers, but GeoQ was fitted on a data frame; fit it on an array of its numbers."
            )
        if not (is_number(radius) and radius > 0):
            raise ValueError(f"radius={radius!r} must be a positive number.")
        self.objective, self.random_state, self.n_asked = objective, random_state, 0
        self.estimator, self.radius = copy(core_of(estimator)), radius
        assert fitted.tuples is not None
        outputs = fitted.tuples.points.outputs
        inputs = flat(fitted.coordinates.inverse(fitted.tuples.points.inputs))
        self._box(bounds, inputs.shape[1])
        known = self._objective(outputs, "the outputs of the data")
        self._scale = float(known.std()) or 1.0
        inside = (abs(inputs - self.low - self.width / 2) <= (0.5 + 1e-9) * self.width).all(axis=1)
        if not inside.any():
            raise ValueError(
                "no point of the data is within bounds, so the search has no start; choose bounds that contain some data."
            )
        row = int(np.flatnonzero(inside)[known[inside].argmin()])
        start = inputs[row].reshape(fitted.coordinates.input_shape)
        self.best: tuple[Any, Any, float] = start, outputs[row], float(known[row])
        self._asked: np.ndarray | None = None
        self._exhausted = False

    def _box(self, bounds: Any, n: int) -> None:
        """The lowest values and the widths of the inputs; raises for other shapes and empty intervals."""
        box = np.asarray(bounds, dtype=float)
        if box.shape != (n, 2) or not np.isfinite(box).all() or not (box[:, 0] < box[:, 1]).all():
            raise ValueError(
                f"bounds={shortened(bounds)} must be one pair (lowest, largest) of finite numbers for each of the {n} inputs."
            )
        self.low, self.width = box[:, 0], box[:, 1] - box[:, 0]

    def _objective(self, values: Any, of: str) -> Float[np.ndarray, " n"]:
        """The objective as numbers; raises unless there is a finite one per row."""
        found = np.asarray(self.objective(values), dtype=float)
        if found.shape != (len(values),):
            raise ValueError(
                f"objective returned shape {found.shape} for {len(values)} rows of {of}; return one number per row."
            )
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found))[0])
            raise ValueError(
                f"objective returned {found[row]} for row {row} of {of}; return a finite number for every prediction."
            )
        return found

    @property
    def done(self) -> bool:
        """Whether no safe input has a predicted value below the best one that its bound allows."""
        if self._asked is None and not self._exhausted:
            self._asked = self._next()
            self._exhausted = self._asked is None
        return self._asked is None

    def ask(self) -> np.ndarray:
        """The next input to simulate."""
        if self.done or self._asked is None:
            raise RuntimeError(
                "the search is done, and best is the result; ask only while done is False."
            )
        return self._asked.reshape(self.estimator.fitted_.coordinates.input_shape)

    def tell(self, x: Any, y: Any) -> None:
        """The output of the simulator at an input, of ``ask`` or another one."""
        fitted = self.estimator.fitted_
        point, output = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        own, shape = fitted.coordinates.input_shape, fitted.output_shape
        if point.shape != own or output.shape != shape:
            raise ValueError(
                f"tell(x, y) received x of shape {point.shape} and y of shape {output.shape}, but one input has shape {own} and one output "
                f"{shape}."
            )
        value = float(self._objective(output[None], "y")[0])
        expected = self.best[2] - self._compared(point.reshape(1, -1))[0][0]
        self.estimator.update(native(_rows(fitted, point[None])), output[None])
        decrease = self.best[2] - value
        if decrease > 0:
            self.best = point, output, value
            self.radius *= 2 if decrease >= GOOD * expected else 1
        else:
            self.radius /= 2
        self._asked, self._exhausted, self.n_asked = None, False, self.n_asked + 1

    def _next(self) -> np.ndarray | None:
        """The input with the lowest predicted value in the region, which is widened while it has no input that can be better."""
        rng = np.random.default_rng((self.random_state, self.n_asked))
        found, least = np.ravel(self.best[0]), np.inf

        def around(n: int, width: float) -> np.ndarray:
            steps = rng.normal(size=(n, len(self.low))) * width * self.width
            return (found + steps).clip(self.low, self.low + self.width)

        box = self.low + self.width * qmc.Sobol(len(self.low), rng=rng).random(N_COMPARED)
        cloud = np.concatenate([box, *(around(N_COMPARED // 4, width) for width in WIDTHS)])
        for width in WIDTHS:
            value, error, usable = self._compared(cloud)
            if math.isinf(least) and not usable.any():
                return None
            while not (inside := usable & (error <= self.radius * self._scale)).any():
                if math.isfinite(least):
                    break
                self.radius *= 2
            value = np.where(inside, value, np.inf)
            if value.min() < least:
                found, least = cloud[int(value.argmin())], float(value.min())
            cloud = around(N_COMPARED // 8, width / 5)
        return found

    def _compared(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predicted values of the objective, their error bounds, and which inputs are safe and can be better than the best one."""
        fitted = self.estimator.fitted_

        def parts(features: Features, gaps: Any) -> dict[Any, np.ndarray]:
            safe = fitted.flags(features)[1]
            bound, own = fitted.scaled_bound(features, gaps, safe), features.prediction
            if bound.shape != own.shape:
                raise TypeError(
                    f"a bound has shape {bound.shape[1:]} and an output {own.shape[1:]}, so the bound of the objective is unknown; use "
                    "error_functional=absolute_error."
                )
            mean = own
            if isinstance(fitted.process, Process) and features.opinion is not None:
                mean = np.clip(features.opinion.mean.reshape(own.shape), own - bound, own + bound)
            value = self._objective(own, "predictions")
            ends = [
                abs(self._objective(end, "predictions") - value)
                for end in (own - bound, own + bound)
            ]
            near: Any = features.relation
            return {
                "near": near.nearest,
                "value": self._objective(mean, "predictions"),
                "of": value,
                "error": np.maximum(*ends),
                "safe": safe,
            }

        found, lost = fitted.of_all(_rows(fitted, x), parts)
        value, smallest = found["value"], SMALLEST * self._scale
        usable = found["near"] > NEAR * fitted.typical.support_distance
        usable &= found["safe"] & ~lost & (value < self.best[2] - smallest)
        usable &= found["of"] - found["error"] < self.best[2] - smallest
        return value, found["error"], usable
