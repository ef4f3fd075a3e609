"""Exact Gaussian process regression with one independent process per output coordinate.

All processes have the same inputs. For each length scale, one eigendecomposition of the correlation matrix therefore
gives the likelihood of all coordinates, signal variances and noise variances. This makes a grid search over the length
scale affordable, which has no local optima and needs no restarts. General libraries factorise one matrix per coordinate
and step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, chunks, restore, to_tensor
from geoq.baselines.bound import GAUSSIAN_95, Bound
from geoq.checks import check_finite, check_fitted, check_pairs, clear_fitted
from geoq.representation import Standardization

# Length scales lie on a grid with this number of steps per factor of two; the search starts with whole factors.
STEPS_PER_OCTAVE = 32
MOST_OCTAVES = 24
# Noise-to-signal ratios as powers of ten: from, to, step. A smaller ratio would be below the rounding errors.
RATIO_EXPONENTS = (-13.0, 5.0, 0.01)


class _Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of the correlation matrix of the points at one length scale."""

    values: Float[Tensor, " n"]
    vectors: Float[Tensor, " n n"]


class _Profile(NamedTuple):
    """Largest likelihood of each coordinate at one length scale, and the variances that attain it.

    Attributes:
        log_likelihood: Logarithm of the likelihood.
        ratio: Noise variance divided by signal variance.
        signal: Signal variance.
    """

    log_likelihood: Float[Tensor, " n_outputs"]
    ratio: Float[Tensor, " n_outputs"]
    signal: Float[Tensor, " n_outputs"]


@dataclass
class GaussianProcess:
    r"""The paper's Gaussian process: a constant times an RBF kernel plus white noise, by maximum likelihood.

    .. math:: k(x, x') = c \exp(-\|\nu(x) - \nu(x')\|^2 / 2 \ell^2) + s \, 1[x = x'], \quad \widehat E(x) = 1.96 \sigma(x)

    Inputs and outputs are standardised. :math:`\sigma^2` is the variance of an observation and includes the noise,
    because the error is measured against an observed reference; scikit-learn does the same.

    Attributes:
        noise_lower_bound: Smallest noise variance :math:`s`, relative to the variance of each output. On noise-free
            data the maximum of the likelihood is at this bound, which then determines the extrapolation: with a
            smaller bound the mean is more accurate and the error bounds are smaller, on the Forrester function
            smaller than the error. The default is the one of scikit-learn.

    Example:
        >>> import numpy as np
        >>> x = np.linspace(0, 1, 20)[:, None]
        >>> process = GaussianProcess().fit(x, np.sin(6 * x))
        >>> prediction, error_hat = process.predict(np.array([[0.52], [3.0]]))
        >>> bool(abs(prediction[0, 0] - np.sin(6 * 0.52)) < 0.01)
        True
        >>> bool(error_hat[1, 0] > 10 * error_hat[0, 0])
        True
    """

    noise_lower_bound: float = 1e-5

    def fit(self, x: Array, y: Array) -> "GaussianProcess":
        """Find the length scale and the variances of each output coordinate."""
        if not self.noise_lower_bound > 0:
            raise ValueError(
                f"noise_lower_bound={self.noise_lower_bound}, but the covariance matrix must be invertible; choose a number above 0."
            )
        clear_fitted(self)
        inputs, outputs = check_pairs(x, y)
        rows = inputs.reshape(len(inputs), -1).double()
        self.normalization_ = Standardization.fit(rows)
        self.output_normalization_ = Standardization.fit(outputs.double())
        self.points_ = self.normalization_(rows)
        targets = self.output_normalization_(outputs.double())
        self.targets_ = targets.reshape(len(rows), -1)
        self._search(_squared_distance(self.points_, self.points_))
        return self

    def predict(self, x: Array) -> Bound:
        """Mean of the process, and 1.96 times its standard deviation as the bound."""
        check_fitted(self, "points_")
        inputs = to_tensor(x, "x")
        rows = inputs.reshape(len(inputs), -1).to(self.points_)
        if rows.shape[1] != self.points_.shape[1]:
            raise ValueError(
                f"x has {rows.shape[1]} numbers per row, but the process was fitted on {self.points_.shape[1]}; "
                "pass queries with the input shape of fit."
            )
        check_finite(rows, "x")
        parts = [
            self._posterior(self.normalization_(rows[part]))
            for part in chunks(len(rows), len(self.points_))
        ]
        mean, deviation = (torch.cat(columns) for columns in zip(*parts, strict=True))
        centre, scale = (
            self.output_normalization_.mean,
            self.output_normalization_.scale,
        )
        prediction = centre + scale * mean.reshape(-1, *scale.shape)
        error_hat = GAUSSIAN_95 * scale * deviation.reshape(-1, *scale.shape)
        both = (part.to(inputs.dtype) for part in (prediction, error_hat))
        return Bound(*(restore(part, x) for part in both))

    def _posterior(self, queries: Float[Tensor, " n d"]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of an observation, computed for each length scale in turn."""
        mean = queries.new_empty(len(queries), self.targets_.shape[1])
        variance = torch.empty_like(mean)
        squared_distance = _squared_distance(queries, self.points_)
        for step, (values, vectors) in self.spectra_.items():
            of_step = self.step_ == step
            ratio = self.ratio_[of_step]
            inverse = 1 / (values[:, None] + ratio)
            projected = _correlation(squared_distance, step) @ vectors
            targets = inverse * (vectors.T @ self.targets_[:, of_step])
            mean[:, of_step] = projected @ targets
            left = (1 - projected**2 @ inverse).clamp(min=0)
            variance[:, of_step] = self.signal_[of_step] * (left + ratio)
        return mean, variance.sqrt()

    def _search(self, squared_distance: Float[Tensor, " n n"]) -> None:
        """Find the length scale, noise and signal of each coordinate: in steps of factor two, then finer near the best."""
        distance = squared_distance[squared_distance > 0].sqrt()
        if not len(distance):
            raise ValueError(
                f"x has only one distinct point in {len(self.points_)} rows, but a length scale needs two; pass more points."
            )
        # Below the smallest distance the process is white noise; far above the largest it is a polynomial.
        last = int(distance.max().log2().ceil()) + 4
        first = max(int(distance.min().log2().floor()) - 1, last - MOST_OCTAVES)
        profiles: dict[int, _Profile] = {}
        n_outputs = self.targets_.shape[1]
        stride = STEPS_PER_OCTAVE
        octaves = torch.arange(first, last + 1)[:, None]
        candidates = octaves.expand(-1, n_outputs) * stride
        while stride:
            steps = candidates.unique().tolist()
            for step in steps:
                if step not in profiles:
                    profiles[step] = _profile(
                        _spectrum(squared_distance, step),
                        self.targets_,
                        self.noise_lower_bound,
                    )
            known = torch.stack([profiles[step].log_likelihood for step in steps])
            place = torch.searchsorted(torch.tensor(steps), candidates)
            likelihood = known.gather(0, place.to(known.device))
            best = candidates.gather(0, likelihood.argmax(dim=0, keepdim=True).cpu())[0]
            stride //= 2
            candidates = torch.stack([best, best - stride, best + stride])
        self.step_ = best.to(self.points_.device)
        chosen = _Profile(
            *(
                torch.stack([part[j] for j, part in enumerate(parts)])
                for parts in zip(*(profiles[int(step)] for step in best), strict=True)
            )
        )
        self.log_likelihood_, self.ratio_, self.signal_ = chosen
        self.length_scale_ = 2 ** (self.step_.double() / STEPS_PER_OCTAVE)
        self.spectra_ = {
            step: _spectrum(squared_distance, step) for step in best.unique().tolist()
        }


def _squared_distance(queries: Tensor, points: Tensor) -> Tensor:
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(queries, points, compute_mode=mode) ** 2


def _correlation(squared_distance: Tensor, step: int) -> Tensor:
    return torch.exp(squared_distance / (-2 * 4 ** (step / STEPS_PER_OCTAVE)))


def _spectrum(squared_distance: Tensor, step: int) -> _Spectrum:
    """Eigendecomposition of the correlation matrix at one step of the grid of length scales."""
    values, vectors = torch.linalg.eigh(_correlation(squared_distance, step))
    return _Spectrum(values.clamp(min=0), vectors)


def _profile(
    spectrum: _Spectrum,
    targets: Float[Tensor, " n n_outputs"],
    noise_lower_bound: float,
) -> _Profile:
    r"""Noise-to-signal ratio s / c with the largest likelihood for each coordinate; the signal c has a closed form.

    .. math:: -2 \log p = n \log 2 \pi c + \sum_i \log(\lambda_i + s/c) + \frac1c \sum_i (u_i^T y)^2 / (\lambda_i + s/c)
    """
    n_points = len(targets)
    squares = (spectrum.vectors.T @ targets) ** 2
    ratio = _ratios(targets)
    shifted = spectrum.values + ratio[:, None]
    energy = (1 / shifted) @ squares
    log_determinant = shifted.log().sum(dim=1, keepdim=True)
    # A lower bound of the noise is a lower bound of the signal, for each ratio of the two.
    signal = torch.maximum(energy / n_points, noise_lower_bound / ratio[:, None])
    deviance = (
        n_points * (2 * torch.pi * signal).log() + log_determinant + energy / signal
    )
    log_likelihood, best = (-deviance / 2).max(dim=0)
    return _Profile(log_likelihood, ratio[best], signal.gather(0, best[None])[0])


def _ratios(like: Tensor) -> Float[Tensor, " n_ratios"]:
    exponents = torch.arange(*RATIO_EXPONENTS, dtype=like.dtype, device=like.device)
    return 10**exponents
