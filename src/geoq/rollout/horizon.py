r"""The trusted horizon: the steps of a rollout within which the error is expected to stay below a tolerance.

The bound of a rollout holds for each value and each step with probability tau. It does not hold for all of them at once: with
tau = 0.95, about one of twenty values exceeds its bound. A comparison of the bound with the tolerance is therefore not enough.
The rule for the horizon has one parameter :math:`\lambda`, which is calibrated on the held-out rollouts. A step is trusted if
all steps up to it are safe, have no bound above the tolerance :math:`\varepsilon_j`, and have a small enough score,

.. math:: s_n = r_n^{1-a} \, m_n^a < \lambda, \qquad r_n = \max_j \widehat E_{n,j} / \varepsilon_j, \qquad
    m_n = \operatorname{median} \max_{m \le n} r_m, \qquad a = 1/3.

The median is taken over the held-out rollouts. With a = 0 only the bound of the rollout counts. With a = 1 all rollouts are
trusted for the same number of steps, which depends less on differences between the held-out rollouts and the queries. The rule
in between is at least nearly as good as both.

A rollout is called broken if its error exceeds the tolerance at a trusted step. Let t be the first step at which the error
exceeds the tolerance, and M the largest score up to this step,

.. math:: t = \min\{n : E_{n,j} > \varepsilon_j \text{ for some } j\}, \qquad M = \max_{m \le t} s_m.

A rollout whose steps up to t are all safe can be broken only if :math:`M < \lambda`. So M is the critical value of
:math:`\lambda` for this rollout. The calibration chooses the largest :math:`\lambda` for which few enough held-out rollouts
are broken; ``HeldOutRollouts.trust`` gives the number.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from geoq.arrays import chunks
from geoq.rollout.trajectories import PerStep, Values

# A file contains the bounds and errors of all coordinates of the held-out rollouts if these are at most this many numbers
# each; otherwise it contains only the largest of each step.
MOST_STORED = 2**22
# The smallest typical ratio; it avoids a division by zero.
TINY = 1e-30
# The weight a of the typical ratio in the score of a step.
WEIGHT_OF_TYPICAL = 1 / 3


@dataclass(frozen=True)
class Trust:
    """The rule for trusted horizons at one tolerance, and the numbers behind it.

    Attributes:
        limit: lambda; a step is trusted if its score is less than this limit and no bound exceeds its tolerance.
        typical: m, the median of the largest ratio of bound and tolerance up to each step, over the held-out rollouts.
        broken: the expected fraction of new rollouts, exchangeable with the held-out rollouts, whose error exceeds the
            tolerance within their trusted horizon is at most this. It is 1 - quantile if the held-out rollouts do not
            overlap, and more otherwise.
        n_rollouts: the number of held-out rollouts.
        n_apart: the number of held-out rollouts that do not overlap: their trusted steps have no true state in common.
        quantile: tau, the quantile level of the scheme.
    """

    limit: float
    typical: tuple[float, ...]
    broken: float
    n_rollouts: int
    n_apart: int
    quantile: float

    def within(self, ratio: PerStep) -> Bool[Tensor, " n n_steps"]:
        """Whether the bounds of each step are small enough, given their largest ratio to the tolerance.

        No step past the calibration horizon is within, because no error was measured there.
        """
        n_steps = min(ratio.shape[1], len(self.typical))
        known, holds = ratio[:, :n_steps], torch.zeros_like(ratio, dtype=torch.bool)
        typical = known.new_tensor(self.typical[:n_steps], dtype=torch.float64)
        holds[:, :n_steps] = (known <= 1) & (scores(known, typical) < self.limit)
        return holds

    @property
    def largest_ratio(self) -> tuple[float, ...]:
        """The ratio of bound and tolerance that ends the trust, for each step of the calibration horizon; at most 1."""
        exponent = 1 / (1 - WEIGHT_OF_TYPICAL)
        return tuple(
            min(1.0, (self.limit / max(typical, TINY) ** WEIGHT_OF_TYPICAL) ** exponent)
            if math.isfinite(typical)
            else 0.0
            for typical in self.typical
        )

    def __str__(self) -> str:
        statement = (
            f"the trusted horizon is calibrated on {self.n_rollouts} held-out rollouts, so that at most "
            f"{100 * self.broken:.2g} % of such rollouts are expected to exceed the tolerance within it"
        )
        if self.broken <= 1 - self.quantile:
            return statement
        return (
            f"{statement}; it would be {100 * (1 - self.quantile):.2g} % if these rollouts did not overlap, but only "
            f"{self.n_apart} of them do not: give longer or more trajectories"
        )


@dataclass(frozen=True)
class HeldOutRollouts:
    """Bounds and errors along the held-out rollouts, on which trusted horizons are calibrated.

    Attributes:
        bound: the bounds; infinite from the step at which a rollout diverges. If a file could not contain all coordinates,
            there is one coordinate, with the largest bound of each step.
        error: the true errors, of the same shape.
        supported: the supported horizon of each rollout.
        start: the row of the data that each rollout starts from.
        quantile: tau, the quantile level of the scheme.
        excess: the largest ratio of error and bound over all coordinates, for each step.
    """

    bound: Values
    error: Values
    supported: Int[Tensor, " n"]
    start: Int[Tensor, " n"]
    quantile: float
    excess: PerStep

    def trust(self, tolerance: Shaped[Tensor, " *per_coordinate"]) -> Trust:
        r"""Calibrate the rule for this tolerance.

        .. math:: \frac{a + 1}{n + 1} \le 1 - \tau

        Here n is the number of held-out rollouts, and a the number of broken rollouts that is allowed. If the rollouts do not
        overlap, this is split conformal prediction of M. Otherwise let G be the number of rollouts whose trusted steps do not
        overlap. The rollouts then count as G groups, and conformal risk control limits the expected fraction of broken
        rollouts by

        .. math:: \frac{G}{G+1} \frac{a}{n} + \frac{1}{G+1},

        which ``Trust.broken`` states. A larger tolerance never gives a shorter horizon.
        """
        ratio, first = self._ratios(tolerance)
        # Rows that have diverged are infinite from there on, so that a median is infinite once half of them have.
        typical = ratio.cummax(dim=1).values.median(dim=0).values
        score = scores(ratio, typical).cummax(dim=1).values
        n, miss = len(score), 1 - self.quantile
        reached = score.gather(1, first.clamp(max=score.shape[1] - 1)[:, None])[:, 0]
        critical = torch.where(first < self.supported, reached, torch.inf)
        limit = float(critical.sort().values[n_allowed(n, n, miss)])
        trusted = n_leading((ratio <= 1) & (score < limit))
        longest = int(torch.minimum(trusted, self.supported).max())
        apart = count_apart(self.start, max(1, longest))
        n_broken = int((critical < limit).sum())
        most = (apart * n_broken / n + 1) / (apart + 1)
        numbers = tuple(typical.tolist())
        return Trust(limit, numbers, max(miss, most), n, apart, self.quantile)

    def _ratios(self, tolerance: Tensor) -> tuple[PerStep, Int[Tensor, " n"]]:
        """The ratio r of each step, and the first step, from 0, at which the error exceeds the tolerance; n_steps if none."""
        n, n_steps, n_coordinates = self.bound.shape
        ratio, first = [], []
        for rows in chunks(n, n_steps * n_coordinates):
            error = self.error[rows]
            exceeds = (error > tolerance.to(error).flatten()).any(dim=2)
            first.append(n_leading(~exceeds))
            ratio.append(over_tolerance(self.bound[rows], tolerance))
        return torch.cat(ratio).double(), torch.cat(first)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays for a file, with only the largest bound and error of each step if there are too many numbers."""
        arrays = {n: part for n, part in vars(self).items() if n != "quantile"}
        if self.bound.numel() > MOST_STORED:
            for name in ("bound", "error"):
                arrays[name] = arrays[name].amax(dim=2, keepdim=True)
        return arrays


def over_tolerance(
    bound: Float[Tensor, " n n_steps *state"],
    tolerance: Shaped[Tensor, " *per_coordinate"],
) -> PerStep:
    """The largest ratio of bound and tolerance over the coordinates, for each step."""
    flat = bound.flatten(start_dim=2)
    ratio = (flat / tolerance.to(flat).flatten()).amax(dim=2)
    # An infinite bound exceeds every tolerance, even an infinite one.
    return torch.where(flat.isinf().any(dim=2), torch.inf, ratio)


def scores(ratio: PerStep, typical: Float[Tensor, " n_steps"]) -> PerStep:
    """The score s of each step; infinite where half of the held-out rollouts have diverged."""
    weight = WEIGHT_OF_TYPICAL
    score = ratio.double() ** (1 - weight) * typical.clamp(min=TINY) ** weight
    return score.masked_fill(typical.isinf(), torch.inf)


def n_leading(holds: Bool[Tensor, " n n_steps"]) -> Int[Tensor, " n"]:
    """The number of steps before the first one at which the condition does not hold."""
    return holds.long().cumprod(dim=1).sum(dim=1)


def count_apart(start: Int[Tensor, " n"], n_steps: int) -> int:
    """The largest number of rollouts of ``n_steps`` steps from these rows that do not overlap.

    Example:
        >>> count_apart(torch.tensor([0, 4, 5, 9]), n_steps=5)
        2
    """
    count, end = 0, -1
    for row in start.sort().values.tolist():
        if row >= end:
            count, end = count + 1, row + n_steps
    return count


def n_allowed(n_rollouts: int, n_apart: int, miss: float) -> int:
    r"""The largest number of held-out rollouts that may be broken so that a new one is broken with probability ``miss``.

    .. math:: \frac{G}{G+1} \frac{a}{n} + \frac{1}{G+1} \le \text{miss}

    Here n is the number of rollouts, and G the number of them that do not overlap. It is at least 0.
    """
    fraction = (miss * (n_apart + 1) - 1) / n_apart
    return max(0, math.floor(n_rollouts * fraction + 1e-9))
