"""Rollouts that run off: the range of the data, the step at which a rollout leaves it, and a warning with their number."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import take
from geoq.checks import warn
from geoq.representation import Standardization
from geoq.rollout.features import RolloutCalibration
from geoq.rollout.trajectories import States, Trajectories, forcing_from, roll_out
from geoq.surrogate import Surrogate

# The values of a coordinate differ only by rounding if their range is at most this many times the precision of the largest.
N_ROUNDINGS = 1000


@dataclass(frozen=True)
class DataRange:
    r"""The range of each coordinate in the data, extended on both sides by its own width.

    .. math:: \min_i u_{ij} - \ell_j \le u_j \le \max_i u_{ij} + \ell_j, \qquad \ell_j = \max_i u_{ij} - \min_i u_{ij}

    A rollout diverges at the first step that ends outside this range, or at nan. The data contain no information about errors
    so far outside. A coordinate that is constant in the data has no limits.

    Attributes:
        low: the lower limit of each coordinate.
        high: the upper limit of each coordinate.
    """

    low: Float[Tensor, " *state"]
    high: Float[Tensor, " *state"]

    @staticmethod
    def of(
        points: Float[Tensor, " n *state"], normalization: Standardization
    ) -> "DataRange":
        """The range of the data, given their states after standardisation by nu."""
        mean, scale = normalization.mean, normalization.scale
        low, high = (mean + scale * end for end in (points.amin(0), points.amax(0)))
        width = high - low
        precision = torch.finfo(width.dtype).eps * torch.maximum(low.abs(), high.abs())
        width = torch.where(width > N_ROUNDINGS * precision, width, torch.inf)
        return DataRange(low - width, high + width)

    def cut(self, states: States) -> States:
        """The states of rollouts, with nan from the step at which a rollout diverges; the initial state always stays."""
        # The comparisons are false for nan, so nan counts as diverged.
        inside = (states >= self.low.to(states)) & (states <= self.high.to(states))
        kept = inside.flatten(start_dim=2).all(dim=2)
        kept[:, 0] = True
        kept = kept.long().cumprod(dim=1).bool()
        kept = kept.reshape(*kept.shape, *(1,) * (states.ndim - 2))
        return torch.where(kept, states, torch.nan)


def warn_of_runaways(
    calibration: RolloutCalibration,
    deployed: Surrogate | None,
    trajectories: Trajectories,
    data_range: DataRange,
    n_forcing: int,
) -> None:
    """Warn if calibration rollouts diverge, with their fraction for the fold surrogates and the deployed surrogate.

    The deployed surrogate is rolled out only in this case; None if it is the surrogate of every fold.
    """
    diverged = ~calibration.features.alive[:, -1]
    if not diverged.any():
        return
    worst = max(
        float(diverged[calibration.fold == fold].double().mean())
        for fold in calibration.fold.unique().tolist()
    )
    text = (
        f"{_fraction(diverged)} calibration rollouts leave the range of the data by more than its width within "
        f"n_calibration={calibration.n_steps} steps (up to {100 * worst:.3g} % in a fold)"
    )
    if deployed is not None:
        data, n_steps = trajectories.states, calibration.n_steps
        rows = calibration.start
        forcing = forcing_from(data, rows, n_steps, n_forcing)
        limit = torch.maximum(data_range.low.abs(), data_range.high.abs())
        rolled = roll_out(deployed, take(data, rows), n_steps, limit, forcing)
        last = data_range.cut(rolled)[:, -1].flatten(start_dim=1)
        text += f", and {_fraction(last.isnan().any(dim=1))} rollouts of the deployed surrogate from the same states"
    warn(
        f"{text}. They count up to the step before, and they have no effect on the safe region except through their initial "
        "states. A query that leaves this range has an infinite bound from there on. To avoid it, train on rollouts "
        "(TrainRollout), clip the output of the surrogate to the range of the data, or lower n_calibration."
    )


def _fraction(holds: Tensor) -> str:
    n_all, n_some = len(holds), int(holds.sum())
    return f"{n_some} of {n_all} ({100 * n_some / n_all:.3g} %)"
