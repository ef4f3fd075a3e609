"""A Gaussian process of one time step, propagated by Monte Carlo."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.rivals.cross_fitted import Bound
from benchmarks.rivals.gaussian_process import GAUSSIAN_95
from benchmarks.rivals.networks import spread

# Length scales and noise-to-signal ratios of the search, as powers of 2 and of 10: from, to, step. The smallest ratio is
# the limit of double precision.
LENGTHS = (0.0, 10.0, 0.25)
RATIOS = (-14.0, 2.0, 0.25)
# Candidates: the lower bounds of the noise, and which pairs.
NOISE = {1: (1e-10, 1e-6, 1e-4), 2: (1e-10, 1e-8, 1e-6, 1e-5, 1e-4)}


@dataclass
class StepProcess:
    """The paper's process, a constant times an RBF kernel plus white noise, with hyper-parameters common to all coordinates.

    The equation is the same at every point of the periodic domain, so the coordinates have one distribution. Inputs and
    outputs are standardised. The snapshots have no noise; the likelihood is largest at the lower bound of the noise.
    """

    n_searched: int = 800  # pairs that determine the hyper-parameters
    noise_lower_bound: float = 1e-10  # relative to the variance of the outputs
    every: int = 1  # 2 conditions the process on every second pair
    known: tuple[float, float, float] | None = (
        None  # length, noise-to-signal ratio, signal; None searches for them
    )

    @property
    def setting(self):
        pairs = "all pairs" if self.every == 1 else "half of the pairs"
        return f"noise at least {self.noise_lower_bound:.0e}, {pairs}"

    def fit(self, x, y):
        x, y = x[:: self.every], y[:: self.every]
        self.inputs_, self.outputs_ = ((p.mean(0), p.std(0, correction=0)) for p in (x, y))
        points, targets = (
            (part - mean) / scale for part, (mean, scale) in ((x, self.inputs_), (y, self.outputs_))
        )
        rows = torch.linspace(0, len(x) - 1, min(self.n_searched, len(x))).long()
        self.found_ = self.known or self._search(points[rows], targets[rows])
        self.length_, self.ratio_, self.signal_ = self.found_
        matrix = self._correlation(points, points)
        matrix.diagonal().add_(self.ratio_)
        self.points_, self.factor_ = points, torch.linalg.cholesky(matrix)
        self.weights_ = torch.cholesky_solve(targets, self.factor_)
        return self

    def __call__(self, states):
        """Mean and standard deviation of the next states."""
        mean, scale = self.inputs_
        correlation = self._correlation((states - mean) / scale, self.points_)
        half = torch.linalg.solve_triangular(self.factor_, correlation.T, upper=False)
        unexplained = (1 - (half**2).sum(dim=0)).clamp(min=0)
        deviation = (self.signal_ * (unexplained + self.ratio_)).sqrt()
        centre, scale = self.outputs_
        return centre + scale * (correlation @ self.weights_), scale * deviation[:, None]

    def _correlation(self, queries, points):
        apart = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.exp(-(apart**2) / (2 * self.length_**2))

    def _search(self, points, targets):
        """The largest likelihood on a grid; the signal has a closed form for each length scale and ratio."""
        n_outputs = targets.shape[1]
        ratios = 10 ** torch.arange(*RATIOS, dtype=points.dtype, device=points.device)
        lowest = math.inf
        for exponent in np.arange(*LENGTHS):
            self.length_ = float(2**exponent)
            values, vectors = torch.linalg.eigh(self._correlation(points, points))
            shifted = values.clamp(min=0) + ratios[:, None]
            squares = ((vectors.T @ targets) ** 2).sum(dim=1)
            energy = (squares / shifted).sum(dim=1)
            signal = torch.maximum(energy / targets.numel(), self.noise_lower_bound / ratios)
            deviance = targets.numel() * signal.log() + energy / signal
            deviance += n_outputs * shifted.log().sum(dim=1)
            best = int(deviance.argmin())
            if float(deviance[best]) < lowest:
                lowest = float(deviance[best])
                found = self.length_, float(ratios[best]), float(signal[best])
        return found


@dataclass
class SampledProcess:
    """Rollouts of a Gaussian process of one step: mean and 1.96 times the standard deviation of Monte Carlo samples.

    Samples are clipped to the range of all values of the data. Outside of it the process is so uncertain that rollouts would diverge.
    """

    process: StepProcess
    n_samples: int
    n_steps: int
    device: str
    random_state: int

    def fit(self, x, y):
        pairs = (torch.from_numpy(part).to(self.device) for part in (x, y))
        self.process_ = replace(self.process).fit(*pairs)
        self.range_ = float(x.min()), float(x.max())
        return self

    def predict(self, x0):
        generator = torch.Generator(self.device).manual_seed(self.random_state)
        state = torch.from_numpy(x0).to(self.device).repeat(self.n_samples, 1)
        states = []
        for _ in range(self.n_steps):
            mean, deviation = self.process_(state)
            noise = torch.empty_like(state).normal_(generator=generator)
            state = (mean + deviation * noise).clamp(*self.range_)
            states.append(state.cpu())
        sampled = torch.stack(states, dim=1).unflatten(0, (self.n_samples, len(x0)))
        mean, deviation = spread(iter(sampled))
        return Bound(mean.numpy(), GAUSSIAN_95 * deviation.numpy())
