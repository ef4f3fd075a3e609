r"""Linear quantile regression at several levels with common slopes, by Newton's method on a smoothed pinball loss.

.. math:: \min_{b, a} \frac1L \sum_l \sum_i w_i \rho_{\tau_l}(t_i - a_l - \phi_i \cdot b) + \frac r2 \, \mathrm{IQR}(t) \, |b|^2

The kink of the pinball loss is replaced by a parabola of half width 0.3, 0.1 and then 0.03 times the interquartile range. The
problem is convex and piecewise quadratic, so Newton's method with a line search needs few steps. It is written by hand because
scikit-learn's ``QuantileRegressor`` has no common slopes for several levels, and solves a linear program for each level.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

WIDTHS = (0.3, 0.1, 0.03)
MAX_STEPS = 60
# The wide kinks only give a starting point, so they use about this many rows.
MAX_COARSE_ROWS = 20_000
TOLERANCE = 1e-10
# torch.quantile accepts at most 16 million values.
MAX_SORTED = 1_000_000


class Line(NamedTuple):
    """Slopes that all levels share, and one intercept per level."""

    slopes: Float[Tensor, " n_columns"]
    intercepts: Float[Tensor, " n_levels"]


def fit_line(
    phi: Float[Tensor, " n n_columns"],
    target: Float[Tensor, " n"],
    weight: Float[Tensor, " n"],
    levels: tuple[float, ...],
    ridge: float,
) -> Line:
    """Quantiles of the target as linear functions of phi, which has no column of ones."""
    w, tau = weight / weight.sum(), phi.new_tensor(levels)
    thinned = target[:: 1 + len(target) // MAX_SORTED]
    low, high = torch.quantile(thinned, phi.new_tensor([0.25, 0.75]))
    spread = float(high - low) + 1e-12
    n_columns = phi.shape[1]
    theta = torch.cat([phi.new_zeros(n_columns), torch.quantile(thinned, tau)])
    slopes_only = torch.cat([phi.new_ones(n_columns), torch.zeros_like(tau)])
    penalty = ridge * spread * slopes_only
    for width in WIDTHS:
        step = 1 if width == WIDTHS[-1] else 1 + len(phi) // MAX_COARSE_ROWS
        part = w[::step] / w[::step].sum()
        problem = _Problem(
            phi[::step], target[::step], part, tau, penalty, width * spread
        )
        theta = problem.solve(theta)
    return Line(theta[:n_columns], theta[n_columns:])


class _Problem(NamedTuple):
    """The smoothed problem for one half width of the kink; theta holds the slopes, then the intercepts."""

    phi: Tensor
    target: Tensor
    weight: Tensor
    tau: Tensor
    penalty: Tensor
    width: float

    def residuals(self, theta: Tensor) -> Tensor:
        n_columns = self.phi.shape[1]
        fitted = self.phi @ theta[:n_columns]
        return (self.target - fitted)[:, None] - theta[n_columns:]

    def loss(self, theta: Tensor, r: Tensor) -> float:
        size, h = r.abs(), self.width
        smooth = torch.where(size < h, r * r / (2 * h) + h / 2, size)
        fit = (self.weight @ (0.5 * smooth + (self.tau - 0.5) * r)).sum()
        return float(fit / len(self.tau) + 0.5 * (self.penalty * theta**2).sum())

    def gradient(self, theta: Tensor, r: Tensor) -> Tensor:
        slope = 0.5 * (r / self.width).clamp(-1, 1) + (self.tau - 0.5)
        push = self.weight[:, None] * slope / len(self.tau)
        fit = torch.cat([self.phi.T @ push.sum(dim=1), push.sum(dim=0)])
        return self.penalty * theta - fit

    def hessian(self, r: Tensor, outer: float) -> Tensor:
        """Rows beyond the parabola get the curvature 1 / |r| times ``outer``, which keeps the system regular."""
        size, n_columns = r.abs(), self.phi.shape[1]
        curvature = torch.where(
            size < self.width, 1 / self.width, outer / size.clamp(min=self.width)
        )
        curvature = curvature * (0.5 * self.weight / len(self.tau))[:, None]
        hessian = self.phi.new_zeros(len(self.penalty), len(self.penalty))
        weighted = self.phi * curvature.sum(dim=1)[:, None]
        hessian[:n_columns, :n_columns] = weighted.T @ self.phi
        cross = self.phi.T @ curvature
        hessian[:n_columns, n_columns:] = cross
        hessian[n_columns:, :n_columns] = cross.T
        hessian[n_columns:, n_columns:] = torch.diag(curvature.sum(dim=0))
        return hessian + torch.diag(self.penalty + 1e-12 + 1e-9 * hessian.diagonal())

    def solve(self, theta: Tensor) -> Tensor:
        r = self.residuals(theta)
        value = self.loss(theta, r)
        for _ in range(MAX_STEPS):
            gradient = self.gradient(theta, r)
            moved = None
            for outer in (0.02, 1.0):
                step = -torch.linalg.solve(self.hessian(r, outer), gradient)
                moved = _line_search(self, theta, step, float(gradient @ step), value)
                if moved is not None:
                    break
            if moved is None:
                break
            before, (theta, r, value) = value, moved
            if before - value <= TOLERANCE * (1e-12 + abs(before)):
                break
        return theta


def _line_search(
    problem: _Problem, theta: Tensor, step: Tensor, slope: float, value: float
) -> tuple[Tensor, Tensor, float] | None:
    """The first of the step lengths 1, 1/2, ..., 1/64 that decreases the loss sufficiently."""
    length = 1.0
    for _ in range(7):
        candidate = theta + length * step
        r = problem.residuals(candidate)
        new = problem.loss(candidate, r)
        if new <= value + 1e-4 * length * slope:
            return candidate, r, new
        length /= 2
    return None
