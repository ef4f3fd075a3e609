"""RolloutGeoQ: error bounds along autoregressive forecasts, and until when to trust them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from geoq.folds import ClusterFolds, CombinedFolds, FoldPlan, Folds, TemporalFolds
from geoq.increment import check_quantile
from geoq.representation import Representation, Standardization
from geoq.rollout.assessment import RolloutAssessment
from geoq.rollout.crossfit import Scene, cross_fit_rollouts, trained
from geoq.rollout.features import RolloutCalibration, RolloutFeatures, embed
from geoq.rollout.saturating import SaturatingGrowth, n_rollouts_needed
from geoq.rollout.trajectories import DIVERGED, TrainStepper, Trajectories, roll_out
from geoq.safe_region import DistanceRegion, SafeRule
from geoq.surrogate import (
    Array,
    Surrogate,
    check_callable,
    check_finite,
    check_fitted,
    chunks,
    restore,
    to_tensor,
)

N_PROBES = 8


@runtime_checkable
class RolloutScheme(Protocol):
    """How features along a rollout become a bound at every step; fitted on held-out rollouts."""

    quantile: float

    def fit(self, calibration: RolloutCalibration, /) -> "RolloutScheme": ...

    def __call__(self, features: RolloutFeatures, /) -> Tensor: ...


@dataclass(eq=False)
class RolloutGeoQ:
    r"""Error bounds, safe flags and a trusted horizon for the rollouts of a fixed surrogate of one time step.

    .. math:: \widehat u_{n+1} = \widehat F(\widehat u_n), \quad E_n = |u_n - \widehat u_n|, \quad E_0 = 0

    Attributes:
        surrogate: the trained model, from a batch of states to the next ones; None trains it on all trajectories first.
        train_surrogate: ``train_surrogate(segments)`` returns a fresh surrogate, given a list of contiguous pieces of
            trajectories that hold no held-out state; called once per fold. None means that no retraining is possible
            and that the surrogate never saw these trajectories.
        representation: phi, fixed and shared by all folds; None means the standardised state.
        folds: which states are held out together; the number of the trajectory is each state's group. By default blocks
            of time, which are like the near future, and clusters, which are unlike all that was seen: 10 trainings.
        scheme: from features along the rollout to the bound, copied before it is fitted; ``AdditiveRecursion`` is the
            paper's.
        n_calibration: steps of the calibration rollouts, the calibration horizon.
        n_starts: calibration rollouts per fold.
        n_anchors: k_a, anchors that displacements are measured from.
        n_support: k, states that the support distance averages over.
        n_safe: K_safe, calibration features that the paper's support score averages over.
        safe_quantile: alpha_safe, share of the calibration's steps that the safe region contains.
        safe_region: the rule of the safe region; ``SafeRegion`` is the paper's.
    """

    surrogate: Surrogate | None
    train_surrogate: TrainStepper | None
    _: KW_ONLY
    representation: Representation | None = None
    folds: Folds = field(
        default_factory=lambda: CombinedFolds(TemporalFolds(5), ClusterFolds(5))
    )
    scheme: RolloutScheme = field(default_factory=SaturatingGrowth)
    n_calibration: int = 300
    n_starts: int = 40
    n_anchors: int = 1
    n_support: int = 20
    n_safe: int = 20
    safe_quantile: float = 0.95
    safe_region: SafeRule = DistanceRegion

    def fit(self, trajectories: Array | Sequence[Array]) -> "RolloutGeoQ":
        """Calibrate on true trajectories.

        Args:
            trajectories: one trajectory of shape (n_times, *state), or a list of them; an array is always one.

        Raises:
            ValueError: trajectories or a setting are unusable; said before any training starts.
        """
        # On a copy, so that an interrupted or refused fit leaves the estimator as it was.
        fitted = copy.copy(self)
        fitted._fit(trajectories)
        vars(self).update(vars(fitted))
        return self

    def _fit(self, trajectories: Array | Sequence[Array]) -> None:
        self._check_arguments()
        gathered = Trajectories.gather(trajectories)
        self._check_lengths(gathered)
        states = to_tensor(gathered.states, "trajectories")
        self.normalization_ = Standardization.fit(states)
        self.like_ = gathered.states[:N_PROBES]
        if self.surrogate is not None:
            self._check_surrogate()
        mean, scale = self.normalization_.mean, self.normalization_.scale
        self.limit_ = mean.abs() + DIVERGED * scale
        embedding = embed(states, self.normalization_, self.representation, self.like_)
        points = embedding.normalized.flatten(start_dim=1).cpu().numpy()
        plan = FoldPlan.draw(self.folds, points, gathered.number)
        starts = self._plan(gathered, plan)
        scene = Scene(
            gathered,
            embedding,
            self.normalization_,
            self.representation,
            self.limit_,
            self.scheme.quantile,
            self.n_anchors,
            self.n_support,
        )
        everything = np.arange(len(gathered))
        self.surrogate_ = (
            self.surrogate
            if self.surrogate is not None
            else trained(
                self._recipe,
                gathered,
                everything,
                "the deployed surrogate on all trajectories",
            )
        )
        self.surroundings_ = scene.surroundings(
            torch.as_tensor(everything, device=states.device)
        )
        self.calibration_ = cross_fit_rollouts(
            scene,
            plan,
            starts,
            train_surrogate=self._recipe,
            n_steps=self.n_calibration,
        )
        self.scheme_ = copy.deepcopy(self.scheme).fit(self.calibration_)
        self.safe_region_ = self.safe_region.fit(
            self.calibration_.tuples,
            n_safe=self.n_safe,
            safe_quantile=self.safe_quantile,
        )

    def assess(
        self,
        x0: Array,
        n_steps: int,
        tolerance: float | Array | None = None,
    ) -> RolloutAssessment:
        """Roll out from each initial state and bound the error of every step.

        Args:
            x0: initial states, one per row, taken as exact.
            n_steps: steps to forecast; may exceed the calibration horizon.
            tolerance: largest bound that counts as trusted, a number or one per coordinate of the state.
        """
        self._check_queries(x0, n_steps)
        largest = self._check_tolerance(tolerance)
        parts = list(self._answers(x0, n_steps))
        arrays = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        trusted = arrays["safe"]
        if largest is not None:
            within = arrays["error_hat"] <= largest.to(arrays["error_hat"])
            trusted = trusted & within.flatten(start_dim=2).all(dim=2)
        horizon = trusted.long().cumprod(dim=1).sum(dim=1)
        return RolloutAssessment(
            **{name: restore(array, x0) for name, array in arrays.items()},
            trusted_horizon=restore(horizon, x0),
            threshold=self.safe_region_.threshold,
            meaning=self.safe_region_.meaning,
            n_calibrated=self.calibration_.n_steps,
            tolerance=tolerance,
        )

    def _answers(self, x0: Array, n_steps: int) -> Iterator[dict[str, Tensor]]:
        """Answers to chunks of initial states, by the names of ``RolloutAssessment``."""
        dtype = to_tensor(x0[:1], "x0").dtype
        for rows in chunks(len(x0), n_steps * self.limit_.numel()):
            states = roll_out(self.surrogate_, x0[rows], n_steps, self.limit_)
            features = self.surroundings_.features(
                states, self.normalization_, self.representation, x0
            )
            alive, lost = features.alive, ~features.alive
            score = features.support_distance.new_full(alive.shape, torch.inf)
            score[alive] = self.safe_region_.support_score(
                features.along[alive.flatten()]
            )
            bound = self.scheme_(features)
            bound[lost] = torch.inf
            yield {
                "prediction": states[:, 1:],
                "error_hat": bound.to(dtype),
                "safe": self.safe_region_.contains(score.flatten()).reshape(
                    alive.shape
                ),
                "support_score": score.to(dtype),
                "diverged_at": torch.where(
                    lost.any(dim=1), lost.long().argmax(dim=1) + 1, 0
                ),
            }

    def _recipe(self, segments: list[Array]) -> Surrogate:
        if self.train_surrogate is not None:
            return self.train_surrogate(segments)
        # Without retraining every fold is served by the deployed surrogate, which saw none of these data.
        return self.surrogate_

    def _plan(self, trajectories: Trajectories, plan: FoldPlan) -> list[np.ndarray]:
        """Starts of the calibration rollouts, refused where folds leave too little; nothing is trained yet."""
        plan.check(
            n_anchors=self.n_anchors,
            n_support=self.n_support,
            n_safe=self.safe_region.n_others(self.n_safe),
        )
        for fold, (kept, _) in enumerate(plan.splits, start=1):
            if not trajectories.segments(kept):
                raise ValueError(
                    f"fold {fold} of {len(plan.splits)} leaves in no two consecutive states to train on; choose folds "
                    "of contiguous states, for example TemporalFolds(5)."
                )
        starts = [
            trajectories.starts(held_out, self.n_calibration, self.n_starts)
            for _, held_out in plan.splits
        ]
        n_rollouts, quantile = sum(map(len, starts)), self.scheme.quantile
        if n_rollouts < n_rollouts_needed(quantile):
            raise ValueError(
                f"quantile={quantile} needs at least {n_rollouts_needed(quantile)} calibration rollouts, but the folds "
                f"hold out only {n_rollouts} states with {self.n_calibration} steps of truth ahead of them; lower "
                "n_calibration, raise n_starts or give more data."
            )
        return starts

    def _check_arguments(self) -> None:
        check_quantile(self.safe_quantile, "safe_quantile")
        for name in ("n_calibration", "n_starts", "n_anchors", "n_support", "n_safe"):
            count = getattr(self, name)
            if not isinstance(count, Integral) or count < 1:
                raise ValueError(
                    f"{name}={count!r}, but it counts something; choose a whole number, 1 or more."
                )
        for name, kind, example in (
            ("scheme", RolloutScheme, "SaturatingGrowth(quantile=0.9)"),
            ("safe_region", SafeRule, "DistanceRegion"),
        ):
            part = getattr(self, name)
            if not isinstance(part, kind) or (
                name == "scheme" and isinstance(part, type)
            ):
                raise TypeError(
                    f"{name}={part!r} cannot be fitted; pass an object such as {name}={example}."
                )
        if self.surrogate is None and self.train_surrogate is None:
            raise ValueError(
                "surrogate=None and train_surrogate=None, so there is no model whose error could be estimated; "
                "pass a trained surrogate, or a function train_surrogate(segments) that returns one."
            )
        for name in ("surrogate", "representation"):
            if getattr(self, name) is not None:
                check_callable(getattr(self, name), name)
        if self.train_surrogate is not None and not callable(self.train_surrogate):
            raise TypeError(
                "train_surrogate must be callable as train_surrogate(segments), got "
                f"{type(self.train_surrogate).__name__}; pass a function, or a TrainRollout."
            )

    def _check_lengths(self, trajectories: Trajectories) -> None:
        if trajectories.longest <= self.n_calibration:
            raise ValueError(
                f"n_calibration={self.n_calibration}, but the longest trajectory has {trajectories.longest} states, and "
                f"{self.n_calibration} steps need one more than that many; lower n_calibration or give longer "
                "trajectories (an array is one trajectory, its first axis time; several are passed as a list)."
            )

    def _check_surrogate(self) -> None:
        """Refuse a surrogate that does not step, or answers the same question in two ways."""
        assert self.surrogate is not None
        limit = torch.full_like(self.normalization_.mean, torch.inf)
        first, second = (
            roll_out(self.surrogate, self.like_, 1, limit)[:, 1] for _ in range(2)
        )
        difference = float((first - second).abs().nan_to_num().max())
        if difference > 1e-3 * float(first.abs().nan_to_num().max()):
            raise ValueError(
                f"surrogate gave two answers to the same states, up to {difference:.3g} apart, so its error would be "
                "random; switch dropout and sampling off, or fix their seed."
            )

    def _check_queries(self, x0: Array, n_steps: int) -> None:
        check_fitted(self, "safe_region_")
        if not isinstance(n_steps, Integral) or n_steps < 1:
            raise ValueError(
                f"n_steps={n_steps!r}, but it counts the steps to forecast; choose a whole number, 1 or more."
            )
        states, shape = to_tensor(x0, "x0"), tuple(self.normalization_.mean.shape)
        if states.ndim == 0 or tuple(states.shape[1:]) != shape or not len(states):
            single = (
                "; a single state needs a first dimension of 1"
                if tuple(states.shape) == shape
                else ""
            )
            raise ValueError(
                f"x0 has shape {tuple(states.shape)}, but RolloutGeoQ was fitted on states of shape {shape}; "
                f"pass at least one state of that shape{single}."
            )
        check_finite(states, "x0")

    def _check_tolerance(self, tolerance: float | Array | None) -> Tensor | None:
        if tolerance is None:
            return None
        largest = torch.as_tensor(tolerance)
        shape = tuple(self.normalization_.mean.shape)
        if largest.ndim and tuple(largest.shape) != shape:
            raise ValueError(
                f"tolerance has shape {tuple(largest.shape)}, but states have {shape}; pass a number, or one per "
                "coordinate of the state."
            )
        if not bool((largest > 0).all()):
            raise ValueError(
                f"tolerance={tolerance}, but a bound is never below 0; pass positive numbers, or None for no tolerance."
            )
        return largest.to(self.normalization_.mean.device)
