"""Conformal factors of each step, calibrated for groups of coordinates."""

import numpy as np
from jaxtyping import Bool, Float

from geoq.quantiles import n_required
from geoq.rollout.series import Values

# Up to this many coordinates have a conformal factor each. More coordinates form groups of neighbouring ones.
MOST_SINGLE, GROUP_SIZE = 32, 8
# The factors of step n are averaged over the steps between (1 - WINDOW) n and (1 + WINDOW) n.
WINDOW = 0.15


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

    A coordinate counts at a step if any rollout has an error there: the copied values of a window of lags, fixed boundary values
    and constant parameters would otherwise count as covered.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(without_error(error), np.nan, error / shape)


def without_error(error: Values) -> Bool[np.ndarray, " n_steps n_coordinates"]:
    """Whether all errors of a coordinate at a step are zero or nan."""
    return ~np.asarray((error > 0).any(axis=0))


def group_quantiles(ratio: Values, level: Float[np.ndarray, " n_steps"]) -> np.ndarray:
    """The quantile of the ratios of each group at each step, repeated for its coordinates; zero if none of them counts."""
    n_steps, parts = ratio.shape[1], []
    for columns in coordinate_groups(ratio.shape[2]):
        values = ratio[:, :, columns]
        ordered = np.sort(values.swapaxes(0, 1).reshape(n_steps, -1), axis=1)  # nan comes last
        n = (~np.isnan(ordered)).sum(axis=1)
        place = (np.minimum(np.ceil(n * level - 1e-9), n) - 1).clip(min=0).astype(int)
        found = np.nan_to_num(ordered[np.arange(n_steps), place], posinf=np.inf)
        parts.append(np.repeat(found[:, None], values.shape[2], axis=1))
    return np.concatenate(parts, axis=1)


def step_factors(
    error: Values, shape: Values, quantile: float
) -> Float[np.ndarray, " n_steps n_coordinates"]:
    r"""The conformal factor of each step and coordinate on the bounds ``shape``.

    .. math:: k_n = \max(\text{geometric mean of } q_m(\tau) \text{ over } |m - n| \le 0.15 n, \;
        q_n(\tau - 2 \sqrt{\tau (1 - \tau) / m_n}))

    Here :math:`m_n` is the number of rollouts that have not diverged at step n. The factor :math:`q_n(\tau)` is the smallest one
    for which a new rollout that has not diverged is expected to have the fraction tau of its values in the group covered. The
    mean reduces the noise between the steps, and the second term limits what it can take from a step. The factors are infinite
    from the first step with too few rollouts, and zero without errors.
    """
    ratio = counted_ratios(error, shape)
    n_alive = (~np.isnan(error).all(axis=2)).sum(axis=0)
    n_finite = int(np.logical_and.accumulate(n_alive >= n_required(quantile)).sum())
    n_alive = n_alive.clip(min=1)
    found = group_quantiles(ratio, quantile * (n_alive + 1) / n_alive)[:n_finite]
    slack = 2 * np.sqrt(quantile * (1 - quantile) / n_alive)
    least = group_quantiles(ratio, (quantile - slack).clip(min=0))[:n_finite]
    factor = np.full(error.shape[1:], np.inf)
    factor[:n_finite] = np.maximum(averaged(found), least)
    factor[:n_finite][without_error(error)[:n_finite]] = 0.0
    return factor


def averaged(values: Float[np.ndarray, " n_steps n"]) -> Float[np.ndarray, " n_steps n"]:
    """The geometric mean of each column over neighbouring steps; a zero does not count."""
    counts, step = values > 0, np.arange(len(values))
    logarithm = np.log(values, where=counts, out=np.zeros_like(values))
    total, number = (np.pad(part.cumsum(axis=0), ((1, 0), (0, 0))) for part in (logarithm, counts))
    half = np.round(WINDOW * (step + 1)).astype(int)
    first, end = (step - half).clip(min=0), (step + half + 1).clip(max=len(values))
    mean = (total[end] - total[first]) / (number[end] - number[first]).clip(min=1)
    return np.asarray(np.exp(mean))


def extended(values: np.ndarray, n_steps: int) -> np.ndarray:
    """The values of ``n_steps`` steps; the last one is repeated past the calibration horizon."""
    return np.asarray(values[np.arange(n_steps).clip(max=len(values) - 1)])
