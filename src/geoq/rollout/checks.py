"""What RolloutGeoQ refuses, and the way out; said before anything is trained or rolled out."""

import torch
from torch import Tensor

from geoq.arrays import Array
from geoq.checks import check_callable, check_count, check_repeatable, check_rows
from geoq.representation import Representation
from geoq.rollout.trajectories import TrainStepper, Trajectories, roll_out
from geoq.surrogate import Surrogate
from geoq.training.fold_surrogates import (
    TrainedFolds,
    check_any_model,
    check_deployed_surrogate_given,
    check_pretrained_folds,
)
from geoq.training.recipe import TrainNetwork


def check_models(
    surrogate: Surrogate | None,
    train_surrogate: TrainStepper | TrainedFolds | None,
    representation: Representation | None,
) -> None:
    """Refuse what cannot be called, and the absence of any model."""
    check_any_model(surrogate, train_surrogate, "segments")
    pretrained = isinstance(train_surrogate, TrainedFolds)
    check_deployed_surrogate_given(surrogate, train_surrogate, pretrained=pretrained)
    check_pretrained_folds(train_surrogate)
    if isinstance(train_surrogate, TrainNetwork):
        raise TypeError(
            "train_surrogate is a TrainNetwork, which learns pairs (x, y), but rollouts are learned from segments of "
            "trajectories; pass a TrainRollout with the same make_network and training."
        )
    if surrogate is not None:
        check_callable(surrogate, "surrogate")
    if representation is not None:
        check_callable(representation, "representation")
    if not (train_surrogate is None or pretrained or callable(train_surrogate)):
        raise TypeError(
            "train_surrogate must be callable as train_surrogate(segments), got "
            f"{type(train_surrogate).__name__}; pass a function, a TrainRollout or TrainedFolds."
        )


def check_lengths(trajectories: Trajectories, n_calibration: int) -> None:
    """Refuse trajectories that are shorter than a calibration rollout."""
    if trajectories.longest <= n_calibration:
        raise ValueError(
            f"n_calibration={n_calibration}, but the longest trajectory has {trajectories.longest} states, and so many "
            "steps need one more state than steps; lower n_calibration or give longer trajectories (an array is one "
            "trajectory, its first axis time; several are passed as a list)."
        )


def check_steps(surrogate: Surrogate, states: Array) -> None:
    """Refuse a surrogate that does not step, or answers the same question in two ways."""
    limit = torch.full(states.shape[1:], torch.inf)
    check_repeatable(lambda: roll_out(surrogate, states, 1, limit)[:, 1], "states")


def check_question(x0: Array, n_steps: int, shape: tuple[int, ...]) -> None:
    """Refuse initial states of another shape than the one fitted, and rollouts of no steps."""
    check_count(n_steps, "n_steps")
    check_rows(x0, "x0", shape, "RolloutGeoQ was fitted on states", "state")


def check_tolerance(
    tolerance: float | Array | None, shape: tuple[int, ...]
) -> Tensor | None:
    """The tolerance as a tensor, refused unless positive and one number or one per coordinate."""
    if tolerance is None:
        return None
    largest = torch.as_tensor(tolerance)
    if largest.ndim and tuple(largest.shape) != shape:
        raise ValueError(
            f"tolerance has shape {tuple(largest.shape)}, but states have {shape}; pass a number, or one per "
            "coordinate of the state."
        )
    if not bool((largest > 0).all()):
        raise ValueError(
            f"tolerance={tolerance}, but a bound is never below 0; pass positive numbers, or None for no tolerance."
        )
    return largest


def check_whole(tolerance: Tensor, n_kept: int, n_coordinates: int) -> None:
    """Refuse a tolerance per coordinate where only the largest bound and error of each step were kept."""
    if tolerance.ndim and n_kept < n_coordinates:
        raise ValueError(
            f"tolerance has shape {tuple(tolerance.shape)}, but the file keeps only the largest error of each step of the "
            f"held-out rollouts, whose {n_coordinates} coordinates were too many; pass a number, or ask the estimator that "
            "was saved."
        )
