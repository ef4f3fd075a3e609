"""The paper's scheme for rollouts: the bound is a sum of increments. Its training needs torch, its answers do not."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks
from geoq.checks import check_function, check_widths, module_with_torch
from geoq.data.coordinates import spread
from geoq.quantiles import inverse_cdf_quantile
from geoq.rollout.features import RolloutCalibration, RolloutFeatures
from geoq.rollout.series import Places, Values

Psi: TypeAlias = Float[np.ndarray, " n n_steps n_features"]
# The largest number of trainings that choose the number of steps.
N_TURNS = 5


def signed_displacement(features: RolloutFeatures) -> Psi:
    r"""The paper's features psi, one vector per step.

    .. math:: \psi = (\Delta z_{k_a}, \Delta d_k)  (eq:psi)
    """
    moved = features.displacement.reshape(*features.alive.shape, -1)
    return np.concatenate([moved, features.support_distance[..., None]], axis=2)


# What a file can name.
FUNCTIONS = (signed_displacement,)


@dataclass(frozen=True)
class AdditiveRecursion:
    r"""The paper's scheme: each step adds a nonnegative increment to the bound (section on the Kuramoto-Sivashinsky equation).

    .. math:: \widehat E_{t,n+1} = \widehat E_{t,n} + g_\eta(\psi_{t,n}), \quad \widehat E_{t,0} = 0, \quad
        g_\eta(\psi) = \|\psi\| h_\eta(T(\psi))

    The network h is trained with the pinball loss of the sum. The bound grows at every step, within the calibration horizon and
    past it, although the error of a chaotic system saturates.

    The number of training steps is chosen by cross-validation over whole folds, because the rollouts of one fold have one
    surrogate in common. Each of at most five parts of the folds stops a training on the other parts early; the final training
    uses all folds and has the mean of these numbers of steps.

    Attributes:
        psi: a function that returns the features of each step.
        hidden: the widths of the hidden layers of h.
        training: a ``Training`` of h, in which a row is a rollout; None means at most 1500 steps with 16 rollouts each.

    Example:
        >>> from geoq import ClusterFolds, RolloutGeoQ
        >>> from geoq.parts import PaperRegion
        >>> paper = {"folds": ClusterFolds(5), "scheme": AdditiveRecursion(), "safe_region": PaperRegion()}
        >>> estimator = RolloutGeoQ(None, lambda segments: lambda x: x, n_anchors=50, **paper)
    """

    psi: Callable[[RolloutFeatures], np.ndarray] = signed_displacement
    hidden: tuple[int, ...] = (64, 64)
    training: Any = None

    def __post_init__(self) -> None:
        module_with_torch("torch", "AdditiveRecursion")
        check_function(self.psi, "psi", "psi(features)")
        check_widths(self.hidden, "hidden", n_least=0)

    def fit(self, calibration: RolloutCalibration, quantile: float) -> "FittedSum":
        """Choose the number of steps and train h on the rollouts that do not diverge; no finite sum fits the others."""
        from geoq.training.loop import Training, warn_if_untrained  # needs torch

        lasting = calibration.features.alive.all(axis=1)
        if not lasting.any():
            raise ValueError(
                f"n_calibration={calibration.n_steps}, but all {len(calibration)} calibration rollouts diverge within this "
                "number of steps, so no sum of increments fits them; lower n_calibration or train the surrogate longer."
            )
        training = self.training or Training(
            n_steps=1500, batch_size=16, check_every=10, patience=30
        )
        psi = self.psi(calibration.features)[lasting].astype(np.float32)
        error, fold = calibration.error[lasting].astype(np.float32), calibration.fold[lasting]
        data = psi, error, quantile
        results = [self._train(*data, training, *rows)[1] for rows in _turns(fold)]
        if error.any():
            warn_if_untrained(results, "the sum of increments")
        rows, n_steps = np.arange(len(psi)), round(fmean(result.best_step for result in results))
        # Without a step h keeps its initial weights.
        final = replace(training, n_steps=max(1, n_steps))
        return self._train(*data, final, rows, rows if n_steps else rows[:0])[0]

    def _train(
        self, psi: Psi, error: Values, quantile: float, training: Any, rows: Any, held_out: Any
    ) -> tuple["FittedSum", Any]:
        """Fit T and the coefficients, and train h on some of the rollouts; the held-out ones stop the training."""
        import torch

        from geoq.nets.mlp import MLP
        from geoq.training.loop import seeded, train

        with seeded(training.random_state):
            network = MLP(psi.shape[2], error.shape[2], hidden=self.hidden)
        mean, scale = spread(psi[rows].reshape(-1, psi.shape[2]))
        # The coefficients for which the untrained sum fits the errors in the middle of the calibration horizon.
        middle = error.shape[1] // 2
        passed = np.linalg.norm(psi[rows, : middle + 1], axis=2).sum(axis=1)
        fitting = inverse_cdf_quantile(error[rows, middle], quantile)
        fitting = fitting / inverse_cdf_quantile(passed, 0.5)
        coefficient = np.maximum(fitting, 1e-3 * fitting.max()).astype(np.float32)
        bare = FittedSum(self.psi, mean, scale, coefficient)
        arrays = (psi - mean) / scale, bare.weight(psi), error
        standard, weight, truth = (torch.from_numpy(array) for array in arrays)
        typical = float(error.mean()) or 1.0

        def loss(net: Any, rows: Any) -> Any:
            raw = net(standard[rows].flatten(0, 1)).reshape(truth[rows].shape)
            rate = torch.nn.functional.softplus(raw) / math.log(2)
            excess = truth[rows] - (weight[rows] * rate).cumsum(dim=1)
            return torch.maximum(quantile * excess, (quantile - 1) * excess).mean() / typical

        result, n_steps = None, 0
        if len(held_out):
            places = torch.from_numpy(rows), torch.from_numpy(held_out)
            result, n_steps = train(network, loss, training, *places), training.n_steps
        linear = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
        layers = tuple((own.weight.detach().numpy(), own.bias.detach().numpy()) for own in linear)
        return replace(bare, layers=layers, n_steps=n_steps), result


def _turns(fold: Places) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and rows that stop the training, for each part of the folds; all rows twice if there is one fold."""
    distinct, number = np.unique(fold, return_inverse=True)
    n_turns = min(N_TURNS, len(distinct))
    for turn in range(n_turns):
        held_out = number % n_turns == turn
        yield np.flatnonzero(~held_out if n_turns > 1 else held_out), np.flatnonzero(held_out)


@dataclass(frozen=True)
class FittedSum:
    """The sum of the increments: a coefficient per coordinate times the norm of psi times h of T(psi).

    ``mean`` and ``scale`` are T, ``layers`` are the weights and biases of h, which was trained for ``n_steps`` steps.
    """

    psi: Callable[[RolloutFeatures], np.ndarray]
    mean: Float[np.ndarray, " n_features"]
    scale: Float[np.ndarray, " n_features"]
    coefficient: Float[np.ndarray, " n_coordinates"]
    layers: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    n_steps: int = 0

    def weight(self, psi: Psi) -> Values:
        """The factor of h."""
        return np.asarray(np.linalg.norm(psi, axis=2, keepdims=True) * self.coefficient)

    def __call__(self, features: RolloutFeatures) -> Values:
        psi = np.nan_to_num(self.psi(features).astype(np.float32), posinf=0.0)
        widest = max(psi.shape[2], *(len(bias) for _, bias in self.layers))
        bound = np.empty((*psi.shape[:2], len(self.coefficient)), np.float32)
        for rows in chunks(len(psi), psi.shape[1] * widest):
            x = (psi[rows] - self.mean) / self.scale
            for number, (weight, bias) in enumerate(self.layers):
                x = (x.clip(min=0) if number else x) @ weight.T + bias
            rate = np.logaddexp(0, x) / math.log(2)
            bound[rows] = (self.weight(psi[rows]) * rate).cumsum(axis=1)
        return bound

    def describe(self) -> str:
        return f"the bound is a sum of increments; its network was trained for {self.n_steps} steps"
