r"""The trusted horizon: the steps of a rollout within which the error is expected to stay below a tolerance.

The bound of a rollout holds for each value and each step with probability tau, and not for all of them at once, so a comparison
of the bound with the tolerance is not enough. A step is trusted if all steps up to it are safe, have no bound above the
tolerance :math:`\varepsilon_j`, and have a small enough score,

.. math:: s_n = r_n^{1-a} \, m_n^a < \lambda, \qquad r_n = \max_j \widehat E_{n,j} / \varepsilon_j, \qquad
    m_n = \operatorname{median} \max_{m \le n} r_m, \qquad a = 1/3.

The median is taken over the held-out rollouts. With a = 0 only the bound of the rollout counts. With a = 1 all rollouts are
trusted for the same number of steps, which depends less on differences between the held-out rollouts and the queries. The rule
in between is at least nearly as good as both. For a ``Norm`` the maximum over j is this norm of the bounds, times a conformal factor.

A rollout is broken if its error exceeds the tolerance at a trusted step. Let t be the first step at which it does,
:math:`t = \min\{n : E_{n,j} > \varepsilon_j \text{ for some } j\}`. A rollout whose steps up to t are all safe can be broken only
if :math:`M = \max_{m \le t} s_m < \lambda`. The calibration chooses the largest :math:`\lambda` for which few enough held-out
rollouts are broken.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import is_tensor, to_numbers
from geoq.checks import check_integer, check_quantile, shortened
from geoq.quantiles import conformal_factor, error_ratios, inverse_cdf_quantile, n_required
from geoq.rollout.features import Reference
from geoq.rollout.series import PerStep, Places, Values

# With more numbers than this, a file has only the largest bound and error of each step of the held-out rollouts.
MOST_STORED = 2**22
# The smallest typical ratio, against a division by zero, and the weight a of the typical ratio in the score of a step.
TINY, WEIGHT = 1e-30, 1 / 3


@dataclass(frozen=True)
class Relative:
    r"""A tolerance relative to the spread of the data.

    .. math:: \varepsilon_j = f \sigma_j

    Here :math:`\sigma_j` is the standard deviation of coordinate j over all states of the data, and the fraction f is 0.1 for 10
    % of it. The tolerance does not depend on units, nor on a mean value such as 273 K. A constant coordinate has no tolerance.

    Example:
        >>> Relative(0.1)
        Relative(fraction=0.1)
    """

    fraction: float


@dataclass(frozen=True)
class EveryValue:
    """A tolerance of every value, as a number alone means. Others reduce the ratios of a step to a ``norm``, which has this name."""

    tolerance: Any
    norm = ""

    def reduce(self, ratio: Values) -> PerStep:
        return np.asarray(ratio.max(axis=2))

    def over(self, values: Any) -> PerStep:
        """Errors or bounds of rollouts over the tolerance in numbers, as one number per step: at most 1 if they keep it."""
        values, limit = np.asarray(values), np.ravel(self.tolerance)
        values, counts = values.reshape(*values.shape[:2], -1), np.isfinite(limit)
        if counts.any() and not counts.all():
            values, limit = values[:, :, counts], limit[counts]
        with np.errstate(invalid="ignore"):
            ratio = self.reduce(values / limit)
        # An infinite bound exceeds every tolerance, even an infinite one.
        return np.where(np.isinf(values).any(axis=2), np.inf, ratio)


@dataclass(frozen=True)
class Norm(EveryValue):
    """A tolerance of the root mean square over the values of a step, where each error is divided by its tolerance.

    The tolerance is a number, an array in the shape of the output, or ``Relative(0.3)``. Infinite ones do not count.

    Example:
        >>> Norm(5.0).over(np.array([[[1.0, 7.0]]]))
        array([[1.]])
    """

    norm = "root mean square error"

    def reduce(self, ratio: Values) -> PerStep:
        return np.asarray(np.sqrt(np.square(ratio, dtype=float).mean(axis=2)))


@dataclass(frozen=True)
class Trust:
    """The rule for trusted horizons at one tolerance, and the numbers behind it.

    Attributes:
        limit: lambda; a step is trusted if its score is less than this limit and no bound exceeds its tolerance.
        typical: m, the median of the largest ratio of bound and tolerance up to each step, over the held-out rollouts.
        broken: an upper limit of the expected fraction of new rollouts, exchangeable with the held-out ones, whose error exceeds
            the tolerance within their trusted horizon: 1 - quantile if the held-out rollouts do not overlap, and more otherwise.
        n_rollouts: the number of held-out rollouts.
        n_apart: the number of held-out rollouts that do not overlap: their trusted steps have no true state in common.
        quantile: tau, the quantile level of the bound.
        factor, tolerance: the conformal factor of each step on the norm of the bounds, 1 without a norm; the tolerance in numbers.
    """

    limit: float
    typical: tuple[float, ...]
    broken: float
    n_rollouts: int
    n_apart: int
    quantile: float
    factor: tuple[float, ...]
    tolerance: EveryValue = field(compare=False)

    def ratio(self, bound: Values) -> PerStep:
        """The largest bound over its tolerance, or the bound of the norm; past the calibration horizon with the last factor."""
        factor = np.take(self.factor, np.arange(bound.shape[1]), mode="clip")
        return self.tolerance.over(bound) * factor

    def within(self, ratio: PerStep) -> Bool[np.ndarray, " n n_steps"]:
        """Whether the bounds of each step within the calibration horizon are small enough, given their ratios to the tolerance."""
        known = ratio[:, : len(self.typical)]
        score = scores(known, np.array(self.typical[: known.shape[1]]))
        past = (0, 0), (0, ratio.shape[1] - known.shape[1])
        return np.pad((known <= 1) & (score < self.limit), past)

    @property
    def largest_ratio(self) -> tuple[float, ...]:
        """The ratio of bound and tolerance that ends the trust, for each step of the calibration horizon; at most 1."""
        typical = np.array(self.typical)
        limit = self.limit / typical.clip(min=TINY) ** WEIGHT
        ratio = np.minimum(1.0, limit ** (1 / (1 - WEIGHT)))
        return tuple(np.where(np.isfinite(typical), ratio, 0.0).tolist())

    def __str__(self) -> str:
        of = self.tolerance.norm and f" of the {self.tolerance.norm}"
        overlap = (
            f"; it would be {100 * (1 - self.quantile):.2g} % if these rollouts did not overlap, but only {self.n_apart} of them "
            "do not: give longer or more trajectories"
        )
        return (
            f"the trusted horizon is calibrated on {self.n_rollouts} held-out rollouts, so that at most {100 * self.broken:.2g} "
            f"% of such rollouts are expected to exceed the tolerance{of} within it{overlap * (self.broken > 1 - self.quantile)}"
        )


@dataclass(frozen=True)
class HeldOutRollouts:
    """Bounds and errors along the held-out rollouts, on which trusted horizons and joint bands are calibrated.

    From the step at which a rollout diverges its bounds are infinite and its errors nan. ``supported`` is the supported horizon of
    each rollout and ``start`` the row of the data that it starts from. ``excess`` is the largest ratio of error and bound over all
    coordinates of a step, 0 where no error counts.
    """

    bound: Values
    error: Values
    supported: Places
    start: Places
    quantile: float
    excess: PerStep

    @staticmethod
    def of(
        bound: Values, error: Values, supported: Places, start: Places, quantile: float
    ) -> "HeldOutRollouts":
        ratio = np.nan_to_num(error_ratios(error, bound), posinf=np.inf).reshape(error.shape)
        return HeldOutRollouts(bound, error, supported, start, quantile, ratio.max(axis=2))

    def largest(self) -> "HeldOutRollouts":
        """The same rollouts for a file: only the largest bound and error of each step if there are too many numbers."""
        if self.bound.size <= MOST_STORED:
            return self
        bound, error = (part.max(axis=2, keepdims=True) for part in (self.bound, self.error))
        return replace(self, bound=bound, error=error)

    def trust(self, tolerance: EveryValue) -> Trust:
        """Calibrate the rule for this tolerance. A larger tolerance never gives a shorter horizon.

        ``n_allowed`` of the held-out rollouts may be broken, as if none overlapped: this is split conformal prediction of M. If
        only G of them have trusted steps that do not overlap, ``Trust.broken`` states the limit of ``n_allowed`` for G.
        """
        (n, n_steps, _), miss = self.bound.shape, 1 - self.quantile
        error, bound, factor = *map(tolerance.over, (self.error, self.bound)), np.ones(n_steps)
        if tolerance.norm:
            each = (own[~np.isnan(own), None] for own in error_ratios(error, bound).T)
            found = np.array([conformal_factor(own, self.quantile) for own in each])
            factor = found.clip(TINY, 1 / TINY)
        first, ratio = n_leading(~(error > 1)), bound * factor
        # Rows that have diverged are infinite from there on, so that a median is infinite once half of them have.
        typical = inverse_cdf_quantile(np.maximum.accumulate(ratio, axis=1), 0.5)
        score = np.maximum.accumulate(scores(ratio, typical), axis=1)
        reached = score[np.arange(n), first.clip(max=n_steps - 1)]
        critical = np.where(first < self.supported, reached, np.inf)
        limit = float(np.sort(critical)[n_allowed(n, n, miss)])
        trusted = n_leading((ratio <= 1) & (score < limit))
        longest = int(np.minimum(trusted, self.supported).max())
        apart = count_apart(self.start, max(1, longest))
        most = (apart * int((critical < limit).sum()) / n + 1) / (apart + 1)
        known = tuple(typical.tolist()), max(miss, most), n, apart, self.quantile
        return Trust(limit, *known, tuple(factor.tolist()), tolerance)

    def joint_factor(self, n_steps: int, confidence: float) -> float:
        """The factor K of ``RolloutAssessment.joint_band``.

        It is a conformal quantile of the largest ratio of error and bound of each held-out rollout within these steps. Rollouts
        that overlap within them count as one group.
        """
        check_integer(n_steps, "n_steps", 1)
        check_quantile(confidence, "confidence")
        n, n_measured = self.excess.shape
        if n_steps > n_measured:
            raise ValueError(
                f"n_steps={n_steps}, but errors were measured for {n_measured} steps, the calibration horizon; lower n_steps or "
                "raise n_calibration."
            )
        n_apart, required = count_apart(self.start, n_steps), n_required(confidence)
        if n_apart < required:
            raise ValueError(
                f"confidence={confidence} needs {required} held-out rollouts that do not overlap, but with n_steps={n_steps} "
                f"there are {n_apart}; lower n_steps or confidence, or give longer or more trajectories."
            )
        largest = np.sort(self.excess[:, :n_steps].max(axis=1))[::-1]
        return float(largest[n_allowed(n, n_apart, 1 - confidence)])


def scores(ratio: PerStep, typical: Float[np.ndarray, " n_steps"]) -> PerStep:
    """The score s of each step; infinite where half of the held-out rollouts have diverged."""
    score = ratio.astype(float) ** (1 - WEIGHT) * typical.clip(min=TINY) ** WEIGHT
    return np.where(np.isinf(typical), np.inf, score)


def n_leading(holds: Bool[np.ndarray, " n n_steps"]) -> Places:
    """The number of steps before the first one at which the condition does not hold."""
    return np.asarray(np.logical_and.accumulate(holds, axis=1).sum(axis=1))


def count_apart(start: Places, n_steps: int) -> int:
    """The largest number of rollouts of ``n_steps`` steps from these rows that do not overlap.

    Example:
        >>> count_apart(np.array([0, 4, 5, 9]), n_steps=5)
        2
    """
    count, end = 0, -1
    for row in np.sort(start).tolist():
        if row >= end:
            count, end = count + 1, row + n_steps
    return count


def n_allowed(n_rollouts: int, n_apart: int, miss: float) -> int:
    r"""The largest number of held-out rollouts that may be broken so that a new one is broken with probability ``miss``.

    .. math:: \frac{G}{G+1} \frac{a}{n} + \frac{1}{G+1} \le \text{miss}

    Here G of the n rollouts do not overlap. It is at least 0.
    """
    fraction = (miss * (n_apart + 1) - 1) / n_apart
    return max(0, math.floor(n_rollouts * fraction + 1e-9))


def tolerance_of(tolerance: Any, reference: Reference, n_stored: int) -> EveryValue | None:
    """The tolerance in numbers; raises unless it is positive, and one number or one for each of the stored coordinates."""
    if tolerance is None:
        return None
    asked = tolerance if isinstance(tolerance, EveryValue) else EveryValue(tolerance)
    given, layout, known = asked.tolerance, reference.layout, reference.coordinates
    number = given.fraction if isinstance(given, Relative) else given
    largest = np.asarray(to_numbers(number, "tolerance") if is_tensor(number) else number)
    if largest.dtype.kind not in "fiu" or not (largest > 0).all():
        raise ValueError(
            f"tolerance={shortened(tolerance)}, but a tolerance must be positive; pass positive numbers, or Relative(0.1) for 10 % "
            "of the standard deviations, alone or in Norm, or None for no tolerance."
        )
    if largest.ndim and largest.shape != layout.output:
        raise ValueError(
            f"tolerance has shape {largest.shape}, but the bounded output has shape {layout.output}; pass that shape or a number."
        )
    if number is not given:
        spread = np.where(known.constant, np.inf, known.scale).reshape(-1)[layout.places]
        largest = np.asarray(largest * spread.reshape(layout.output))
    if (largest.ndim or asked.norm) and n_stored < len(layout.places):
        raise ValueError(
            f"tolerance={shortened(tolerance)}, but the file has only the largest of the {len(layout.places)} errors of each step; pass "
            "a number, use the estimator that was saved, or lower n_starts or n_calibration, so that the file has all errors."
        )
    return replace(asked, tolerance=largest)
