r"""A smoothing spline through the data: another prediction of the output, from the same pairs.

.. math:: S(x) = \sum_i c_i \, \|z(x) - z_i\|^3 + \beta_0 + \beta \cdot z(x)

The laws compare the surrogate with it: where two models of the same data differ by much, at least one of them is wrong. The spline
needs no training and no setting; the smoothing is the one with the smallest leave-one-out error, so that noise is not
interpolated. How much a difference matters is not assumed, but learned from the held-out errors.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.spatial.distance import cdist

from geoq.arrays import chunks, permutation

Points: TypeAlias = Float[np.ndarray, " n n_inputs"]
Outputs: TypeAlias = Float[np.ndarray, " n n_outputs"]

# More distinct points than this are represented by a random sample. The cost of a fit grows with the third power.
MAX_CENTRES = 500
# Candidates for the smoothing, in units of the mean eigenvalue of the kernel matrix.
SMOOTHINGS = (0.0, 1e-6, 1e-4, 1e-2, 1.0)
# Added to the smoothing, against rounding.
ROUNDING = 1e-10
# Subtracted for the linear part, in the same units. With it the equations have a solution even if the points lie in a plane.
DEGENERACY = 1e-13
# With fewer centres per coefficient of the linear part, the kernel is -r and the linear part is a constant.
MIN_CENTRES_PER_COEFFICIENT = 2


@dataclass(frozen=True)
class SmoothingSpline:
    """A fitted spline with one column of coefficients per output.

    Attributes:
        centres: z_i, distinct points of the data.
        coefficients: c.
        tail: beta, the constant first; the constant alone if there are few centres.
    """

    centres: Float[np.ndarray, " n_centres n_inputs"]
    coefficients: Float[np.ndarray, " n_centres n_outputs"]
    tail: Float[np.ndarray, " n_tail n_outputs"]

    @staticmethod
    def fit(points: Points, values: Outputs, smoothing: float) -> "SmoothingSpline":
        """The spline through points, in the coordinates of the metric, and outputs; rows with equal points are averaged."""
        centres, values = _centres(points, values)
        kernel, tail, _, size = _equations(centres)
        n, n_tail = tail.shape
        matrix = np.zeros((n + n_tail, n + n_tail))
        matrix[:n, :n] = kernel + (smoothing + ROUNDING) * size * np.eye(n)
        matrix[:n, n:], matrix[n:, :n] = tail, tail.T
        matrix[n:, n:] = -DEGENERACY * n / size * np.eye(n_tail)
        right = np.concatenate([values, np.zeros((n_tail, values.shape[1]))])
        solution = np.linalg.solve(matrix, right)
        return SmoothingSpline(centres, solution[:n], solution[n:])

    def __call__(self, points: Points) -> Outputs:
        """The values of the spline."""
        n_tail = len(self.tail)
        total = _tail(points, n_tail) @ self.tail
        for rows in chunks(len(points), 64 * len(self.centres)):
            kernel = _kernel(points[rows], self.centres, n_tail)
            total[rows] += kernel @ self.coefficients
        return total


def best_smoothing(points: Points, values: Outputs) -> float:
    """The candidate with the smallest leave-one-out error; each output is divided by its deviation."""
    centres, values = _centres(points, values)
    kernel, tail, rank, size = _equations(centres)
    deviation = values.std(axis=0)
    varies = deviation > 0
    # An orthonormal basis of the coefficients that are orthogonal to the linear part.
    basis = np.linalg.svd(tail, full_matrices=True)[0][:, rank:]
    if not varies.any() or basis.shape[1] == 0:
        return SMOOTHINGS[0]
    matrix = basis.T @ kernel @ basis
    eigenvalues, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    basis = basis @ vectors
    inner = basis.T @ (values[:, varies] / deviation[varies])

    def loss(smoothing: float) -> float:
        weight = 1 / (eigenvalues.clip(min=0) + (smoothing + ROUNDING) * size)
        coefficients = basis @ (weight[:, None] * inner)
        # The residual of a point under the spline through all other points.
        residual = coefficients / (basis**2 @ weight)[:, None]
        return float((residual**2).mean())

    return min(SMOOTHINGS, key=loss)


def _equations(
    centres: Float[np.ndarray, " n_centres n_inputs"],
) -> tuple[np.ndarray, np.ndarray, int, float]:
    """The kernel between the centres, the columns of the linear part, their rank, and the mean eigenvalue of the kernel.

    The kernel is positive definite for coefficients that are orthogonal to the linear part; the mean refers to them.
    """
    n_tail = centres.shape[1] + 1
    if len(centres) < MIN_CENTRES_PER_COEFFICIENT * n_tail:
        n_tail = 1
    kernel, tail = _kernel(centres, centres, n_tail), _tail(centres, n_tail)
    left, length, _ = np.linalg.svd(tail, full_matrices=False)
    span = left[:, length > 1e-10 * length[0]]
    n_free = len(centres) - span.shape[1]
    trace = float(kernel.diagonal().sum() - (span * (kernel @ span)).sum())
    return kernel, tail, span.shape[1], trace / n_free if n_free else 1.0


def _kernel(points: np.ndarray, centres: np.ndarray, n_tail: int) -> np.ndarray:
    """The cubed distance, or minus the distance if the linear part is a constant."""
    distance = cdist(points, centres)
    return -distance if n_tail == 1 else distance * distance * distance


def _tail(points: np.ndarray, n_tail: int) -> np.ndarray:
    """The columns of the linear part: ones, and the coordinates unless the linear part is a constant."""
    ones = np.ones_like(points[:, :1])
    return ones if n_tail == 1 else np.concatenate([ones, points], axis=1)


def _centres(points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct points, at most ``MAX_CENTRES``, and the mean value at each."""
    distinct, place = np.unique(points, axis=0, return_inverse=True)
    total = np.zeros((len(distinct), values.shape[1]))
    np.add.at(total, place, values)
    mean = total / np.bincount(place, minlength=len(distinct))[:, None]
    if len(distinct) <= MAX_CENTRES:
        return distinct, mean
    chosen = permutation(len(distinct))[:MAX_CENTRES]
    return distinct[chosen], mean[chosen]
