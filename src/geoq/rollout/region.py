"""The safe region of rollouts: a threshold on the support distance of all steps, and a test of initial states."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.quantiles import check_quantile, inverse_cdf_quantile
from geoq.regions.field_region import FieldRegion, FittedFieldRegion
from geoq.regions.field_scores import MIN_CELLS, grid_axes
from geoq.regions.local_region import FittedLocalRegion, LocalRegion
from geoq.regions.safe_region import SAFE, FittedRegion
from geoq.rollout.features import RolloutFeatures
from geoq.rollout.trajectories import PerStep, without_forcing

MEANING = (
    "at most as far from the data as held-out rollouts were",
    "farther from the data than held-out rollouts were; the bound is a guess",
)


@dataclass(frozen=True)
class RolloutRegion:
    r"""Steps that start at most as far from the data as held-out rollouts were at their farthest step.

    .. math:: \Omega_{safe} = \{u : \Delta d_k(u) \le \widehat Q_{\alpha_{safe}}(\max_n \Delta d_k(\widehat u_n))\}

    The quantile is taken over whole rollouts, unlike in ``DistanceRegion``. A threshold that one step in twenty exceeds would
    end the supported horizon of nearly every rollout of a hundred steps.

    Distances hardly change if a state of many coordinates becomes noisy or is shifted, or if a state leaves an attractor. So an
    initial state with a grid of 16 cells or more must also be in a ``FieldRegion``, which compares its windows, its moments and
    its first step with the data. A smaller state, or a small output of a state with a long memory, must be in a ``LocalRegion``,
    which contains the surface that the data form.
    Both tests then have the quantile :math:`(1 + \alpha_{safe}) / 2`, so that together they exclude at most the fraction
    :math:`1 - \alpha_{safe}` of the held-out rollouts. A state with one axis counts as a line of cells.

    Attributes:
        quantile: alpha_safe, the fraction of the held-out rollouts whose steps are all in the region.

    Example:
        >>> RolloutRegion(quantile=0.9)
        RolloutRegion(quantile=0.9)
    """

    quantile: float = 0.95

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "RolloutRegion.quantile")

    def fit(self, calibration: CalibrationSet) -> "FittedRolloutRegion":
        """Set the threshold from the farthest step of each held-out rollout, and the region of initial states."""
        left_out = None if calibration.data is None else calibration.data.exact
        rule = None if left_out is None else self.initial_rule(left_out)
        quantile = self.quantile if rule is None else rule.quantile
        distance = calibration.features.support_distance
        rollout = calibration.group.unique(return_inverse=True)[1]
        farthest = distance.new_zeros(int(rollout.max()) + 1)
        farthest.scatter_reduce_(0, rollout, distance, "amax")
        threshold = float(inverse_cdf_quantile(farthest, quantile))
        if rule is None or left_out is None:
            return FittedRolloutRegion(threshold, self)
        # The steps of a rollout follow each other, its first step first.
        is_first = torch.ones_like(rollout, dtype=torch.bool)
        is_first[1:] = rollout[1:] != rollout[:-1]
        first = calibration[is_first.nonzero()[:, 0]]
        ends = without_forcing(first.features.prediction, tuple(left_out.shape))
        features = replace(first.features, prediction=ends)
        initial = rule.fit(replace(first, features=features))
        return FittedRolloutRegion(threshold, self, initial)

    def initial_rule(
        self, left_out: Bool[Tensor, " *state"]
    ) -> FieldRegion | LocalRegion | None:
        """The rule for initial states, given which coordinates are not bounded; None for a single number."""
        state, quantile = tuple(left_out.shape), (1 + self.quantile) / 2
        if math.prod(state) < 2:
            return None
        n_spatial = grid_axes(state)
        if math.prod(state[len(state) - n_spatial :]) < MIN_CELLS:
            return LocalRegion(quantile)
        # A few values and a long memory are no line of cells.
        places = (~left_out).flatten().nonzero()[:, 0].tolist()
        if len(state) == 1 and 2 <= len(places) < MIN_CELLS:
            return LocalRegion(quantile, tuple(places))
        return FieldRegion(quantile, n_spatial)


@dataclass(frozen=True)
class FittedRolloutRegion:
    """The largest support distance of a safe step, and the region of initial states; None for states of a single number."""

    threshold: float
    rule: RolloutRegion
    initial: FittedFieldRegion | FittedLocalRegion | None = None
    meaning: tuple[str, str] = MEANING

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The support distance itself."""
        return features.support_distance

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most the threshold."""
        return support_score <= self.threshold


@dataclass(frozen=True)
class InitialStates:
    """Standardised initial states and the states that their first steps end at, which explain why they are not safe."""

    region: FittedFieldRegion | FittedLocalRegion
    inputs: Float[Tensor, " n *state"]
    prediction: Float[Tensor, " n *state"]

    @staticmethod
    def of(
        region: FittedRegion, first: Float[Tensor, " n 2 *state"] | None
    ) -> "InitialStates | None":
        """The initial states that ``first_steps`` returned."""
        if first is None:
            return None
        assert isinstance(region, FittedRolloutRegion)
        assert region.initial is not None
        return InitialStates(region.initial, first[:, 0], first[:, 1])

    def ratio(self, rows: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
        """The largest ratio of a score to its threshold."""
        return self.region.ratios(self.inputs[rows], self.prediction[rows]).amax(dim=1)

    def explain(self, rollout: int) -> str:
        """Why the initial state of a rollout is unlike the data; empty if it is not."""
        own = slice(rollout, rollout + 1)
        inputs, prediction = self.inputs[own], self.prediction[own]
        if float(self.region.ratios(inputs, prediction).max()) <= SAFE:
            return ""
        return self.region.explain_field(inputs, prediction)


def first_steps(
    region: FittedRegion, features: RolloutFeatures
) -> Float[Tensor, " n 2 *state"] | None:
    """The standardised initial states and the ends of the first steps; None if the region does not test initial states."""
    if not isinstance(region, FittedRolloutRegion) or region.initial is None:
        return None
    first = torch.arange(len(features), device=features.alive.device) * features.n_steps
    state, rows = region.initial.coordinates.input_shape, features.along[first]
    parts = (rows.inputs, rows.prediction.to(rows.inputs))
    return torch.stack([without_forcing(part, state) for part in parts], dim=1)


def score_along(region: FittedRegion, features: RolloutFeatures) -> PerStep:
    """The support score of each step; infinite from the step at which a rollout diverges."""
    alive = features.alive
    score = features.support_distance.new_full(alive.shape, torch.inf)
    if alive.any():
        score[alive] = region.support_score(features.along[alive.flatten()])
    initial = InitialStates.of(region, first_steps(region, features))
    kept = alive[:, 0].nonzero()[:, 0]
    if initial is not None and len(kept):
        unlike = region.threshold * initial.ratio(kept).to(score)
        score[kept, 0] = torch.maximum(score[kept, 0], unlike)
    return score
