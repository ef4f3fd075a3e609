r"""The default scheme for rollouts: the bound grows with the distance to the data and saturates at the climatology.

This is a departure from the paper. The paper's sum of increments grows without limit, but the error of a chaotic system
saturates: after some time the forecast is no closer to the truth than a random state of the data. The bound of coordinate j at
step n is

.. math:: \widehat E_{n,j} = k_{n,j} \, c_j \,
    \Bigl(\frac{\overline{\Delta d}_n}{\delta}\Bigr)^{\beta (1 - w_n)^2}
    \Bigl(\frac{C_j(\widehat u_{n,j})}{s_j}\Bigr)^{w_n}, \qquad
    \log \overline{\Delta d}_n = \frac1n \sum_{m < n} \log \Delta d(\widehat u_m)

The parts are fitted on the held-out rollouts in this order:

- :math:`\overline{\Delta d}_n`, the geometric mean of the support distances (eq:dd) of the states before step n, is clipped to
  the range between its 5 % and 95 % quantiles in the calibration at this step. :math:`\delta` is its median in all steps.
- :math:`C_j(v)` is the climatology, the tau quantile of \|v - u_j\| over the states u of the data, with the median :math:`s_j`.
- :math:`w_n`, the degree of saturation from 0 to 1, is the median error of the held-out rollouts at step n, divided by its mean
  over the last sixth of the calibration horizon, made nondecreasing in n and clipped to at most 1.
- :math:`\beta` is chosen from a grid by the pinball loss; 0 means that the distance does not improve the bound.
- :math:`c_j`, the scale of coordinate j, is either :math:`s_j` or the mean of all :math:`s_j`, whichever has the smaller pinball
  loss. One scale for all coordinates suits the points of one field; it does not suit quantities of different kinds.
- :math:`k_{n,j}` is the conformal factor of step n, see ``step_factors``: one for each coordinate of a small state and one for
  each group of a few coordinates of a large state. Conformal risk control with whole rollouts as rows gives the smallest factor
  for which the expected coverage of the group at step n is at least tau, for a new rollout that has not diverged and is
  exchangeable with the held-out ones. The factor is zero where all held-out errors are zero.

Past the calibration horizon, k and w keep their last values, so the bound does not grow further. With :math:`\beta = 0` and w =
0 the bound is one number per step. With w = 1 and :math:`c_j = s_j` it is one factor per step times the climatology.
"""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from geoq.checks import check_numbers
from geoq.quantiles import inverse_cdf_quantile, n_required, pinball_loss
from geoq.rollout.features import RolloutCalibration, RolloutFeatures
from geoq.rollout.series import PerStep, Values

EXPONENTS = tuple(0.25 * i for i in range(13))
# The number of steps at which exponents are compared, equally spaced in log(n), because exponents differ in the early steps.
N_COMPARED = 30
# The error is saturated in the last 1 / LATE of the calibration horizon.
LATE = 6
# Quantile levels between which the mean distance is clipped.
CLIPPED = (0.05, 0.95)
# Up to this many coordinates have a conformal factor each. More coordinates form groups of neighbouring ones.
MOST_SINGLE, GROUP_SIZE = 32, 8


@dataclass(frozen=True)
class SaturatingGrowth:
    """A bound that grows with the distance to the data and saturates at the climatology; the module has the formula.

    Attributes:
        exponents: the values of beta to choose from. With ``(0.0,)`` the bound does not depend on the distance.

    Example:
        >>> SaturatingGrowth(exponents=(0.0, 0.5, 1.0))
        SaturatingGrowth(exponents=(0.0, 0.5, 1.0))
    """

    exponents: tuple[float, ...] = EXPONENTS

    def __post_init__(self) -> None:
        check_numbers(self.exponents, "exponents", least=0)
        if not self.exponents:
            raise ValueError("exponents=() is empty; pass for example (0.0, 0.5, 1.0).")

    def fit(self, calibration: RolloutCalibration, quantile: float) -> "FittedGrowth":
        """Fit all parts on the held-out rollouts."""
        features, error = calibration.features, calibration.error
        alive, climatology = features.alive, features.climatology
        if not alive.any():
            raise ValueError(
                f"all {len(calibration)} calibration rollouts diverge at their first step, so there is no error to fit the bound "
                "to; train the surrogate longer, or standardise its states."
            )
        # Medians, so that one fold surrogate with very large errors does not determine the bound of all others.
        typical = inverse_cdf_quantile(climatology[alive], 0.5)
        # The climatology of a coordinate that never varies is zero; the median of its errors takes its place.
        typical = np.where(typical > 0, typical, inverse_cdf_quantile(error[alive], 0.5))
        typical = np.where(typical > 0, typical, 1.0)
        least = np.finfo(features.support_distance.dtype).tiny
        median = inverse_cdf_quantile(features.support_distance[alive], 0.5)
        floor = max(1e-6 * float(median), float(least))
        passed = _passed(features.support_distance, floor)
        centre = float(inverse_cdf_quantile(passed[alive], 0.5))
        # After every rollout has diverged the bound is infinite, whatever the clipped range is.
        known = np.where(alive, passed, np.where(alive.any(axis=0), np.nan, centre))
        low, high = np.nanquantile(known, CLIPPED, axis=0)
        saturation = _saturation(error, alive), typical[None]
        growth = FittedGrowth(0.0, floor, centre, typical, typical, low, high, *saturation)
        return _scaled(growth, calibration, quantile, self.exponents)


@dataclass(frozen=True)
class FittedGrowth:
    r"""The fitted parts of the bound.

    These are beta, the smallest distance, :math:`\log \delta`, s, c, the range of the mean logarithm of distances, w and k.
    """

    exponent: float
    floor: float
    centre: float
    typical: Float[np.ndarray, " n_coordinates"]
    scale: Float[np.ndarray, " n_coordinates"]
    low: Float[np.ndarray, " n_calibrated"]
    high: Float[np.ndarray, " n_calibrated"]
    saturation: Float[np.ndarray, " n_calibrated"]
    factor: Float[np.ndarray, " _ n_coordinates"]

    def __call__(self, features: RolloutFeatures) -> Values:
        shape = _shape(self.exponent, self.scale, *self.parts(features))
        return np.asarray(_extended(self.factor, features.n_steps) * shape)

    def describe(self) -> str:
        """The fitted bound in words."""
        half = int((self.saturation < 0.5).sum()) + 1
        return (
            f"the error grows like the distance to the power {self.exponent:g} and is half saturated at step {half}; the mean "
            f"bound after saturation is {float((self.factor[-1] * self.scale).mean()):.3g}"
        )

    def parts(self, features: RolloutFeatures) -> tuple[PerStep, Values]:
        """The logarithm of the factor of the distance for beta = 1, and the factor of the climatology."""
        low, high, saturation = (
            _extended(part, features.n_steps) for part in (self.low, self.high, self.saturation)
        )
        passed = _passed(features.support_distance, self.floor).clip(low, high)
        climatology = features.climatology
        relative = np.where(climatology > 0, climatology / self.typical, 1.0)
        growth = (1 - saturation) ** 2 * (passed - self.centre)
        return growth, relative ** saturation[:, None]


def _scaled(
    growth: FittedGrowth, calibration: RolloutCalibration, quantile: float, exponents: Any
) -> FittedGrowth:
    """Choose the scales and the exponent by the pinball loss, and set the conformal factors."""
    error, parts = calibration.error, growth.parts(calibration.features)
    steps = np.logspace(0, math.log10(calibration.n_steps), N_COMPARED)
    compared = sorted({round(step) - 1 for step in steps.tolist()})

    def loss(choice: tuple[np.ndarray, float]) -> float:
        """The sum over the compared steps of the pinball loss divided by the mean error of the step."""
        scale, exponent = choice
        shape = _shape(exponent, scale, *(part[:, compared] for part in parts))
        own = error[:, compared]
        factor = group_quantiles(counted_ratios(own, shape), np.full(len(compared), quantile))
        lost = np.nansum(pinball_loss(own, factor * shape, quantile), axis=(0, 2))
        size = np.nansum(own, axis=(0, 2))
        return float((lost[size > 0] / size[size > 0]).sum())

    # One scale for all coordinates varies less between data sets than one for each coordinate.
    common = np.full_like(growth.typical, growth.typical.mean())
    scale, exponent = min(product((common, growth.typical), exponents), key=loss)
    factor = step_factors(error, _shape(exponent, scale, *parts), quantile)
    return replace(growth, exponent=exponent, scale=scale, factor=factor)


def _shape(exponent: float, scale: np.ndarray, growth: PerStep, base: Values) -> Values:
    """The bound without the conformal factors k."""
    return np.asarray(scale * np.exp(exponent * growth)[..., None] * base)


def _passed(distance: PerStep, floor: float) -> PerStep:
    """The mean logarithm of the distances up to each step."""
    total = np.log(distance.clip(min=floor)).cumsum(axis=1)
    return np.asarray(total / np.arange(1, distance.shape[1] + 1))


def _saturation(error: Values, alive: np.ndarray) -> Float[np.ndarray, " n_steps"]:
    """The degree of saturation w at each step."""
    # After every rollout has diverged the bound is infinite, whatever the degree of saturation.
    lasting = np.asarray(alive.any(axis=0))
    typical = nondecreasing(inverse_cdf_quantile(error.mean(axis=2)[:, lasting], 0.5))
    late = typical[-max(1, len(typical) // LATE) :].mean()
    saturation = np.ones(len(lasting))
    saturation[lasting] = (typical / late).clip(max=1) if late > 0 else 1.0
    return saturation


def _extended(values: np.ndarray, n_steps: int) -> np.ndarray:
    """The values of ``n_steps`` steps; the last one is repeated past the calibration horizon."""
    return np.asarray(values[np.arange(n_steps).clip(max=len(values) - 1)])


# Conformal factors of each step, calibrated for groups of coordinates


def coordinate_groups(n_coordinates: int) -> list[slice]:
    """The coordinates that have their conformal factors in common.

    Example:
        >>> len(coordinate_groups(3)), coordinate_groups(64)[:2]
        (3, [slice(0, 8, None), slice(8, 16, None)])
    """
    size = 1 if n_coordinates <= MOST_SINGLE else GROUP_SIZE
    return [slice(i, i + size) for i in range(0, n_coordinates, size)]


def counted_ratios(error: Values, shape: Values) -> Values:
    """Errors divided by ``shape``, with nan for the values that do not count.

    A coordinate counts at a step if any rollout has an error there: the copied values of a window of lags, fixed boundary values
    and constant parameters would otherwise count as covered.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(without_error(error), np.nan, error / shape)


def without_error(error: Values) -> Bool[np.ndarray, " n_steps n_coordinates"]:
    """Whether all errors of a coordinate at a step are zero or nan."""
    return ~np.asarray((error > 0).any(axis=0))


def group_quantiles(ratio: Values, level: Float[np.ndarray, " n_steps"]) -> np.ndarray:
    """The quantile of the ratios of each group at each step, repeated for its coordinates; zero if none of them counts."""
    n_steps, parts = ratio.shape[1], []
    for columns in coordinate_groups(ratio.shape[2]):
        values = ratio[:, :, columns]
        ordered = np.sort(values.swapaxes(0, 1).reshape(n_steps, -1), axis=1)  # nan comes last
        n = (~np.isnan(ordered)).sum(axis=1)
        place = (np.minimum(np.ceil(n * level - 1e-9), n) - 1).clip(min=0).astype(int)
        found = np.nan_to_num(ordered[np.arange(n_steps), place], posinf=np.inf)
        parts.append(np.repeat(found[:, None], values.shape[2], axis=1))
    return np.concatenate(parts, axis=1)


def step_factors(
    error: Values, shape: Values, quantile: float
) -> Float[np.ndarray, " n_steps n_coordinates"]:
    r"""The conformal factor of each step and coordinate on the bounds ``shape``.

    .. math:: k_n = \max(\text{isotonic regression of } q_n(\tau), \; q_n(\tau - 2 \sqrt{\tau (1 - \tau) / m_n}))

    Here m is the number of rollouts that have not diverged at step n. The factor :math:`q_n(\tau)` is the smallest one for which
    a new rollout that has not diverged is expected to have the fraction tau of its values in the group covered. Isotonic
    regression reduces the noise between the steps. The second term limits what the regression can take from a step, in a system
    whose errors decrease. The factors are infinite from the first step with too few rollouts, and zero without errors.
    """
    ratio = counted_ratios(error, shape)
    n_alive = (~np.isnan(error).all(axis=2)).sum(axis=0)
    enough = np.logical_and.accumulate(n_alive >= n_required(quantile))
    n_alive = n_alive.clip(min=1)
    factor = group_quantiles(ratio, quantile * (n_alive + 1) / n_alive)
    slack = 2 * np.sqrt(quantile * (1 - quantile) / n_alive)
    least = group_quantiles(ratio, (quantile - slack).clip(min=0))
    n_finite = int(enough.sum())
    smooth = np.full_like(factor, np.inf)
    for columns in coordinate_groups(factor.shape[1]):
        column = nondecreasing(factor[:n_finite, columns.start])
        column = np.maximum(column, least[:n_finite, columns.start])
        smooth[:n_finite, columns] = column[:, None]
    smooth[:n_finite][without_error(error)[:n_finite]] = 0.0
    return smooth


def nondecreasing(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Isotonic regression of the values before the first infinite one; all values after it become infinite."""
    from scipy.optimize import isotonic_regression  # here: a slow import

    smooth, finite = np.full(len(values), np.inf), np.logical_and.accumulate(np.isfinite(values))
    if finite.any():
        smooth[finite] = isotonic_regression(values[finite]).x
    return smooth
