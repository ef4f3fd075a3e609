r"""A band that contains the whole error of a rollout: all steps and all coordinates of the output at once.

.. math:: E_{n,j} \le K \, \widehat E_{n,j} \quad \text{for all } n \le N \text{ and all } j

The factor K is a conformal quantile of one number per held-out rollout, the largest ratio of error and bound within N steps.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from geoq.checks import check_count
from geoq.quantiles import check_quantile, n_required
from geoq.rollout.horizon import count_apart, n_allowed
from geoq.rollout.trajectories import PerStep, Values


@dataclass(frozen=True)
class JointBand:
    """The factors of joint bands, from ``excess_of`` the held-out rollouts and the rows of the data that they start from."""

    excess: PerStep
    start: Int[Tensor, " n"]

    def factor(self, n_steps: int, confidence: float) -> float:
        """K for this number of steps.

        A rollout counts as exceeded if any of its errors exceeds K times its bound. Rollouts that overlap within ``n_steps``
        steps count as one group, as in ``n_allowed``.

        Raises:
            ValueError: there are too few held-out rollouts that do not overlap, or too few steps with measured errors.
        """
        check_count(n_steps, "n_steps")
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
        largest = self.excess[:, :n_steps].amax(dim=1).sort(descending=True).values
        return float(largest[n_allowed(n, n_apart, 1 - confidence)])


def excess_of(error: Values, bound: Values) -> PerStep:
    """The largest ratio of error and bound over the coordinates; zero where the bound is infinite."""
    ratio = torch.where((error == 0) | bound.isinf(), 0.0, error / bound)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).amax(dim=2)
