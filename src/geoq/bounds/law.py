r"""A log-linear law of the error: an upper quantile that is an exponential of a few features.

.. math:: b_j(x) = s_j u_j(x) \exp\bigl(a(\tau) + \theta \cdot \tilde\varphi_j(x)\bigr)

The unit u is the error q that a second opinion expects, or 1 in a law without it. The law is fitted by linear quantile regression of
the logarithm of the error, which is possible because a quantile commutes with the logarithm. Fitting the error itself would let the
few largest errors determine the slopes. An error of nan does not count.

.. math:: \min_{\theta, a} \frac1L \sum_l \sum_i w_i \rho_{\tau_l}(t_i - a_l - \tilde\varphi_i \cdot \theta)
    + \frac r2 \, \mathrm{IQR}(t) \, |\theta|^2

The regression has several levels with common slopes. The kink of the pinball loss is replaced by a parabola of half width 0.3, 0.1
and then 0.03 times the interquartile range. The problem is convex and piecewise quadratic, so Newton's method with a line search
needs few steps. It is written by hand because scikit-learn's ``QuantileRegressor`` has no common slopes for several levels, and
solves a linear program for each level.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from geoq.quantiles import weighted_quantile, weighted_quantiles

# One value per tuple and output, as a matrix and as one vector, and one number per feature.
Errors: TypeAlias = Float[np.ndarray, " n n_outputs"]
Vector: TypeAlias = Float[np.ndarray, " n_values"]
Numbers: TypeAlias = Float[np.ndarray, " n_features"]
# The features of a law by name, with one column for each output or for all of them.
LawFeatures: TypeAlias = Mapping[str, np.ndarray]
# Scales and slopes are fitted at this level, or at LEVELS together; other levels are shifts of it.
LEVEL = 0.95
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Levels at which intercepts are stored; between them the intercept is linear in the logit of the level.
TABLE = tuple(sorted({*(i / 100 for i in range(1, 100)), 0.975, 0.985, 0.995, 0.999}))
LOGITS = np.array([math.log(level / (1 - level)) for level in TABLE])
# Penalty on the slopes of the law of the interpolating folds, divided by their number of tuples.
RIDGE_INSIDE = 15.0
# The logarithm of the distance may exceed the range of the calibration tuples by this much; no other feature may.
REACH = math.log(3)
# A law is fitted to at most this many values (tuples times outputs).
MAX_VALUES = 200_000
# Added to the errors, in units of their scale, before the logarithm, and the smallest scale.
MIN_ERROR, MIN_SCALE = 1e-5, 1e-300
# Smallest weight of a tuple for the intercepts of a blend.
MIN_INSIDE = 0.02
# The features in units of the error, which enter in units of its scale plus this, as logarithms.
ADDED = {"anchor": 0.05, "held_out": 0.02, "departure": 0.05, "expected": 1e-3}
# Half widths of the kink, steps for each, and the relative decrease of the loss at which they end.
WIDTHS, MAX_STEPS, TOLERANCE = (0.3, 0.1, 0.03), 60, 1e-10
# The wide kinks only give a starting point, so they use about this many rows.
MAX_COARSE_ROWS = 20_000
WORDS = {
    "distance": "the distance to the data",
    "nearest": "the distance to the nearest point",
    "side": "the one-sidedness of the nearest points",
    "anchor": "the observed error of the anchor",
    "held_out": "the held-out errors of the nearest points",
    "departure": "the difference between the prediction and the nearest outputs",
    "variability": "the variation of the nearest outputs",
    "expected": "the error that a Gaussian process through the data expects",
}
NAMES = tuple(WORDS)
WITHOUT_OPINION = NAMES[:-1]


@dataclass(frozen=True)
class Law:
    """A fitted law; the features are standardised and limited to the range of the calibration tuples, ``low`` to ``high``.

    The scale s_j is the quantile of the errors of each output, the slopes are theta, and ``table`` has the intercept a at each
    level of ``TABLE``.
    """

    names: tuple[str, ...]
    scale: Float[np.ndarray, " n_outputs"]
    mean: Numbers
    deviation: Numbers
    low: Numbers
    high: Numbers
    slopes: Numbers
    table: Float[np.ndarray, " n_levels"]

    @staticmethod
    def fit(
        names: tuple[str, ...],
        features: LawFeatures,
        error: Errors,
        weight: Float[np.ndarray, " n"],
        *,
        levels: tuple[float, ...],
        ridge: float,
        counted: Int[np.ndarray, " n_counted"],
        blend: Any = None,
    ) -> "Law":
        """Fit the law to the features, errors and weights of calibration tuples, at the outputs ``counted``.

        The slopes minimise the pinball losses of all ``levels`` together, with the penalty ``ridge``. Without a ``blend`` the
        intercepts come from the regression. With one they are set for the bound that is blended with another law, from residuals
        that are held out by parts: the residuals of the fit would be too small. A blend has pi, the logarithm of the other law
        at the level 0.95, its shift at each level of ``TABLE``, and the part of each tuple.
        """
        scale, outputs = _scale(error, weight), _some_outputs(len(error), counted)
        present = ~np.isnan(np.take_along_axis(error, outputs, 1))

        def values(columns: np.ndarray) -> np.ndarray:
            """One value for each error that counts."""
            if columns.shape[1] > 1:
                columns = np.take_along_axis(columns, outputs, 1)
            return np.broadcast_to(columns, outputs.shape)[present]

        own, per_value = scale[outputs][present], values(weight[:, None])
        phi = np.stack([_column(name, values(features[name]), own) for name in names], 1)
        mean, deviation = phi.mean(axis=0), phi.std(axis=0) + 1e-9
        # In units of q, so that the penalty draws the bound to a multiple of q.
        unit = phi[:, names.index("expected")] if "expected" in names else 0.0
        phi = (phi - mean) / deviation
        target = np.log(values(error) / own + MIN_ERROR) - unit
        slopes, intercepts = fit_line(phi, target, per_value, levels, ridge)
        if blend is None:
            table = weighted_quantiles(target - phi @ slopes, per_value, TABLE)
            table = table + intercepts[levels.index(LEVEL)] - table[TABLE.index(LEVEL)]
        else:
            pi, other, shifts, part = blend
            part, residual = values(part[:, None]), np.empty_like(target)
            for number in np.unique(part):
                out = part == number
                slope, _ = fit_line(phi[~out], target[~out], per_value[~out], levels, ridge)
                residual[out] = target[out] - phi[out] @ slope
            other = values(other) - np.log(own) - unit - (target - residual)
            table = _blended_intercepts(residual, other, values(pi[:, None]), shifts, len(error))
        low, high = phi.min(axis=0), phi.max(axis=0)
        high[0] += REACH / deviation[0]
        return Law(names, scale, mean, deviation, low, high, slopes, table)

    def __call__(self, features: LawFeatures) -> Errors:
        """Log b of each output at the level 0.95."""
        slope = self.slopes / self.deviation
        low, high = (end * self.deviation + self.mean for end in (self.low, self.high))
        constant = self.intercept(LEVEL) - float((slope * self.mean).sum())
        total: np.ndarray = np.log(self.scale) + constant
        for place, name in enumerate(self.names):
            column = _column(name, features[name], self.scale)
            term = slope[place] * column.clip(low[place], high[place])
            total = total + (term + column if name == "expected" else term)
        return total

    def intercept(self, level: float) -> float:
        """The intercept at any level: linear in the logit between the levels of ``TABLE``, and constant beyond them."""
        return float(np.interp(math.log(level / (1 - level)), LOGITS, self.table))

    def describe(self) -> str:
        """The features that change the bound most, as factors between one deviation below and one above the mean."""
        slopes = self.slopes + self.deviation * np.array([n == "expected" for n in self.names])
        factors = np.exp(2 * slopes).tolist()
        order = sorted(range(len(factors)), key=lambda i: -abs(math.log(factors[i])))
        return ", ".join(
            f"{WORDS.get(self.names[i], self.names[i])} (x {factors[i]:.2g})" for i in order[:3]
        )


def _column(name: str, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """One feature as it enters the law."""
    return np.log(values / scale + ADDED[name]) if name in ADDED else values


def _scale(error: Errors, weight: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n_outputs"]:
    """The quantile of the errors of each output; the mean if the quantile is zero, and a tiny number if all are zero."""
    some = ~np.isnan(error).all(axis=0)
    scale = np.zeros(error.shape[1])
    quantile = weighted_quantile(error[:, some], weight, LEVEL)
    scale[some] = np.where(quantile > 0, quantile, np.nanmean(error[:, some], axis=0))
    return np.where(scale > 0, scale, MIN_SCALE)


def _blended_intercepts(
    residual: Vector, other: Vector, pi: Vector, shifts: np.ndarray, n_rows: int
) -> np.ndarray:
    r"""The intercept a at each level of ``TABLE`` for which the blended bound covers the tuples at that level.

    .. math:: e \le s \, e^{(1 - \pi) (a + \theta \cdot \varphi)} \, b_{out}^{\pi} \iff a \ge r + \frac{\pi}{1 - \pi} (r - o)

    Here r is the residual of the law, and o is the logarithm of the other law minus the law without its intercept. The tuples have
    the weights 1 - pi, since a has hardly any effect where pi is near 1.
    """
    weight = (1 - pi).clip(min=MIN_INSIDE)
    ratio = pi / weight
    table = []
    for level, shift in zip(TABLE, shifts, strict=True):
        needed = residual + ratio * (residual - other - shift)
        table.append(weighted_quantiles(needed, weight, (exceeding(level, n_rows),)))
    return np.maximum.accumulate(np.concatenate(table))


def exceeding(level: float, n_rows: int) -> float:
    """The level of a quantile of n values that a further value does not exceed with the probability ``level``."""
    return min(level * (n_rows + 1) / n_rows, 1.0)


def _some_outputs(n_rows: int, counted: np.ndarray) -> Int[np.ndarray, " n n_chosen"]:
    """The counted outputs for each tuple, or a subset of them if they would be too many values."""
    n_counted = len(counted)
    if n_rows * n_counted <= MAX_VALUES:
        return np.broadcast_to(counted, (n_rows, n_counted))
    n_chosen = max(1, MAX_VALUES // n_rows)
    start = np.random.default_rng(0).integers(n_counted, size=(n_rows, 1))
    return counted[(start + np.arange(n_chosen) * n_counted // n_chosen) % n_counted]


def fit_line(
    phi: np.ndarray, target: Vector, weight: Vector, levels: tuple[float, ...], ridge: float
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
        size = abs(r)
        curvature = np.where(size < self.width, 1 / self.width, outer / size.clip(min=self.width))
        curvature = curvature * (0.5 * self.weight / len(self.tau))[:, None]
        weighted, cross = self.phi * curvature.sum(axis=1)[:, None], self.phi.T @ curvature
        own = weighted.T @ self.phi, np.diag(curvature.sum(axis=0))
        hessian = np.block([[own[0], cross], [cross.T, own[1]]])
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
