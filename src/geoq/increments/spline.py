r"""A smoothing spline through the data: another prediction of the output, from the same pairs.

.. math:: S(x) = \sum_i c_i \, \|z(x) - z_i\|^3 + \beta_0 + \beta \cdot z(x)

The laws compare the surrogate with it: where two models of the same data differ by much, at least one of them is wrong. The spline
needs no training and no setting; the smoothing is the one with the smallest leave-one-out error, so that noise is not
interpolated. How much a difference matters is not assumed, but learned from the held-out errors.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.archive import state_of
from geoq.arrays import chunks, functions_of, own_arrays, permutation

Points: TypeAlias = Float[Tensor, " n n_inputs"]
Outputs: TypeAlias = Float[Tensor, " n n_outputs"]

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

    centres: Float[Tensor, " n_centres n_inputs"]
    coefficients: Float[Tensor, " n_centres n_outputs"]
    tail: Float[Tensor, " n_tail n_outputs"]

    @staticmethod
    def fit(points: Points, values: Outputs, smoothing: float) -> "SmoothingSpline":
        """The spline through points, in the coordinates of the metric, and outputs; rows with equal points are averaged."""
        centres, values = _centres(points, values)
        equations = _Equations.of(centres)
        kernel, tail = equations.kernel, equations.tail
        n, n_tail = tail.shape
        penalty = (smoothing + ROUNDING) * equations.size
        matrix = kernel.new_zeros(n + n_tail, n + n_tail)
        matrix[:n, :n] = kernel
        matrix[:n, n:], matrix[n:, :n] = tail, tail.T
        matrix.diagonal()[:n] += penalty
        matrix.diagonal()[n:] -= DEGENERACY * n / equations.size
        right = torch.cat([values, values.new_zeros(n_tail, values.shape[1])])
        # Contiguous, as after loading: the last digits of a product depend on the order in memory.
        solution = torch.linalg.solve(matrix, right).contiguous()
        return SmoothingSpline(centres, solution[:n], solution[n:])

    def __call__(self, points: Points) -> Outputs:
        """The values of the spline."""
        n_centres, n_tail = len(self.centres), len(self.tail)
        # A GPU needs large arrays, the cache of a CPU small ones.
        parts = chunks(len(points), (8 if points.is_cuda else 64) * n_centres)
        if n_tail == 1:
            kernels = (_kernel(points[rows], self.centres, 1) for rows in parts)
            return torch.cat([k @ self.coefficients + self.tail for k in kernels])
        origin, factors, coefficients, tail = self._factors
        (z,) = own_arrays(points)
        xp, centred = functions_of(z), z - origin
        queries = xp.concatenate([centred, *_lengths(centred)], 1)
        total = z @ tail[1:] + tail[0]
        for rows in parts:
            squared = queries[rows] @ factors
            xp.abs(squared, out=squared)  # negative only by rounding
            cubed = xp.sqrt(squared)
            cubed *= squared
            total[rows] += cubed @ coefficients
        return torch.as_tensor(total)

    @cached_property
    def _factors(self) -> tuple[Any, ...]:
        """The mean of the centres, factors of a product that gives squared distances, coefficients and tail.

        Relative to the mean of the centres the product loses few digits.
        """
        centres, *others = own_arrays(*state_of(self).values())
        origin = centres.mean(0)
        ones, squares = _lengths(centres - origin)
        columns = [-2 * (centres - origin), squares, ones]
        return origin, functions_of(origin).concatenate(columns, 1).T, *others


def best_smoothing(points: Points, values: Outputs) -> float:
    """The candidate with the smallest leave-one-out error; each output is divided by its deviation."""
    centres, values = _centres(points, values)
    equations = _Equations.of(centres)
    deviation = values.std(dim=0, correction=0)
    varies = deviation > 0
    # An orthonormal basis of the coefficients that are orthogonal to the linear part.
    left, _, _ = torch.linalg.svd(equations.tail, full_matrices=True)
    basis = left[:, equations.rank :]
    if not varies.any() or basis.shape[1] == 0:
        return SMOOTHINGS[0]
    scaled = values[:, varies] / deviation[varies]
    matrix = basis.T @ equations.kernel @ basis
    eigenvalues, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    basis = basis @ vectors
    inner = basis.T @ scaled

    def loss(smoothing: float) -> float:
        penalty = (smoothing + ROUNDING) * equations.size
        weight = 1 / (eigenvalues.clamp(min=0) + penalty)
        coefficients = basis @ (weight[:, None] * inner)
        # The residual of a point under the spline through all other points.
        residual = coefficients / (basis.square() @ weight)[:, None]
        return float(residual.square().mean())

    return min(SMOOTHINGS, key=loss)


@dataclass(frozen=True)
class _Equations:
    """The kernel between the centres, the columns of the linear part, their rank, and the mean eigenvalue of the kernel.

    The kernel is positive definite for coefficients that are orthogonal to the linear part; the mean refers to them.
    """

    kernel: Tensor
    tail: Tensor
    rank: int
    size: float

    @staticmethod
    def of(centres: Float[Tensor, " n_centres n_inputs"]) -> "_Equations":
        n_tail = centres.shape[1] + 1
        if len(centres) < MIN_CENTRES_PER_COEFFICIENT * n_tail:
            n_tail = 1
        kernel, tail = _kernel(centres, centres, n_tail), _tail(centres, n_tail)
        left, size, _ = torch.linalg.svd(tail, full_matrices=False)
        span = left[:, size > 1e-10 * size[0]]
        n_free = len(centres) - span.shape[1]
        trace = float(kernel.diagonal().sum() - (span * (kernel @ span)).sum())
        size_of_kernel = trace / n_free if n_free else 1.0
        return _Equations(kernel, tail, span.shape[1], size_of_kernel)


def _kernel(points: Tensor, centres: Tensor, n_tail: int) -> Tensor:
    """The cubed distance, or minus the distance if the linear part is a constant."""
    distance = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return -distance if n_tail == 1 else distance * distance * distance


def _lengths(points: Any) -> tuple[Any, Any]:
    """A column of ones, and the squared length of each point."""
    return 0 * points[:, :1] + 1, (points * points).sum(1)[:, None]


def _tail(points: Tensor, n_tail: int) -> Tensor:
    """The columns of the linear part: ones, and the coordinates unless the linear part is a constant."""
    ones = torch.ones_like(points[:, :1])
    return ones if n_tail == 1 else torch.cat([ones, points], dim=1)


def _centres(points: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct points, at most ``MAX_CENTRES``, and the mean value at each."""
    distinct, place = points.unique(dim=0, return_inverse=True)
    total = values.new_zeros(len(distinct), values.shape[1])
    total.index_add_(0, place, values)
    mean = total / place.bincount(minlength=len(distinct))[:, None]
    if len(distinct) <= MAX_CENTRES:
        return distinct, mean
    order = permutation(len(distinct))
    chosen = order[:MAX_CENTRES].to(points.device)
    return distinct[chosen], mean[chosen]
