"""Refusals of unusable arguments of RolloutGeoQ, before anything is trained or rolled out."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from geoq.arrays import Array
from geoq.checks import add_note_on_error, check_callable, shortened
from geoq.fold_plan import FoldPlan
from geoq.probing import Ask
from geoq.quantiles import n_required
from geoq.regions.safe_region import DistanceRegion, NeedsNeighbors
from geoq.rollout.recipe import TrainRollout
from geoq.rollout.region import RolloutRegion
from geoq.rollout.saturating import SaturatingGrowth
from geoq.rollout.trajectories import Trajectories, roll_out
from geoq.surrogate import Surrogate
from geoq.training.fold_surrogates import TrainedFolds, check_sources
from geoq.training.recipe import TrainNetwork

if TYPE_CHECKING:
    from geoq.rollout.estimator import RolloutGeoQ


def check_models(geoq: "RolloutGeoQ") -> None:
    """Refuse objects that cannot be called, the absence of any model, and a representation without an effect."""
    surrogate, train_surrogate = geoq.surrogate, geoq.train_surrogate
    pretrained = isinstance(train_surrogate, TrainedFolds)
    check_sources(surrogate, train_surrogate, "segments", is_source=pretrained)
    if isinstance(train_surrogate, TrainNetwork):
        raise TypeError(
            "train_surrogate is a TrainNetwork, which trains on pairs (x, y), but RolloutGeoQ trains on segments of "
            "trajectories; pass a TrainRollout with the same make_network and training."
        )
    if surrogate is not None:
        check_callable(surrogate, "surrogate")
    if geoq.representation is not None:
        check_callable(geoq.representation, "representation")
        region = geoq.safe_region
        if isinstance(geoq.scheme, SaturatingGrowth) and isinstance(
            region, RolloutRegion | DistanceRegion
        ):
            raise ValueError(
                f"representation={shortened(geoq.representation)}, but SaturatingGrowth and {type(region).__name__} use neither "
                "anchors nor displacements, so it has no effect; leave it out, or pass scheme=AdditiveRecursion() or "
                "safe_region=SafeRegion()."
            )
    if not (train_surrogate is None or pretrained or callable(train_surrogate)):
        raise TypeError(
            "train_surrogate must be callable as train_surrogate(segments), got "
            f"{type(train_surrogate).__name__}; pass a function, a TrainRollout or TrainedFolds."
        )


def check_lengths(trajectories: Trajectories, n_calibration: int) -> None:
    """Refuse trajectories that are shorter than a calibration rollout."""
    if trajectories.longest <= n_calibration:
        raise ValueError(
            f"n_calibration={n_calibration}, but the longest trajectory has {trajectories.longest} states, and this number "
            f"of steps needs {n_calibration + 1}; lower n_calibration or give longer trajectories (an array is one trajectory "
            "with time as the first axis; pass several trajectories as a list)."
        )


def one_step(surrogate: Surrogate) -> Ask:
    """A function that returns the next states; states that diverge become nan."""

    def ask(states: Array) -> Tensor:
        limit = torch.full(states.shape[1:], torch.inf)
        return roll_out(surrogate, states, 1, limit)[:, 1]

    return ask


def plan_starts(
    geoq: "RolloutGeoQ", trajectories: Trajectories, plan: FoldPlan
) -> list[np.ndarray]:
    """The rows from which the calibration rollouts of each fold start; unusable folds are refused before any training."""
    plan.check(n_anchors=geoq.n_anchors, n_support=geoq.n_support)
    if isinstance(geoq.safe_region, NeedsNeighbors):
        geoq.safe_region.check_neighbors(plan.n_independent)
    for fold, (kept, _) in enumerate(plan.splits, start=1):
        lengths = [len(run) for run in trajectories.runs(kept)]
        if not lengths:
            raise ValueError(
                f"folds={geoq.folds!r}, but fold {fold} of {len(plan.splits)} leaves no pair of consecutive states to "
                "train on; choose folds of contiguous states, for example TemporalFolds(5)."
            )
        if isinstance(geoq.train_surrogate, TrainRollout):
            with add_note_on_error(f"these are the segments of fold {fold}"):
                geoq.train_surrogate.check_lengths(lengths)
    starts = [
        trajectories.starts(held_out, geoq.n_calibration, geoq.n_starts)
        for _, held_out in plan.splits
    ]
    n_rollouts, quantile = sum(map(len, starts)), geoq.scheme.quantile
    if n_rollouts < n_required(quantile):
        raise ValueError(
            f"quantile={quantile} needs at least {n_required(quantile)} calibration rollouts, but there are only "
            f"{n_rollouts} with n_starts={geoq.n_starts} and n_calibration={geoq.n_calibration}; lower n_calibration, "
            "raise n_starts or give more data."
        )
    return starts


def check_tolerance(
    tolerance: float | Array | None, shape: tuple[int, ...]
) -> Tensor | None:
    """The tolerance as a tensor; refused unless it is positive, and one number or one per coordinate."""
    if tolerance is None:
        return None
    try:
        largest = torch.as_tensor(tolerance)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise TypeError(
            f"tolerance={shortened(tolerance)} is a {type(tolerance).__name__}, but numbers are needed; pass one number, an array "
            "with one per coordinate of the output, or geoq.rollout.Relative(0.1) for 10 % of the standard deviation of each "
            "coordinate."
        ) from exc
    tiny = torch.finfo(torch.float32).tiny
    if isinstance(tolerance, float) and 0 < tolerance < tiny:
        raise ValueError(
            f"tolerance={tolerance}, but numbers below {tiny:.2g} are zero in single precision; pass the states and the tolerance "
            "in a smaller unit of measurement."
        )
    if largest.ndim and tuple(largest.shape) != shape:
        raise ValueError(
            f"tolerance has shape {tuple(largest.shape)}, but the bounded output has shape {shape}; pass one number, or one per "
            "coordinate."
        )
    if not bool((largest > 0).all()):
        raise ValueError(
            f"tolerance={tolerance}, but a tolerance must be positive; pass positive numbers, or None for no tolerance."
        )
    return largest


def check_all_stored(tolerance: Tensor, n_stored: int, n_coordinates: int) -> None:
    """Refuse a tolerance per coordinate if a file kept only the largest bound and error of each step."""
    if tolerance.ndim and n_stored < n_coordinates:
        raise ValueError(
            f"tolerance has shape {tuple(tolerance.shape)}, but the file keeps only the largest error of each step of the "
            f"held-out rollouts, because states have {n_coordinates} coordinates; pass a number, or use the estimator "
            "that was saved."
        )
