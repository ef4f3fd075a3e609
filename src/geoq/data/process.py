r"""A Gaussian process through the data: a second opinion about the output, with a variance, from the same pairs.

.. math:: m(x) = \bar y + k(x)^T (K + \nu I)^{-1} (y - \bar y), \qquad
          v(x) = s^2 \bigl(1 - k(x)^T (K + \nu I)^{-1} k(x) + \nu\bigr)

Kernel, length scales and noise maximise the likelihood once, on at most 200 points, so that a fold needs one factorisation. Of more
than 500 points, 250 are centres C, and a query is conditioned on the centres and on the 24 other points N that are nearest to it:

.. math:: \tilde k(x, x') = k(x, x') - a(x)^T a(x'), \quad a(x) = L^{-1} k_C(x), \quad w = (\tilde K_{NN} + \nu I)^{-1} \tilde k_N(x)

.. math:: m = m_C(x) + w^T (y_N - m_C(z_N)), \qquad v = s^2 (1 - a^T a - w^T \tilde k_N(x) + \nu)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize

from geoq.arrays import permutation
from geoq.neighbors import Neighbors

# The likelihood is computed on at most this many points. With more points than the second number, some are centres.
MAX_SEARCHED, MAX_EXACT, N_CENTRES = 200, 500, 250
# Points near a query, queries that are solved at once, and the largest number of stored values a(z_i).
N_NEAREST, AT_ONCE, MAX_STORED = 24, 128, 20_000_000
# The logarithms of the length scales have a normal prior around their own mean, with this deviation.
PRIOR_WIDTH = 0.5
# Limits of a logarithm of a length scale, relative to log sqrt(number of inputs), and of the noise relative to the signal.
SCALE_LIMITS, NOISE_LIMITS = (-4.0, 5.0), (1e-8, 10.0)
# The search starts at this multiple of sqrt(number of inputs), with this noise.
START, START_NOISE, MAX_STEPS = 2.0, 1e-3, 25
# Added to the noise against rounding.
ROUNDING = 1e-8
# Outputs beyond this number are replaced by their principal components in the search.
MAX_OUTPUTS = 8
# More inputs than this have one length scale in common.
MAX_SCALES = 64


def _rbf(squared: Any) -> tuple[Any, Any]:
    k = np.exp(-squared / 2)
    return k, k


def _matern52(squared: Any) -> tuple[Any, Any]:
    r = np.sqrt(5 * squared)
    e = np.exp(-r)
    return (1 + r + r * r / 3) * e, 5 / 3 * (1 + r) * e


def _matern32(squared: Any) -> tuple[Any, Any]:
    r = np.sqrt(3 * squared)
    e = np.exp(-r)
    return (1 + r) * e, 3 * e


# Each kernel returns its values at squared distances, and -2 times its derivative there.
KERNELS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "rbf": _rbf,
    "matern52": _matern52,
    "matern32": _matern32,
}


# What all folds share: the kernel, the length scale of each input, and the noise relative to the signal.
Smoothness: TypeAlias = tuple[str, np.ndarray, float]


@dataclass(frozen=True)
class Opinion:
    """What a process predicts at queries.

    Attributes:
        mean: its prediction.
        deviation: its standard deviation.
        left: the part of the signal's deviation that the data leave unexplained, from 0 to 1.
    """

    mean: Float[np.ndarray, " n p"]
    deviation: Float[np.ndarray, " n p"]
    left: Float[np.ndarray, " n"]

    def __getitem__(self, rows: Any) -> "Opinion":
        return Opinion(self.mean[rows], self.deviation[rows], self.left[rows])


@dataclass(frozen=True)
class Process:
    """A process through points; the arrays of the module's formulas, in units of the length scales."""

    kernel: str
    scales: Float[np.ndarray, " n_inputs"]
    noise: float
    centres: Float[np.ndarray, " n_centres n_inputs"]
    mean: Float[np.ndarray, " p"]
    inverse_factor: Float[np.ndarray, " n_centres n_centres"]
    weights: Float[np.ndarray, " n_centres p"]
    signal: Float[np.ndarray, " p"]
    others: Float[np.ndarray, " n_others n_inputs"]
    residual: Float[np.ndarray, " n_others p"]
    noise_of_others: Float[np.ndarray, " n_others"]
    words: ClassVar[str] = "A Gaussian process through the same data"

    @property
    def smoothness(self) -> Smoothness:
        """Kernel, length scales and noise."""
        return self.kernel, self.scales, self.noise

    @staticmethod
    def fit(points: np.ndarray, values: np.ndarray, smoothness: Smoothness) -> "Process":
        """Condition on points; rows with equal points are averaged, which lowers their noise."""
        kernel, scales, noise = smoothness
        points, values, count = _distinct(points, values)
        n_centres = len(points)
        order = np.arange(n_centres)
        if n_centres > MAX_EXACT:
            n_centres = min(N_CENTRES, max(100, MAX_STORED // len(points)))
            order = permutation(len(points))
        first, rest = order[:n_centres], order[n_centres:]
        scaled = points / scales
        centres, others, mean = scaled[first], scaled[rest], values[first].mean(axis=0)
        gram, factor = KERNELS[kernel](_squared(centres, centres))[0], None
        while factor is None:
            try:
                factor = np.linalg.cholesky(gram + np.diag(noise / count[first]))
            except np.linalg.LinAlgError:
                noise *= 10
        weights = cho_solve((factor, True), values[first] - mean)
        signal = ((values[first] - mean) * weights).mean(axis=0)
        inverse = solve_triangular(factor, np.eye(len(factor)), lower=True)
        to_centres = KERNELS[kernel](_squared(others, centres))[0]
        residual = values[rest] - mean - to_centres @ weights
        known = kernel, scales, noise, centres, mean, inverse, weights, signal
        return Process(*known, others, residual, noise / count[rest])

    def _k(self, squared: np.ndarray) -> np.ndarray:
        """The kernel at squared distances in units of the length scales."""
        return np.asarray(KERNELS[self.kernel](squared)[0])

    @cached_property
    def _explained(self) -> tuple[Any, np.ndarray]:
        """The other points and their vectors a, which a file does not hold."""
        to_centres = self._k(_squared(self.others, self.centres))
        return Neighbors(self.others), to_centres @ self.inverse_factor.T

    def __call__(self, queries: Float[np.ndarray, " n n_inputs"]) -> Opinion:
        """Mean, deviation and unexplained part at each query."""
        scaled = queries / self.scales
        k = self._k(_squared(scaled, self.centres))
        mean, own = k @ self.weights + self.mean, k @ self.inverse_factor.T
        left = 1 - (own * own).sum(axis=1)
        if len(self.others):
            for start in range(0, len(queries), AT_ONCE):
                part = slice(start, start + AT_ONCE)
                added, taken = self._near(scaled[part], own[part])
                mean[part] += added
                left[part] -= taken
        left = left.clip(min=1e-12)
        deviation = np.sqrt(self.signal * (left[:, None] + self.noise))
        return Opinion(mean, deviation, np.sqrt(left))

    def _near(self, scaled: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the nearest other points add to the mean, and take from the unexplained variance."""
        known, explained = self._explained
        near = known.nearest(scaled, N_NEAREST)[1]
        at, a = self.others[near] - scaled[:, None], explained[near]
        size = (at * at).sum(axis=2)
        squared = size[:, :, None] + size[:, None, :] - 2 * at @ at.transpose(0, 2, 1)
        matrix = self._k(squared.clip(min=0)) - a @ a.transpose(0, 2, 1)
        matrix += self.noise_of_others[near][:, :, None] * np.eye(N_NEAREST)
        to_query = self._k(size) - (a @ own[:, :, None])[:, :, 0]
        weight = np.linalg.solve(matrix, to_query[:, :, None])[:, :, 0]
        added = np.einsum("nk,nkp->np", weight, self.residual[near])
        return added, (weight * to_query).sum(axis=1)


def smoothness_of(points: np.ndarray, values: np.ndarray) -> Smoothness:
    """The kernel with the largest likelihood, and its parameters; each output has its own signal variance."""
    points, values, count = _distinct(points, values)
    chosen = permutation(len(points))[:MAX_SEARCHED] if len(points) > MAX_SEARCHED else slice(None)
    targets = _principal(values[chosen])
    found = [_search(kernel, points[chosen], targets, count[chosen]) for kernel in KERNELS]
    return min(found, key=lambda pair: pair[0])[1]


def _search(
    kernel: str, z: np.ndarray, y: np.ndarray, count: np.ndarray
) -> tuple[float, Smoothness]:
    """Minus the logarithm of the posterior at its maximum, divided by the number of points, and the parameters there."""
    (n, n_inputs), n_outputs = z.shape, y.shape[1]
    n_scales = n_inputs if n_inputs <= MAX_SCALES else 1
    centre = np.log(n_inputs) / 2

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        scaled, noise = z / np.exp(theta[:-1]), np.exp(theta[-1])
        squared = _squared(scaled, scaled)
        k, slope = KERNELS[kernel](squared)
        try:
            factor = np.linalg.cholesky(k + np.diag(noise / count + ROUNDING))
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(theta)
        inverse = cho_solve((factor, True), np.eye(n))
        weights = inverse @ y
        signal = (y * weights).mean(axis=0)
        off = (theta[:-1] - theta[:-1].mean()) / PRIOR_WIDTH
        value = n / 2 * np.log(signal).sum() + n_outputs * np.log(np.diag(factor)).sum()
        # The derivative of the value by the matrix, and from it by the length scales and the noise.
        by_matrix = (n_outputs * inverse - (weights / signal) @ weights.T) / 2
        m = by_matrix * slope
        by_scale = np.array([(m * squared).sum()])
        if n_scales > 1:
            by_scale = 2 * (scaled * (scaled * m.sum(axis=1)[:, None] - m @ scaled)).sum(axis=0)
        by_noise = (np.diag(by_matrix) / count).sum() * noise
        gradient = np.append(by_scale + off / PRIOR_WIDTH, by_noise)
        return (value + (off @ off) / 2) / n, gradient / n

    start = np.append(np.full(n_scales, centre + np.log(START)), np.log(START_NOISE))
    limits = [tuple(centre + np.array(SCALE_LIMITS))] * n_scales + [tuple(np.log(NOISE_LIMITS))]
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": MAX_STEPS}
    )
    theta = np.exp(found.x)
    scales = np.broadcast_to(theta[:-1], n_inputs).copy()
    return float(found.fun), (kernel, scales, float(theta[-1] + ROUNDING))


def _principal(values: np.ndarray) -> np.ndarray:
    """The outputs in units of their deviations, or their principal components if there are many."""
    deviation = values.std(axis=0)
    y = (values - values.mean(axis=0))[:, deviation > 0] / deviation[deviation > 0]
    if not y.shape[1]:
        return np.zeros((len(values), 1)) + 1e-9 * np.arange(len(values))[:, None]
    if y.shape[1] > MAX_OUTPUTS:
        left, size, _ = np.linalg.svd(y, full_matrices=False)
        share = np.cumsum(size**2) / (size**2).sum()
        n = min(int((share < 0.99).sum()) + 1, MAX_OUTPUTS)
        y = left[:, :n] / left[:, :n].std(axis=0)
    return y


def _distinct(points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct points, the mean value at each, and how many rows it has."""
    distinct, place, count = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    total = np.zeros((len(distinct), values.shape[1]))
    np.add.at(total, place.reshape(-1), values)
    return distinct, total / count[:, None], count


def _squared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances."""
    return ((a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * a @ b.T).clip(min=0)


def of_folds(
    fit: Callable[[Any], Any], points: np.ndarray, splits: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[Any, Opinion]:
    """The model of all rows, and what the models of the folds predict at the points held out; ``fit`` receives rows."""
    parts = [fit(left_in)(points[held_out]) for left_in, held_out in splits]
    columns = ([getattr(part, name) for part in parts] for name in ("mean", "deviation", "left"))
    return fit(slice(None)), Opinion(*map(np.concatenate, columns))


def second_opinion(
    points: np.ndarray, values: np.ndarray, splits: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[Process, Opinion]:
    """The process through all points, and what the process through the points of each fold predicts at the points held out."""
    shared = smoothness_of(points, values)
    return of_folds(lambda rows: Process.fit(points[rows], values[rows], shared), points, splits)
