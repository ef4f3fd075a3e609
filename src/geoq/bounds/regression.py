r"""Linear quantile regression at several levels with common slopes, by Newton's method on a smoothed pinball loss.

.. math:: \min_{b, a} \frac1L \sum_l \sum_i w_i \rho_{\tau_l}(t_i - a_l - \phi_i \cdot b) + \frac r2 \, \mathrm{IQR}(t) \, |b|^2

The kink of the pinball loss is replaced by a parabola of half width 0.3, 0.1 and then 0.03 times the interquartile range. The
problem is convex and piecewise quadratic, so Newton's method with a line search needs few steps. It is written by hand because
scikit-learn's ``QuantileRegressor`` has no common slopes for several levels, and solves a linear program for each level.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

WIDTHS = (0.3, 0.1, 0.03)
MAX_STEPS = 60
# The wide kinks only give a starting point, so they use about this many rows.
MAX_COARSE_ROWS = 20_000
TOLERANCE = 1e-10


def fit_line(
    phi: Float[np.ndarray, " n n_columns"],
    target: Float[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
    levels: tuple[float, ...],
    ridge: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Slopes that all levels share, and one intercept per level; phi has no column of ones."""
    w, tau, n_columns = weight / weight.sum(), np.array(levels), phi.shape[1]
    low, high = np.quantile(target, [0.25, 0.75])
    spread = float(high - low) + 1e-12
    theta = np.concatenate([np.zeros(n_columns), np.quantile(target, tau)])
    penalty = ridge * spread * (np.arange(len(theta)) < n_columns)
    for width in WIDTHS:
        step = 1 if width == WIDTHS[-1] else 1 + len(phi) // MAX_COARSE_ROWS
        part = w[::step] / w[::step].sum()
        problem = _Problem(phi[::step], target[::step], part, tau, penalty, width * spread)
        theta = problem.solve(theta)
    return theta[:n_columns], theta[n_columns:]


class _Problem(NamedTuple):
    """The smoothed problem for one half width of the kink; theta holds the slopes, then the intercepts."""

    phi: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    tau: np.ndarray
    penalty: np.ndarray
    width: float

    def loss(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss, and the residuals at each level."""
        n_columns, h = self.phi.shape[1], self.width
        r = (self.target - self.phi @ theta[:n_columns])[:, None] - theta[n_columns:]
        size = abs(r)
        smooth = np.where(size < h, r * r / (2 * h) + h / 2, size)
        fit = (self.weight @ (0.5 * smooth + (self.tau - 0.5) * r)).sum()
        return float(fit / len(self.tau) + 0.5 * (self.penalty * theta**2).sum()), r

    def gradient(self, theta: np.ndarray, r: np.ndarray) -> np.ndarray:
        slope = 0.5 * (r / self.width).clip(-1, 1) + (self.tau - 0.5)
        push = self.weight[:, None] * slope / len(self.tau)
        fit = np.concatenate([self.phi.T @ push.sum(axis=1), push.sum(axis=0)])
        return np.asarray(self.penalty * theta - fit)

    def hessian(self, r: np.ndarray, outer: float) -> np.ndarray:
        """Rows beyond the parabola get the curvature 1 / |r| times ``outer``, which keeps the system regular."""
        size, n_columns = abs(r), self.phi.shape[1]
        curvature = np.where(size < self.width, 1 / self.width, outer / size.clip(min=self.width))
        curvature = curvature * (0.5 * self.weight / len(self.tau))[:, None]
        hessian = np.diag(np.concatenate([np.zeros(n_columns), curvature.sum(axis=0)]))
        weighted = self.phi * curvature.sum(axis=1)[:, None]
        hessian[:n_columns, :n_columns] = weighted.T @ self.phi
        cross = self.phi.T @ curvature
        hessian[:n_columns, n_columns:] = cross
        hessian[n_columns:, :n_columns] = cross.T
        return hessian + np.diag(self.penalty + 1e-12 + 1e-9 * hessian.diagonal())

    def step(self, theta: np.ndarray, value: float, r: np.ndarray) -> Any:
        """The first step of length 1, 1/2, ..., 1/64 that decreases the loss sufficiently, and its loss and residuals."""
        gradient = self.gradient(theta, r)
        for outer in (0.02, 1.0):
            step = -np.linalg.solve(self.hessian(r, outer), gradient)
            for length in 0.5 ** np.arange(7):
                candidate = theta + length * step
                new = self.loss(candidate)
                if new[0] <= value + 1e-4 * length * float(gradient @ step):
                    return candidate, *new
        return None

    def solve(self, theta: np.ndarray) -> np.ndarray:
        value, r = self.loss(theta)
        for _ in range(MAX_STEPS):
            moved, before = self.step(theta, value, r), value
            if moved is None:
                break
            theta, value, r = moved
            if before - value <= TOLERANCE * (1e-12 + abs(before)):
                break
        return theta
