r"""The default scheme for rollouts: the bound grows with the distance to the data and saturates at the climatology.

This is a departure from the paper. The paper's sum of increments grows without limit, but the error of a chaotic system
saturates: after some time the forecast is no closer to the truth than a random state of the data. The bound of coordinate j at
step n is

.. math:: \widehat E_{n,j} = k_{n,j} \, c_j \,
    \Bigl(\frac{\overline{\Delta d}_n}{\delta}\Bigr)^{\beta (1 - w_n)^2}
    \Bigl(\frac{C_j(\widehat u_{n,j})}{s_j}\Bigr)^{w_n}, \qquad
    \log \overline{\Delta d}_n = \frac1n \sum_{m < n} \log \Delta d(\widehat u_m)

The parts are fitted on the held-out rollouts in this order:

- :math:`\overline{\Delta d}_n` is the geometric mean of the support distances (eq:dd) of the states before step n. It is clipped
  to the range between the 5 % and the 95 % quantile of the calibration at the same step. :math:`\delta` is the median of all
  calibration values.
- :math:`C_j(v)` is the climatology, the tau quantile of \|v - u_j\| over the states u of the data. :math:`s_j` is its median
  over the calibration.
- :math:`w_n` is the degree of saturation, from 0 to 1. It is the median error of the held-out rollouts at step n, divided by
  its mean over the last sixth of the calibration horizon, made nondecreasing in n and clipped to at most 1.
- :math:`\beta` is the exponent of the distance. It is chosen from a grid by the pinball loss; 0 means that the distance does not
  improve the bound.
- :math:`c_j` is the scale of coordinate j: either :math:`s_j` or the mean of all :math:`s_j`, whichever has the smaller
  pinball loss. One scale for all coordinates suits the points of one field; it does not suit quantities of different kinds.
- :math:`k_{n,j}` is the conformal factor of step n, one for each coordinate of a small state and one for each group of a few
  coordinates of a large state. Conformal risk control with whole rollouts as rows gives the smallest factor for which the
  expected coverage of the group at step n is at least tau, for a new rollout that has not diverged and is exchangeable with
  the held-out ones. Isotonic regression then reduces the noise between the steps; ``step_factors`` has the formula. The factor
  is zero where all held-out errors are zero.

Past the calibration horizon, k and w keep their last values, so the bound does not grow further. With :math:`\beta = 0` and
w = 0 the bound is one number per step. With w = 1 and :math:`c_j = s_j` it is one factor per step times the climatology.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.quantiles import check_quantile, pinball_loss
from geoq.rollout.features import RolloutCalibration, RolloutFeatures
from geoq.rollout.levels import (
    counted_ratios,
    group_quantiles,
    nondecreasing,
    step_factors,
)
from geoq.rollout.trajectories import PerStep, Values
from geoq.settings import check_numbers

EXPONENTS = tuple(0.25 * i for i in range(13))
# The number of steps at which exponents are compared. They are equally spaced in log(n), because exponents differ in the
# early steps.
N_COMPARED = 30
# The error is saturated in the last 1 / LATE of the calibration horizon.
LATE = 6
# Quantile levels between which the mean distance is clipped.
CLIPPED = (0.05, 0.95)
_NUMBERS = ("exponent_", "floor_", "centre_")
_ARRAYS = ("typical_", "scale_", "low_", "high_", "saturation_", "factor_")


@dataclass
class SaturatingGrowth:
    """A bound that grows with the distance to the data and saturates at the climatology; the module has the formula.

    Attributes:
        quantile: tau, the quantile level.
        exponents: the values of beta to choose from. With ``(0.0,)`` the bound does not depend on the distance.

    Example:
        >>> SaturatingGrowth(quantile=0.9, exponents=(0.0, 0.5, 1.0))
        SaturatingGrowth(quantile=0.9, exponents=(0.0, 0.5, 1.0))
    """

    quantile: float = 0.95
    exponents: tuple[float, ...] = EXPONENTS

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_numbers(self.exponents, "exponents", least=0)
        if not self.exponents:
            raise ValueError("exponents=() is empty; pass for example (0.0, 0.5, 1.0).")

    def fit(self, calibration: RolloutCalibration) -> "SaturatingGrowth":
        """Fit all parts on the held-out rollouts."""
        features, error = calibration.features, calibration.error.flatten(start_dim=2)
        alive = features.alive
        if not alive.any():
            raise ValueError(
                f"all {len(calibration)} calibration rollouts diverge at their first step, so there is no error to fit the "
                "bound to; train the surrogate longer, or standardise its states."
            )
        climatology = features.climatology.flatten(start_dim=2)
        # Medians, so that one fold surrogate with very large errors does not determine the bound of all others.
        typical = climatology[alive].median(dim=0).values
        # The climatology of a coordinate that never varies is zero; the median of its errors takes its place.
        typical = torch.where(typical > 0, typical, error[alive].median(dim=0).values)
        self.typical_ = torch.where(typical > 0, typical, 1.0)
        distance = features.support_distance
        least = torch.finfo(distance.dtype).tiny
        self.floor_ = max(1e-6 * float(distance[alive].median()), least)
        passed = _passed(distance, self.floor_)
        self.centre_ = float(passed[alive].median())
        self.low_, self.high_ = (
            torch.where(alive, passed, torch.nan)
            .nanquantile(level, dim=0)
            .nan_to_num(self.centre_)
            for level in CLIPPED
        )
        self.saturation_ = _saturation(error, alive)
        growth, base = self._parts(features)
        compared = _compared(error.shape[1])

        def loss(choice: tuple[Tensor, float]) -> float:
            scale, exponent = choice
            shape = _shape(exponent, scale, growth[:, compared], base[:, compared])
            return self._loss(error[:, compared], shape, alive[:, compared])

        # One scale for all coordinates varies less between data sets than one for each coordinate.
        common = self.typical_.mean().expand_as(self.typical_).clone()
        choices = product((common, self.typical_), self.exponents)
        self.scale_, self.exponent_ = min(choices, key=loss)
        shape = _shape(self.exponent_, self.scale_, growth, base)
        self.factor_ = step_factors(error, shape, self.quantile)
        return self

    def __call__(self, features: RolloutFeatures) -> Float[Tensor, " n n_steps *state"]:
        factor = _extended(self.factor_, features.n_steps)
        shape = _shape(self.exponent_, self.scale_, *self._parts(features))
        return (factor * shape).reshape(features.climatology.shape)

    def describe(self) -> str:
        """The fitted bound in words."""
        half = int((self.saturation_ < 0.5).sum()) + 1
        return (
            f"the error grows like the distance to the power {self.exponent_:g} and is half saturated at step {half}; "
            f"the mean bound after saturation is {float((self.factor_[-1] * self.scale_).mean()):.3g}"
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The settings, fitted numbers and fitted arrays for a file."""
        names = ("quantile", "exponents", *_NUMBERS)
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {name: getattr(self, name) for name in names}, arrays

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor]
    ) -> "SaturatingGrowth":
        """The fitted scheme with the numbers and arrays that ``state`` returned."""
        scheme = SaturatingGrowth(settings["quantile"], tuple(settings["exponents"]))
        for name in (*_NUMBERS, *_ARRAYS):
            setattr(scheme, name, (settings | arrays)[name])
        return scheme

    def _parts(self, features: RolloutFeatures) -> tuple[PerStep, Values]:
        """The logarithm of the factor of the distance for beta = 1, and the factor of the climatology."""
        low, high, saturation = (
            _extended(part, features.n_steps)
            for part in (self.low_, self.high_, self.saturation_)
        )
        passed = _passed(features.support_distance, self.floor_).clamp(low, high)
        climatology = features.climatology.flatten(start_dim=2)
        relative = torch.where(climatology > 0, climatology / self.typical_, 1.0)
        growth = (1 - saturation) ** 2 * (passed - self.centre_)
        return growth, relative ** saturation[:, None]

    def _loss(
        self,
        error: Float[Tensor, " n n_compared n_coordinates"],
        shape: Float[Tensor, " n n_compared n_coordinates"],
        alive: Bool[Tensor, " n n_compared"],
    ) -> float:
        """The sum over the compared steps of the pinball loss divided by the mean error of the step."""
        level = error.new_full((error.shape[1],), self.quantile)
        factor = group_quantiles(counted_ratios(error, shape), level)
        total = 0.0
        for step in range(error.shape[1]):
            e, b = error[alive[:, step], step], shape[alive[:, step], step]
            if not len(e) or not float(e.mean()):
                continue
            loss = pinball_loss(e, factor[step] * b, self.quantile).mean() / e.mean()
            total += float(loss)
        return total


def _shape(exponent: float, scale: Tensor, growth: Tensor, base: Tensor) -> Tensor:
    """The bound without the conformal factors k."""
    return scale * (exponent * growth).exp()[..., None] * base


def _passed(distance: PerStep, floor: float) -> Tensor:
    """The mean logarithm of the distances up to each step."""
    count = torch.arange(1, distance.shape[1] + 1, device=distance.device)
    return distance.clamp(min=floor).log().cumsum(dim=1) / count


def _saturation(error: Tensor, alive: Tensor) -> Float[Tensor, " n_steps"]:
    """The degree of saturation w at each step."""
    size = torch.where(alive, error.mean(dim=2), torch.nan)
    typical = size.nanmedian(dim=0).values
    # After every rollout has diverged the bound is infinite, whatever the degree of saturation.
    lasting = ~typical.isnan()
    typical = typical.new_tensor(nondecreasing(typical[lasting].tolist()))
    late = typical[-max(1, len(typical) // LATE) :].mean()
    saturation = error.new_ones(len(lasting))
    saturation[lasting] = (typical / late).clamp(max=1) if late > 0 else 1.0
    return saturation


def _compared(n_steps: int) -> list[int]:
    """The indices of the steps at which exponents are compared."""
    steps = torch.logspace(0, math.log10(n_steps), N_COMPARED, dtype=torch.float64)
    return sorted({round(step) - 1 for step in steps.tolist()})


def _extended(
    values: Float[Tensor, " n_calibrated *coordinates"], n_steps: int
) -> Float[Tensor, " n_steps *coordinates"]:
    """The values of ``n_steps`` steps; the last one is repeated past the calibration horizon."""
    step = torch.arange(n_steps, device=values.device).clamp(max=len(values) - 1)
    return values[step]
