"""Conformal factors of each step, calibrated for groups of coordinates."""

import math

import torch
from jaxtyping import Bool, Float
from scipy.optimize import isotonic_regression
from torch import Tensor

from geoq.quantiles import n_required
from geoq.rollout.trajectories import Values

# Up to this many coordinates have a factor each. More coordinates form groups of neighbouring ones.
MOST_SINGLE, GROUP_SIZE = 32, 8


def coordinate_groups(n_coordinates: int) -> list[slice]:
    """The coordinates that have their conformal factors in common.

    Example:
        >>> len(coordinate_groups(3)), coordinate_groups(64)[:2]
        (3, [slice(0, 8, None), slice(8, 16, None)])
    """
    size = 1 if n_coordinates <= MOST_SINGLE else GROUP_SIZE
    return [slice(i, i + size) for i in range(0, n_coordinates, size)]


def counted_ratios(error: Values, shape: Values) -> Values:
    """Errors divided by ``shape``, with nan for the values that do not count.

    A rollout counts up to the step before it diverges. A coordinate counts at a step if any rollout has an error there: the
    copied values of a window of lags, fixed boundary values and constant parameters would otherwise count as covered.
    """
    diverged = error.isinf().any(dim=2, keepdim=True)
    exact = without_error(error)
    return torch.where(diverged | exact, torch.nan, error / shape)


def without_error(error: Values) -> Bool[Tensor, " n_steps n_coordinates"]:
    """Whether all errors of a coordinate at a step are zero; infinite errors of diverged rollouts do not count."""
    return ((error == 0) | error.isinf()).all(dim=0) & (error == 0).any(dim=0)


def group_quantiles(
    ratio: Values, level: Float[Tensor, " n_steps"]
) -> Float[Tensor, " n_steps n_coordinates"]:
    """The quantile of the ratios of each group at each step, repeated for its coordinates; zero if none of them counts."""
    parts = []
    for columns in coordinate_groups(ratio.shape[2]):
        values = ratio[:, :, columns].transpose(0, 1).flatten(start_dim=1)
        ordered = values.sort(dim=1).values  # nan comes last
        n = (~ordered.isnan()).sum(dim=1)
        rank = (n * level.to(n.device) - 1e-9).ceil().long()
        place = (torch.minimum(rank, n) - 1).clamp(min=0)
        found = ordered.gather(1, place[:, None]).nan_to_num(0.0, posinf=torch.inf)
        parts.append(found.expand(-1, ratio[0, :, columns].shape[1]))
    return torch.cat(parts, dim=1)


def step_factors(
    error: Values, shape: Values, quantile: float
) -> Float[Tensor, " n_steps n_coordinates"]:
    r"""The conformal factor of each step and coordinate on the bounds ``shape``.

    .. math:: k_n = \max(\text{isotonic regression of } q_n(\tau), \; q_n(\tau - 2 \sqrt{\tau (1 - \tau) / m_n}))

    Here m is the number of rollouts that have not diverged at step n. The factor :math:`q_n(\tau)` is the smallest one for which
    a new rollout that has not diverged is expected to have the fraction tau of its values in the group covered. Isotonic
    regression reduces the noise between the steps. The second term limits what the regression can take from a step, in a
    system whose errors decrease. The factors are infinite from the first step with too few rollouts. They are zero where all
    errors are zero.
    """
    ratio = counted_ratios(error, shape)
    n_alive = (~error.isinf().any(dim=2)).sum(dim=0).double()
    enough = n_alive >= n_required(quantile)
    n_alive = n_alive.clamp(min=1)
    factor = group_quantiles(ratio, quantile * (n_alive + 1) / n_alive)
    slack = 2 * (quantile * (1 - quantile) / n_alive).sqrt()
    least = group_quantiles(ratio, (quantile - slack).clamp(min=0))
    n_finite = int(enough.long().cumprod(dim=0).sum())
    smooth = torch.full_like(factor, torch.inf)
    for columns in coordinate_groups(factor.shape[1]):
        values = factor[:n_finite, columns.start].tolist()
        column = factor.new_tensor(nondecreasing(values))
        column = torch.maximum(column, least[:n_finite, columns.start])
        smooth[:n_finite, columns] = column[:, None]
    exact = without_error(error)
    exact[n_finite:] = False
    return smooth.masked_fill(exact, 0.0)


def nondecreasing(values: list[float]) -> list[float]:
    """Isotonic regression of the values before the first infinite one; all values after it become infinite."""
    finite = next(
        (i for i, v in enumerate(values) if not math.isfinite(v)), len(values)
    )
    smooth = isotonic_regression(values[:finite]).x.tolist() if finite else []
    return [*smooth, *[math.inf] * (len(values) - finite)]
