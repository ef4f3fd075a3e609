"""The paper's scheme for rollouts: the bound is a sum of increments."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.archive import load_weights
from geoq.arrays import chunks
from geoq.nets.mlp import MLP
from geoq.quantiles import check_quantile, inverse_cdf_quantile, pinball_loss
from geoq.representation import Standardization
from geoq.rollout.features import RolloutCalibration, RolloutFeatures
from geoq.settings import check_function, check_object, check_widths
from geoq.training.loop import (
    Training,
    TrainingResult,
    seeded,
    train_on,
    warn_if_untrained,
)

# The largest number of trainings that choose the number of steps.
N_TURNS = 5


def signed_displacement(
    features: RolloutFeatures,
) -> Float[Tensor, " n n_steps n_features"]:
    r"""The paper's features psi, one vector per step.

    .. math:: \psi = (\Delta z_{k_a}, \Delta d_k)  (eq:psi)
    """
    distance = features.support_distance[..., None]
    return torch.cat([features.displacement.flatten(start_dim=2), distance], dim=2)


@dataclass
class AdditiveRecursion:
    r"""The paper's scheme: each step adds a nonnegative increment to the bound (section on the Kuramoto-Sivashinsky equation).

    .. math:: \widehat E_{t,n+1} = \widehat E_{t,n} + g_\eta(\psi_{t,n}), \quad \widehat E_{t,0} = 0, \quad
        g_\eta(\psi) = \|\psi\| h_\eta(T(\psi))

    The network h is trained with the pinball loss of the sum. The bound grows at every step, within the calibration horizon and
    past it, although the error of a chaotic system saturates.

    The number of training steps is chosen by cross-validation over whole folds, because the rollouts of one fold have one surrogate
    in common. Each of at most five parts of the folds stops a training on the other parts early; the final training uses all folds
    and has the mean of these numbers of steps, which differ between folds from zero to several hundred.

    Attributes:
        quantile: tau, the quantile level.
        psi: a function that returns the features of each step.
        hidden: the widths of the hidden layers of h.
        training: the training of h, in which a row is a rollout.
        trainings_: after ``fit``, the course of the held-out loss of each training that was stopped by a part of the folds.
        n_steps_: after ``fit``, the number of steps of the final training.

    Example:
        >>> from geoq import ClusterFolds, RolloutGeoQ, SafeRegion
        >>> geoq = RolloutGeoQ(
        ...     None,
        ...     lambda segments: lambda x: x,
        ...     folds=ClusterFolds(5),
        ...     scheme=AdditiveRecursion(quantile=0.95),
        ...     n_anchors=50,
        ...     safe_region=SafeRegion(),
        ... )
    """

    quantile: float = 0.95
    psi: Callable[[RolloutFeatures], Tensor] = signed_displacement
    hidden: tuple[int, ...] = (64, 64)
    training: Training = Training(
        n_steps=1500, batch_size=16, check_every=10, patience=30
    )

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_function(self.psi, "psi", "psi(features)")
        check_widths(self.hidden, "hidden", n_least=0)
        check_object(self.training, Training, "training", "Training(n_steps=1000)")

    def fit(self, calibration: RolloutCalibration) -> "AdditiveRecursion":
        """Choose the number of steps and train h on the calibration rollouts that do not diverge."""
        rollouts = self._rollouts(calibration)
        self.trainings_ = tuple(
            self._train(rollouts, self.training, *rows)
            for rows in _turns(rollouts.fold)
        )
        if rollouts.error.any():
            warn_if_untrained(self.trainings_, "the sum of increments")
        best = fmean(result.best_step for result in self.trainings_)
        return self.train_for(round(best), calibration)

    def train_for(
        self, n_steps: int, calibration: RolloutCalibration
    ) -> "AdditiveRecursion":
        """Train h on all calibration rollouts that do not diverge, with this number of steps."""
        rollouts = self._rollouts(calibration)
        self.n_steps_ = n_steps
        if n_steps:
            rows = torch.arange(len(rollouts.psi), device=rollouts.psi.device)
            training = replace(self.training, n_steps=n_steps)
            self._train(rollouts, training, rows, rows)
        else:
            self._start(rollouts.psi, rollouts.error)
        return self

    def _rollouts(self, calibration: RolloutCalibration) -> "_Rollouts":
        """The rollouts that do not diverge; no finite sum fits the others."""
        lasting = calibration.features.alive.all(dim=1)
        if not lasting.any():
            raise ValueError(
                f"n_calibration={calibration.n_steps}, but all {len(calibration)} calibration rollouts diverge within this "
                "number of steps, so no sum of increments fits them; lower n_calibration or train the surrogate longer."
            )
        return _Rollouts(
            psi=self.psi(calibration.features)[lasting].float(),
            error=calibration.error[lasting].flatten(start_dim=2).float(),
            fold=calibration.fold[lasting],
        )

    def _train(
        self, rollouts: "_Rollouts", training: Training, rows: Tensor, held_out: Tensor
    ) -> TrainingResult:
        psi, error = rollouts.psi, rollouts.error
        typical = error.mean() if error.any() else error.new_ones(())

        def loss(net: nn.Module, rows: Tensor) -> Tensor:
            bound = net(psi[rows])
            return pinball_loss(error[rows], bound, self.quantile).mean() / typical

        self._start(psi[rows], error[rows])
        return train_on(self.module_, loss, training, rows, held_out, repeatable=True)

    @torch.no_grad()
    def __call__(self, features: RolloutFeatures) -> Float[Tensor, " n n_steps *state"]:
        psi = self.psi(features).float().nan_to_num(posinf=0.0)
        row_numbers = psi.shape[1] * max(psi.shape[2], self.module_.coefficient.numel())
        parts = [self.module_(psi[rows]) for rows in chunks(len(psi), row_numbers)]
        bound = torch.cat(parts)
        return bound.reshape(features.climatology.shape).to(features.climatology)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The settings and weights for a file; a file cannot contain a function, so ``psi`` must be the paper's."""
        if self.psi is not signed_displacement:
            raise ValueError(
                f"psi={self.psi!r} is a function of the user, which a file cannot contain; use signed_displacement."
            )
        settings = {
            "quantile": self.quantile,
            "hidden": self.hidden,
            "training": asdict(self.training),
        }
        return settings, self.module_.state_dict()

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor]
    ) -> "AdditiveRecursion":
        """The fitted scheme with the settings and weights that ``state`` returned."""
        scheme = AdditiveRecursion(
            settings["quantile"],
            hidden=tuple(settings["hidden"]),
            training=Training(**settings["training"]),
        )
        with torch.device("meta"):
            scheme._build(len(arrays["mean"]), len(arrays["coefficient"]))
        load_weights(scheme.module_, arrays)
        return scheme

    def _start(self, psi: Tensor, error: Tensor) -> None:
        """Build h with its initial weights, and fit T and the coefficients."""
        self._build(psi.shape[2], error.shape[2])
        self.module_.to(error.device)
        self.module_.fit_normalization(psi, error, self.quantile)

    def _build(self, n_features: int, n_outputs: int) -> None:
        with seeded(self.training.random_state):
            network = MLP(n_features, n_outputs, hidden=self.hidden)
        self.module_ = _Sum(network, n_features, n_outputs)


def _turns(fold: Int[Tensor, " n"]) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows to train on and rows that stop the training, for each part of the folds; all rows twice if there is one fold."""
    distinct, number = fold.unique(return_inverse=True)
    n_turns = min(N_TURNS, len(distinct))
    for turn in range(n_turns):
        held_out = number % n_turns == turn
        kept = ~held_out if n_turns > 1 else held_out
        yield kept.nonzero()[:, 0], held_out.nonzero()[:, 0]


class _Rollouts(NamedTuple):
    """The rollouts that h is trained on: features, errors and fold of each."""

    psi: Float[Tensor, " n n_steps n_features"]
    error: Float[Tensor, " n n_steps n_coordinates"]
    fold: Int[Tensor, " n"]


class _Sum(nn.Module):
    """The sum of the increments, a coefficient per coordinate times norm times h, with T in the same state dict."""

    def __init__(self, network: nn.Module, n_features: int, n_outputs: int) -> None:
        super().__init__()
        self.network = network
        self.mean = nn.Buffer(torch.zeros(n_features))
        self.scale = nn.Buffer(torch.ones(n_features))
        self.coefficient = nn.Buffer(torch.ones(n_outputs))

    def forward(self, psi: Tensor) -> Tensor:
        standardised = Standardization(self.mean, self.scale)(psi)
        raw = self.network(standardised.flatten(0, 1)).reshape(*psi.shape[:2], -1)
        rate = nn.functional.softplus(raw) / math.log(2)
        norm = torch.linalg.vector_norm(psi, dim=2, keepdim=True)
        total: Tensor = (norm * self.coefficient * rate).cumsum(dim=1)
        return total

    def fit_normalization(self, psi: Tensor, error: Tensor, quantile: float) -> None:
        """Fit T, and the coefficients for which the untrained sum fits the errors in the middle of the calibration horizon."""
        standardization = Standardization.fit(psi.flatten(0, 1))
        self.mean.copy_(standardization.mean)
        self.scale.copy_(standardization.scale)
        middle = error.shape[1] // 2
        passed = torch.linalg.vector_norm(psi[:, : middle + 1], dim=2).sum(dim=1)
        fitting = inverse_cdf_quantile(error[:, middle], quantile) / passed.median()
        self.coefficient.copy_(torch.maximum(fitting, 1e-3 * fitting.max()))
