r"""The trusted horizon: until when held-out rollouts kept a tolerance while the same rule trusted them.

A bound that holds value by value and step by step does not hold along a path: of twenty steps within their bounds one may
be wrong. So the rule itself is tried on the held-out rollouts. With the largest bound of a step in units of the tolerance,

.. math:: r_n = \max_j \widehat E_{n,j} / \varepsilon_j, \qquad
    M = \max_{m \le t} r_m, \quad t = \min\{n : E_{n,j} > \varepsilon_j \text{ for some } j\},

a rollout that is trusted while its steps are safe and :math:`r_n < \lambda` is broken, its error exceeds the tolerance
within the trusted steps, if and only if :math:`M < \lambda` and all steps up to t are safe. So :math:`\lambda` is the greatest
of the M under which few enough held-out rollouts are broken. A bound above the tolerance itself, r > 1, is never trusted.
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

# Files keep the bounds and errors of held-out rollouts whole up to so many numbers each, above that the largest per step.
MOST_STORED = 2**22


@dataclass(frozen=True)
class Trust:
    """What trusted horizons rest on, for one tolerance.

    Attributes:
        limit: bounds below this share of the tolerance are trusted; those above the tolerance itself never are.
        broken: share of fresh rollouts, exchangeable with the held-out ones, whose errors may exceed the tolerance within
            their trusted horizon: 1 - quantile, or more if too few held-out rollouts are apart to tell.
        n_rollouts: held-out rollouts.
        n_apart: how many of them share no trusted step of the truth.
        quantile: the level that was asked for.
    """

    limit: float
    broken: float
    n_rollouts: int
    n_apart: int
    quantile: float

    def within(self, ratio: Float[Tensor, " n n_steps"]) -> Bool[Tensor, " n n_steps"]:
        """Which steps have bounds that are small enough."""
        return (ratio <= 1) & (ratio < self.limit)

    def __str__(self) -> str:
        statement = (
            f"the horizon is set by {self.n_rollouts} held-out rollouts so that at most {100 * self.broken:.2g} % of such "
            "rollouts exceed the tolerance within it"
        )
        needed = n_required(self.quantile)
        if self.n_apart >= needed:
            return statement
        return (
            f"{statement}; more than {100 * (1 - self.quantile):.2g} %, since only {self.n_apart} of them do not overlap "
            f"while trusted and {needed} are needed: give longer or more trajectories"
        )


@dataclass(frozen=True)
class HeldOutRollouts:
    """Bounds and errors along the held-out rollouts, which trusted horizons are tried on.

    Attributes:
        bound: infinite from the step on at which a rollout diverged.
        error: the true errors; one coordinate is the largest of each step, where all would be too many.
        supported: steps up to which each rollout was safe.
        start: row of the data that each starts at.
        quantile: the level.
    """

    bound: Float[Tensor, " n n_steps n_coordinates"]
    error: Float[Tensor, " n n_steps n_coordinates"]
    supported: Int[Tensor, " n"]
    start: Int[Tensor, " n"]
    quantile: float

    def trust(self, tolerance: Shaped[Tensor, " *per_coordinate"]) -> Trust:
        r"""The rule for this tolerance.

        .. math:: \frac{G}{G+1} \frac{a}{n} + \frac{1}{G+1} \le 1 - \tau

        a of the n rollouts may be broken if G of them share no trusted step of the truth. With G = n this is split
        conformal prediction of M; otherwise they count as G groups whose share of broken rollouts is controlled (conformal
        risk control). With too few groups none may be broken, which leaves 1 / (G + 1). A lower limit breaks fewer and
        keeps more apart; the greatest one that does is taken, so a larger tolerance never has a shorter horizon.
        """
        running, critical = self._tried(tolerance)
        ordered = critical.sort().values
        n, miss = len(ordered), 1 - self.quantile
        # Breaking none needs no rollouts apart; breaking some needs the trusted steps to be few enough.
        limit = float(ordered[0])
        for broken in range(1, _allowed(n, n, miss) + 1):
            most = self._most_steps(broken)
            limit = max(limit, min(float(ordered[broken]), self._past(running, most)))
        trust = Trust(limit, miss, n, n, self.quantile)
        trusted = trust.within(running).sum(dim=1)
        longest = int(torch.minimum(trusted, self.supported).max())
        apart = self._apart(max(1, longest))
        return replace(trust, broken=max(miss, 1 / (apart + 1)), n_apart=apart)

    def _most_steps(self, broken: int) -> int:
        """The most trusted steps at which enough rollouts are apart for so many to be broken."""
        n, miss = len(self.start), 1 - self.quantile
        return bisect.bisect_right(
            range(1, self.bound.shape[1] + 1),
            0,
            key=lambda steps: broken - _allowed(n, self._apart(steps), miss),
        )

    def _apart(self, n_steps: int) -> int:
        """Rollouts of so many steps that share none of them; counted once, for every tolerance needs the same."""
        if n_steps not in self._counted:
            self._counted[n_steps] = count_apart(self.start, n_steps)
        return self._counted[n_steps]

    @cached_property
    def _counted(self) -> dict[int, int]:
        return {}

    def _past(self, running: Float[Tensor, " n n_steps"], most: int) -> float:
        """The greatest limit under which no rollout is trusted for more than so many steps."""
        longer = self.supported > most
        return float(running[longer, most].min()) if longer.any() else math.inf

    def _tried(
        self, tolerance: Tensor
    ) -> tuple[Float[Tensor, " n n_steps"], Float[Tensor, " n"]]:
        """The largest r up to each step, and M; infinite where no limit breaks the rollout."""
        n, n_steps, n_coordinates = self.bound.shape
        running, critical = [], []
        for rows in chunks(n, n_steps * n_coordinates):
            error = self.error[rows]
            exceeds = (error > tolerance.to(error).flatten()).any(dim=2)
            first = exceeds.long().argmax(dim=1)
            ratio = over_tolerance(self.bound[rows], tolerance).cummax(dim=1).values
            broken = exceeds.any(dim=1) & (first < self.supported[rows])
            reached = ratio.gather(1, first[:, None])[:, 0]
            running.append(ratio)
            critical.append(torch.where(broken, reached, torch.inf))
        return torch.cat(running), torch.cat(critical)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """For a file: only the largest bound and error of each step where all would be too many."""
        whole = self.bound.numel() <= MOST_STORED
        bound, error = (
            part if whole else part.amax(dim=2, keepdim=True)
            for part in (self.bound, self.error)
        )
        marks = {"supported": self.supported, "start": self.start}
        return {"bound": bound, "error": error, **marks}


def over_tolerance(
    bound: Float[Tensor, " n n_steps *state"],
    tolerance: Shaped[Tensor, " *per_coordinate"],
) -> Float[Tensor, " n n_steps"]:
    """The largest bound of each step in units of the tolerance."""
    flat = bound.flatten(start_dim=2)
    ratio = (flat / tolerance.to(flat).flatten()).amax(dim=2)
    # An infinite bound is within no tolerance, not even an infinite one.
    return torch.where(flat.isinf().any(dim=2), torch.inf, ratio)


def count_apart(start: Int[Tensor, " n"], n_steps: int) -> int:
    """How many rollouts of so many steps from these rows share no step of the truth."""
    count, end = 0, -1
    for row in start.sort().values.tolist():
        if row >= end:
            count, end = count + 1, row + n_steps
    return count


def _allowed(n_rollouts: int, n_apart: int, miss: float) -> int:
    """How many held-out rollouts may be broken."""
    share = (miss * (n_apart + 1) - 1) / n_apart
    return max(0, math.floor(n_rollouts * share + 1e-9))
