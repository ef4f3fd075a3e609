r"""The trusted horizon: the steps of a rollout within which the error is expected to stay below a tolerance.

The bound of a rollout holds for each value and each step with probability tau. It does not hold for all of them at once: with
tau = 0.95, about one of twenty values exceeds its bound. A comparison of the bound with the tolerance is therefore not enough.
The rule for the horizon has one parameter :math:`\lambda`, which is calibrated on the held-out rollouts. A step is trusted if
all steps up to it are safe and their bounds are small enough compared with the tolerance :math:`\varepsilon_j`,

.. math:: r_n < \lambda \text{ and } r_n \le 1, \qquad r_n = \max_j \widehat E_{n,j} / \varepsilon_j.

A rollout is called broken if its error exceeds the tolerance at a trusted step. Let t be the first step at which the error
exceeds the tolerance, and M the largest ratio up to this step,

.. math:: t = \min\{n : E_{n,j} > \varepsilon_j \text{ for some } j\}, \qquad M = \max_{m \le t} r_m.

The rollout is broken if and only if :math:`M < \lambda`, :math:`M \le 1`, and all steps up to t are safe. So M is the critical
value of :math:`\lambda` for this rollout. The calibration chooses the largest :math:`\lambda` for which few enough held-out
rollouts are broken; ``HeldOutRollouts.trust`` gives the number.
"""

import bisect
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from geoq.arrays import chunks
from geoq.quantiles import n_required

# A file contains the bounds and errors of all coordinates of the held-out rollouts if these are at most this many numbers
# each; otherwise it contains only the largest of each step.
MOST_STORED = 2**22


@dataclass(frozen=True)
class Trust:
    """The rule for trusted horizons at one tolerance, and the numbers behind it.

    Attributes:
        limit: lambda; a bound is trusted if its ratio to the tolerance is less than this limit and at most 1.
        broken: the expected fraction of new rollouts, exchangeable with the held-out rollouts, whose error exceeds the
            tolerance within their trusted horizon is at most this. It is 1 - quantile, or more if too few held-out rollouts
            do not overlap.
        n_rollouts: the number of held-out rollouts.
        n_apart: the number of held-out rollouts that do not overlap: their trusted steps have no true state in common.
        quantile: tau, the quantile level of the scheme.
    """

    limit: float
    broken: float
    n_rollouts: int
    n_apart: int
    quantile: float

    def within(self, ratio: Float[Tensor, " n n_steps"]) -> Bool[Tensor, " n n_steps"]:
        """Whether the bounds of each step are small enough, given their largest ratio to the tolerance."""
        return (ratio <= 1) & (ratio < self.limit)

    def __str__(self) -> str:
        statement = (
            f"the trusted horizon is calibrated on {self.n_rollouts} held-out rollouts, so that at most "
            f"{100 * self.broken:.2g} % of such rollouts are expected to exceed the tolerance within it"
        )
        required = n_required(self.quantile)
        if self.n_apart >= required:
            return statement
        return (
            f"{statement}; {100 * (1 - self.quantile):.2g} % would need {required} held-out rollouts that do not overlap, "
            f"but there are {self.n_apart}: give longer or more trajectories"
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
    """

    bound: Float[Tensor, " n n_steps n_coordinates"]
    error: Float[Tensor, " n n_steps n_coordinates"]
    supported: Int[Tensor, " n"]
    start: Int[Tensor, " n"]
    quantile: float

    def trust(self, tolerance: Shaped[Tensor, " *per_coordinate"]) -> Trust:
        r"""Calibrate the rule for this tolerance.

        .. math:: \frac{G}{G+1} \frac{a}{n} + \frac{1}{G+1} \le 1 - \tau

        Here n is the number of held-out rollouts, G the number of them whose trusted steps do not overlap, and a the number
        of broken rollouts that is allowed. With G = n this is split conformal prediction of M. Otherwise the rollouts count
        as G groups, and conformal risk control limits the expected fraction of broken rollouts. If G is too small, no
        rollout may be broken, and the expected fraction is at most 1 / (G + 1).

        A lower limit has fewer broken rollouts, and a larger G because trusted steps are fewer. The largest limit that
        satisfies the inequality is chosen, so a larger tolerance never gives a shorter horizon.
        """
        running, critical = self._ratios(tolerance)
        ordered = critical.sort().values
        n, miss = len(ordered), 1 - self.quantile
        # A limit without broken rollouts is always allowed. A limit with broken rollouts is allowed only if the trusted
        # steps are few enough, so that enough rollouts do not overlap.
        limit = float(ordered[0])
        for broken in range(1, _n_allowed(n, n, miss) + 1):
            reached = self._limit_for(running, self._most_steps(broken))
            limit = max(limit, min(float(ordered[broken]), reached))
        trust = Trust(limit, miss, n, n, self.quantile)
        trusted = trust.within(running).sum(dim=1)
        longest = int(torch.minimum(trusted, self.supported).max())
        apart = self._apart(max(1, longest))
        return replace(trust, broken=max(miss, 1 / (apart + 1)), n_apart=apart)

    def _most_steps(self, broken: int) -> int:
        """The largest number of trusted steps for which this number of broken rollouts is allowed."""
        n, miss = len(self.start), 1 - self.quantile
        return bisect.bisect_right(
            range(1, self.bound.shape[1] + 1),
            0,
            key=lambda steps: broken - _n_allowed(n, self._apart(steps), miss),
        )

    def _apart(self, n_steps: int) -> int:
        """``count_apart`` for this number of steps, computed once because it is the same for every tolerance."""
        if n_steps not in self._apart_counts:
            self._apart_counts[n_steps] = count_apart(self.start, n_steps)
        return self._apart_counts[n_steps]

    @cached_property
    def _apart_counts(self) -> dict[int, int]:
        return {}

    def _limit_for(self, running: Float[Tensor, " n n_steps"], n_steps: int) -> float:
        """The largest limit for which no rollout has more than ``n_steps`` trusted steps."""
        longer = self.supported > n_steps
        return float(running[longer, n_steps].min()) if longer.any() else math.inf

    def _ratios(
        self, tolerance: Tensor
    ) -> tuple[Float[Tensor, " n n_steps"], Float[Tensor, " n"]]:
        """The largest r up to each step, and M of each rollout, which is infinite if the rollout cannot be broken."""
        n, n_steps, n_coordinates = self.bound.shape
        running, critical = [], []
        for rows in chunks(n, n_steps * n_coordinates):
            error = self.error[rows]
            exceeds = (error > tolerance.to(error).flatten()).any(dim=2)
            first = exceeds.long().argmax(dim=1)
            ratio = over_tolerance(self.bound[rows], tolerance).cummax(dim=1).values
            can_break = exceeds.any(dim=1) & (first < self.supported[rows])
            reached = ratio.gather(1, first[:, None])[:, 0]
            running.append(ratio)
            critical.append(torch.where(can_break, reached, torch.inf))
        return torch.cat(running), torch.cat(critical)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays for a file, with only the largest bound and error of each step if there are too many numbers."""
        all_fit = self.bound.numel() <= MOST_STORED
        bound, error = (
            part if all_fit else part.amax(dim=2, keepdim=True)
            for part in (self.bound, self.error)
        )
        per_rollout = {"supported": self.supported, "start": self.start}
        return {"bound": bound, "error": error, **per_rollout}


def over_tolerance(
    bound: Float[Tensor, " n n_steps *state"],
    tolerance: Shaped[Tensor, " *per_coordinate"],
) -> Float[Tensor, " n n_steps"]:
    """The largest ratio of bound and tolerance over the coordinates, for each step."""
    flat = bound.flatten(start_dim=2)
    ratio = (flat / tolerance.to(flat).flatten()).amax(dim=2)
    # An infinite bound exceeds every tolerance, even an infinite one.
    return torch.where(flat.isinf().any(dim=2), torch.inf, ratio)


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


def _n_allowed(n_rollouts: int, n_apart: int, miss: float) -> int:
    """The number of held-out rollouts that may be broken, a in ``HeldOutRollouts.trust``."""
    fraction = (miss * (n_apart + 1) - 1) / n_apart
    return max(0, math.floor(n_rollouts * fraction + 1e-9))
