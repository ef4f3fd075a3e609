r"""The default: geometry decides before the rollout saturates, the attractor afterwards.

A departure from the paper, whose sum of increments grows for ever, while the error of a chaotic rollout saturates:

.. math:: \widehat E_{n,j} = k_n \, c_j \,
    \Bigl(\frac{\overline{\Delta d}_n}{\delta}\Bigr)^{\beta (1 - w_n)^2}
    \Bigl(\frac{C_j(\widehat u_{n,j})}{s_j}\Bigr)^{w_n}, \qquad
    \log \overline{\Delta d}_n = \frac1n \sum_{m < n} \log \Delta d(\widehat u_m)

- :math:`\overline{\Delta d}_n`, the geometric mean of the support distances that the rollout has passed, kept within the
  middle nine tenths of those of the calibration at that step; :math:`\delta` is its median.
- :math:`C_j(v)`, the climatology: the tau quantile of \|v - u_j\| over the states of the data; :math:`s_j` its median
  over the calibration, the unit of coordinate j.
- :math:`c_j`, the scale of coordinate j: :math:`s_j`, or one for all of them, by least pinball loss. Points of one field
  share theirs, quantities of different kinds cannot.
- :math:`w_n`, how saturated rollouts are at step n: their median error there in units of that over the last sixth of the
  calibration horizon, not decreasing and at most 1.
- :math:`\beta`, how fast the error grows with the distance: by least pinball loss over a grid; 0 means that geometry
  did not help.
- :math:`k_n`, the level, made not decreasing in n by isotonic regression: at each step the least one at which held-out rollouts
  are covered, by conformal risk control with whole rollouts as units, so that the mean coverage of a fresh rollout at
  step n is tau if it is exchangeable with them.

Past the calibration horizon k and w keep their last values: nothing grows. With :math:`\beta = 0` and w = 0 this is one
number per horizon, with w = 1 and :math:`c_j = s_j` it is a horizon scale times climatology.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from scipy.optimize import isotonic_regression
from torch import Tensor

from geoq.quantiles import (
    check_quantile,
    conformal_factor,
    inverse_cdf_quantile,
    pinball_loss,
)
from geoq.rollout.features import RolloutCalibration, RolloutFeatures

EXPONENTS = tuple(0.25 * i for i in range(13))
# Steps at which exponents are compared, as many in each octave: the early ones are where they differ.
N_COMPARED = 30
LATE = 6
# Distances that the power is used for, as quantiles of those of the calibration at the same step.
WITHIN = (0.05, 0.95)
_FITTED = ("unit_", "scale_", "low_", "high_", "saturation_", "level_")


@dataclass
class SaturatingGrowth:
    """Bound of a rollout that grows with the distance to the data and saturates at the climatology; see the module.

    Attributes:
        quantile: tau, the level.
        exponents: values of beta to choose from; ``(0,)`` leaves geometry out.
    """

    quantile: float = 0.95
    exponents: tuple[float, ...] = EXPONENTS

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")

    def fit(self, calibration: RolloutCalibration) -> "SaturatingGrowth":
        features, error = calibration.features, calibration.error.flatten(start_dim=2)
        alive = features.alive
        if not alive.any():
            raise ValueError(
                "every calibration rollout diverged at its first step, so there is no error to learn from; "
                "train the surrogate longer, or scale the states."
            )
        climatology = features.climatology.flatten(start_dim=2)
        # Medians throughout: a fold's surrogate that runs off must not set the scale for all others.
        unit = climatology[alive].median(dim=0).values
        # A coordinate that never moves has no climatology; its own errors are its unit.
        unit = torch.where(unit > 0, unit, error[alive].median(dim=0).values)
        self.unit_ = torch.where(unit > 0, unit, 1.0)
        distance = features.support_distance
        least = torch.finfo(distance.dtype).tiny
        self.floor_ = max(1e-6 * float(distance[alive].median()), least)
        passed = _passed(distance, self.floor_)
        self.centre_ = float(passed[alive].median())
        self.low_, self.high_ = (
            torch.where(alive, passed, torch.nan)
            .nanquantile(level, dim=0)
            .nan_to_num(self.centre_)
            for level in WITHIN
        )
        self.saturation_ = _saturation(error, alive)
        growth, base = self._parts(features)
        compared = _compared(error.shape[1])

        def loss(choice: tuple[Tensor, float]) -> float:
            scale, exponent = choice
            shape = _shape(exponent, scale, growth[:, compared], base[:, compared])
            return self._loss(error[:, compared], shape, alive[:, compared])

        # Coordinates of one kind share a scale, which is steadier than one for each; those of different kinds cannot.
        shared = self.unit_.mean().expand_as(self.unit_).clone()
        choices = product((shared, self.unit_), self.exponents)
        self.scale_, self.exponent_ = min(choices, key=loss)
        shape = _shape(self.exponent_, self.scale_, growth, base)
        self.level_ = horizon_levels(error, shape, self.quantile)
        return self

    def __call__(self, features: RolloutFeatures) -> Float[Tensor, " n n_steps *state"]:
        level = _extended(self.level_, features.n_steps)
        bound = level[:, None] * _shape(
            self.exponent_, self.scale_, *self._parts(features)
        )
        return bound.reshape(features.climatology.shape)

    def describe(self) -> str:
        """The fitted law in words."""
        half = int((self.saturation_ < 0.5).sum()) + 1
        return (
            f"error grows like distance to the power {self.exponent_:g} until it saturates, half of it by step {half}; "
            f"then {float(self.level_[-1] * self.scale_.mean()):.3g} on average"
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and fitted arrays, for a file."""
        names = ("quantile", "exponents", "exponent_", "floor_", "centre_")
        arrays = {name: getattr(self, name) for name in _FITTED}
        return {name: getattr(self, name) for name in names}, arrays

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor]
    ) -> "SaturatingGrowth":
        """The fitted scheme that ``state`` described."""
        scheme = SaturatingGrowth(settings["quantile"], tuple(settings["exponents"]))
        for name in ("exponent_", "floor_", "centre_"):
            setattr(scheme, name, settings[name])
        for name in _FITTED:
            setattr(scheme, name, arrays[name])
        return scheme

    def _parts(
        self, features: RolloutFeatures
    ) -> tuple[Float[Tensor, " n n_steps"], Float[Tensor, " n n_steps n_coordinates"]]:
        """Logarithm of the factor that geometry contributes per unit of beta, and the factor of the climatology."""
        low, high, saturation = (
            _extended(part, features.n_steps)
            for part in (self.low_, self.high_, self.saturation_)
        )
        passed = _passed(features.support_distance, self.floor_).clamp(low, high)
        climatology = features.climatology.flatten(start_dim=2)
        relative = torch.where(climatology > 0, climatology / self.unit_, 1.0)
        growth = (1 - saturation) ** 2 * (passed - self.centre_)
        return growth, relative ** saturation[:, None]

    def _loss(
        self,
        error: Float[Tensor, " n n_compared n_coordinates"],
        shape: Float[Tensor, " n n_compared n_coordinates"],
        alive: Bool[Tensor, " n n_compared"],
    ) -> float:
        """Pinball loss at the steps compared, each in units of its mean error."""
        total = 0.0
        for step in range(error.shape[1]):
            e, b = error[alive[:, step], step], shape[alive[:, step], step]
            if not len(e) or not float(e.mean()):
                continue
            level = inverse_cdf_quantile((e / b).flatten(), self.quantile)
            loss = pinball_loss(e, level * b, self.quantile).mean() / e.mean()
            total += float(loss)
        return total


def horizon_levels(
    error: Float[Tensor, " n n_steps n_coordinates"],
    shape: Float[Tensor, " n n_steps n_coordinates"],
    quantile: float,
) -> Float[Tensor, " n_steps"]:
    """The level of each step at which held-out rollouts are covered, not decreasing."""
    level = [
        conformal_factor(error[:, step] / shape[:, step], quantile)
        for step in range(error.shape[1])
    ]
    return error.new_tensor(_not_decreasing(level))


def _shape(exponent: float, scale: Tensor, growth: Tensor, base: Tensor) -> Tensor:
    """The bound without its level."""
    return scale * (exponent * growth).exp()[..., None] * base


def _passed(distance: Float[Tensor, " n n_steps"], floor: float) -> Tensor:
    """Mean logarithm of the distances up to each step."""
    count = torch.arange(1, distance.shape[1] + 1, device=distance.device)
    return distance.clamp(min=floor).log().cumsum(dim=1) / count


def _saturation(error: Tensor, alive: Tensor) -> Float[Tensor, " n_steps"]:
    size = torch.where(alive, error.mean(dim=2), torch.nan)
    typical = size.nanmedian(dim=0).values
    # Where every rollout has diverged the bound is infinite, whatever the share.
    lasting = ~typical.isnan()
    typical = typical.new_tensor(_not_decreasing(typical[lasting].tolist()))
    late = typical[-max(1, len(typical) // LATE) :].mean()
    share = error.new_ones(len(lasting))
    share[lasting] = (typical / late).clamp(max=1) if late > 0 else 1.0
    return share


def _not_decreasing(values: list[float]) -> list[float]:
    """Isotonic regression up to the first infinite value; infinite from there on."""
    finite = next(
        (i for i, v in enumerate(values) if not math.isfinite(v)), len(values)
    )
    smooth = isotonic_regression(values[:finite]).x.tolist() if finite else []
    return [*smooth, *[math.inf] * (len(values) - finite)]


def _compared(n_steps: int) -> list[int]:
    steps = torch.logspace(0, math.log10(n_steps), N_COMPARED, dtype=torch.float64)
    return sorted({round(step) - 1 for step in steps.tolist()})


def _extended(
    values: Float[Tensor, " n_calibrated"], n_steps: int
) -> Float[Tensor, " n_steps"]:
    """Values per step, the last one repeated past the calibration horizon."""
    step = torch.arange(n_steps, device=values.device).clamp(max=len(values) - 1)
    return values[step]
