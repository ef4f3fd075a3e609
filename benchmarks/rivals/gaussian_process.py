"""Exact Gaussian process regression with one independent process per output coordinate.

For each length scale, one eigendecomposition of the correlation matrix gives the likelihood of all coordinates, signal variances and
noise variances. This makes a grid search over the length scale affordable, which has no local optima and needs no restarts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.spatial.distance import cdist

from benchmarks.rivals.cross_fitted import Bound
from geoq.arrays import flat
from geoq.data.coordinates import spread

# The paper multiplies a predictive standard deviation by this factor: 95 % of a Gaussian lies within.
GAUSSIAN_95 = 1.96
# Length scales lie on a grid with this number of steps per factor of two; the search starts with whole factors.
STEPS_PER_OCTAVE, MOST_OCTAVES = 32, 24
# Noise-to-signal ratios; a smaller one would be below the rounding errors.
RATIOS = 10 ** np.arange(-13.0, 5.0, 0.01)


class _Profile(NamedTuple):
    """Largest likelihood of each coordinate at one length scale, and the noise-to-signal ratio and signal that attain it."""

    log_likelihood: np.ndarray
    ratio: np.ndarray
    signal: np.ndarray


@dataclass
class GaussianProcess:
    r"""The paper's Gaussian process: a constant times an RBF kernel plus white noise, by maximum likelihood.

    .. math:: k(x, x') = c \exp(-\|\nu(x) - \nu(x')\|^2 / 2 \ell^2) + s \, 1[x = x'], \quad \widehat E(x) = 1.96 \sigma(x)

    Inputs and outputs are standardised. :math:`\sigma^2` is the variance of an observation and includes the noise. The least noise is
    relative to the variance of each output: on noise-free data the maximum of the likelihood is there.
    """

    noise_lower_bound: float = 1e-5

    def fit(self, x, y):
        """Find the length scale and the variances of each output coordinate."""
        rows = flat(np.asarray(x, dtype=float))
        self.mean_, self.scale_ = spread(rows)
        self.centre_, self.unit_ = spread(np.asarray(y, dtype=float))
        self.points_ = self.scaled(rows)
        self.targets_ = flat((y - self.centre_) / self.unit_)
        squared = cdist(self.points_, self.points_, "sqeuclidean")
        if not (squared > 0).any():
            raise ValueError(f"x has only one distinct point in {len(x)} rows; pass more points.")
        step, profiles = self._search(squared)
        found = [[part[j] for part in profiles[s]] for j, s in enumerate(step)]
        self.log_likelihood_, self.ratio_, self.signal_ = np.transpose(found)
        self.step_, self.length_scale_ = step, 2 ** (step / STEPS_PER_OCTAVE)
        self.spectra_ = {s: _spectrum(squared, s) for s in np.unique(step).tolist()}
        return self

    def scaled(self, x):
        """Standardised inputs."""
        return (flat(np.asarray(x, dtype=float)) - self.mean_) / self.scale_

    def predict(self, x):
        """Mean of the process, and 1.96 times its standard deviation as the bound."""
        blocks = np.array_split(self.scaled(x), 1 + len(x) // 2000)
        parts = zip(*map(self._posterior, blocks), strict=True)
        mean, deviation = (np.concatenate(p).reshape(-1, *self.unit_.shape) for p in parts)
        return Bound(self.centre_ + self.unit_ * mean, GAUSSIAN_95 * self.unit_ * deviation)

    @staticmethod
    def deviation(points, queries, length, ratio):
        """Standard deviation of an observation at the queries given observations at the points, for signal variance 1."""
        matrix = np.exp(-cdist(points, points, "sqeuclidean") / (2 * length**2))
        factor = cholesky(matrix + ratio * np.eye(len(points)), lower=True)
        between = np.exp(-cdist(points, queries, "sqeuclidean") / (2 * length**2))
        explained = solve_triangular(factor, between, lower=True)
        return np.sqrt((1 - (explained**2).sum(axis=0)).clip(min=0) + ratio)

    def _posterior(self, queries):
        """Mean and standard deviation of an observation, computed for each length scale in turn."""
        mean = np.empty((len(queries), self.targets_.shape[1]))
        variance = np.empty_like(mean)
        squared = cdist(queries, self.points_, "sqeuclidean")
        for step, (values, vectors) in self.spectra_.items():
            own = self.step_ == step
            ratio = self.ratio_[own]
            inverse = 1 / (values[:, None] + ratio)
            projected = _correlation(squared, step) @ vectors
            mean[:, own] = projected @ (inverse * (vectors.T @ self.targets_[:, own]))
            left = (1 - projected**2 @ inverse).clip(min=0)
            variance[:, own] = self.signal_[own] * (left + ratio)
        return mean, np.sqrt(variance)

    def _search(self, squared):
        """The length scale of each coordinate as a step of the grid: by factors of two, then finer near the best."""
        distance = np.sqrt(squared[squared > 0])
        # Below the smallest distance the process is white noise; far above the largest it is a polynomial.
        last = int(np.ceil(np.log2(distance.max()))) + 4
        first = max(int(np.floor(np.log2(distance.min()))) - 1, last - MOST_OCTAVES)
        profiles: dict[int, _Profile] = {}
        stride, n_outputs = STEPS_PER_OCTAVE, self.targets_.shape[1]
        candidates = np.repeat(np.arange(first, last + 1)[:, None], n_outputs, axis=1) * stride
        while stride:
            for step in np.unique(candidates).tolist():
                if step not in profiles:
                    spectrum = _spectrum(squared, step)
                    profiles[step] = _profile(*spectrum, self.targets_, self.noise_lower_bound)
            rows = candidates.tolist()
            known = [[profiles[s].log_likelihood[j] for j, s in enumerate(row)] for row in rows]
            best = candidates[np.argmax(known, axis=0), np.arange(n_outputs)]
            stride //= 2
            candidates = np.stack([best, best - stride, best + stride])
        return best, profiles


def _correlation(squared, step):
    return np.exp(squared / (-2 * 4 ** (step / STEPS_PER_OCTAVE)))


def _spectrum(squared, step):
    """Eigenvalues and eigenvectors of the correlation matrix at one step of the grid of length scales."""
    values, vectors = np.linalg.eigh(_correlation(squared, step))
    return values.clip(min=0), vectors


def _profile(values, vectors, targets, least):
    r"""Noise-to-signal ratio s / c with the largest likelihood for each coordinate; the signal c has a closed form.

    .. math:: -2 \log p = n \log 2 \pi c + \sum_i \log(\lambda_i + s/c) + \frac1c \sum_i (u_i^T y)^2 / (\lambda_i + s/c)
    """
    n_points = len(targets)
    shifted = values + RATIOS[:, None]
    energy = (1 / shifted) @ (vectors.T @ targets) ** 2
    log_determinant = np.log(shifted).sum(axis=1, keepdims=True)
    # noise = ratio * signal, so the least noise fixes a least signal.
    signal = np.maximum(energy / n_points, least / RATIOS[:, None])
    deviance = n_points * np.log(2 * np.pi * signal) + log_determinant + energy / signal
    best, columns = deviance.argmin(axis=0), np.arange(targets.shape[1])
    return _Profile(-deviance[best, columns] / 2, RATIOS[best], signal[best, columns])
