r"""A smoothing spline through the data, with the smallest leave-one-out error of a few candidates for the smoothing.

.. math:: S(x) = \sum_i c_i \, \|z(x) - z_i\|^3 + \beta_0 + \beta \cdot z(x)
"""

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from geoq.arrays import chunks, permutation

# More distinct points than this are represented by a random sample.
MAX_CENTRES = 500
# Candidates for the smoothing, in units of the mean eigenvalue of the kernel matrix, and an addition against rounding.
SMOOTHINGS, ROUNDING = (0.0, 1e-6, 1e-4, 1e-2, 1.0), 1e-10
# Subtracted for the linear part, in the same units. With it the equations have a solution even if the points lie in a plane.
DEGENERACY = 1e-13


@dataclass(frozen=True)
class SmoothingSpline:
    """The centres z, the coefficients c, and beta with the constant first; the constant alone if there are few centres."""

    centres: np.ndarray
    coefficients: np.ndarray
    tail: np.ndarray

    @staticmethod
    def fit(points, values, smoothing):
        """The spline through points and outputs; rows with equal points are averaged."""
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

    def __call__(self, points):
        n_tail = len(self.tail)
        total = _tail(points, n_tail) @ self.tail
        for rows in chunks(len(points), 64 * len(self.centres)):
            total[rows] += _kernel(points[rows], self.centres, n_tail) @ self.coefficients
        return total


def best_smoothing(points, values):
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

    def loss(smoothing):
        weight = 1 / (eigenvalues.clip(min=0) + (smoothing + ROUNDING) * size)
        coefficients = basis @ (weight[:, None] * inner)
        # The residual of a point under the spline through all other points.
        return float(((coefficients / (basis**2 @ weight)[:, None]) ** 2).mean())

    return min(SMOOTHINGS, key=loss)


def _equations(centres):
    """The kernel, the columns of the linear part, their rank, and the mean eigenvalue of the kernel beside the linear part."""
    n_tail = centres.shape[1] + 1
    n_tail = 1 if len(centres) < 2 * n_tail else n_tail
    kernel, tail = _kernel(centres, centres, n_tail), _tail(centres, n_tail)
    left, length, _ = np.linalg.svd(tail, full_matrices=False)
    span = left[:, length > 1e-10 * length[0]]
    n_free = len(centres) - span.shape[1]
    trace = float(kernel.diagonal().sum() - (span * (kernel @ span)).sum())
    return kernel, tail, span.shape[1], trace / n_free if n_free else 1.0


def _kernel(points, centres, n_tail):
    """The cubed distance, or minus the distance if the linear part is a constant."""
    distance = cdist(points, centres)
    return -distance if n_tail == 1 else distance**3


def _tail(points, n_tail):
    """Ones, and the coordinates unless the linear part is a constant."""
    return np.insert(points, 0, 1.0, axis=1)[:, :n_tail]


def _centres(points, values):
    """Distinct points, at most ``MAX_CENTRES``, and the mean value at each."""
    distinct, place = np.unique(points, axis=0, return_inverse=True)
    total = np.zeros((len(distinct), values.shape[1]))
    np.add.at(total, place, values)
    mean = total / np.bincount(place, minlength=len(distinct))[:, None]
    chosen = slice(None)
    if len(distinct) > MAX_CENTRES:
        chosen = permutation(len(distinct))[:MAX_CENTRES]
    return distinct[chosen], mean[chosen]
