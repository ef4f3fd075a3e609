"""A bound that depends on the day: a static bound times a factor of the weather's activity around each cell."""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import avg_pool2d, pad

from benchmarks.weather.bounds import Seen, Tuples, by_fold

RIDGE = 1e-3
# Keeps logarithms of errors and activities finite, in units of their means.
FLOOR = 0.02


def neighbourhood_mean(fields, size):
    """Mean over size x size cells; longitude is periodic, and cells beyond the poles are left out."""
    half = size // 2
    around = pad(fields.flatten(0, -3)[:, None], (half, half, 0, 0), mode="circular")
    beyond = (0, 0, half, half)
    total, cells = (
        avg_pool2d(pad(part, beyond), size, stride=1)
        for part in (around, torch.ones_like(around[:1]))
    )
    return (total / cells).view(fields.shape)


def neighbourhood_spread(fields, size):
    """Standard deviation over size x size cells."""
    mean, square = (neighbourhood_mean(f, size) for f in (fields, fields.square()))
    return (square - mean.square()).clamp(min=0).sqrt()


def activity(seen):
    """Predictors of the error: speed and roughness of the last states around each cell.

    The shape is (forecast, channel, lat, lon, column). The predictors use the standardised inputs only, so they do not
    depend on the lead.
    """
    before, middle, last = seen.features.inputs.unbind(dim=1)
    tendency = (last - middle).abs()
    # The tendencies of the other variables around the cell are predictors too.
    others = (tendency.sum(dim=1, keepdim=True) - tendency) / max(1, last.shape[1] - 1)
    columns = [
        tendency,
        *(neighbourhood_mean(tendency, size) for size in (3, 7, 15)),
        *(neighbourhood_mean(others, size) for size in (3, 7)),
        neighbourhood_mean((last - before).abs(), 3),
        neighbourhood_mean((last - 2 * middle + before).abs(), 3),
        neighbourhood_spread(last, 3),
        neighbourhood_spread(last, 7),
    ]
    return torch.stack(columns, dim=-1)


@dataclass
class Activity:
    """A static bound times a log-linear factor per lead and channel.

    The weights are shrunk by their slope on held-out folds.
    """

    static: object

    def fit(self, tuples):
        columns = activity(tuples.seen)
        self.usual_ = columns.mean(dim=0)
        x = self._relative(columns)
        error = tuples.error / tuples.error.mean(dim=0).clamp(min=1e-12)
        y = (error + FLOOR).log()
        self.weights_ = self._weights(x, y)
        self.weights_ *= self._shrinkage(x, y, tuples.calibration)
        error = tuples.error / self._factor(x)
        rest = Tuples(tuples.seen, replace(tuples.calibration, error=error))
        self.static.fit(rest)
        return self

    def bound(self, seen: Seen):
        return self.static.bound(seen) * self._factor(self._relative(activity(seen)))

    def _relative(self, columns):
        return (columns / self.usual_.clamp(min=1e-12) + FLOOR).log()

    def _factor(self, x):
        # Queries may be more active than all calibration windows.
        return torch.einsum("nchwk,lck->nlchw", x, self.weights_).clamp(-2, 2).exp()

    @staticmethod
    def _weights(x, y):
        """Ridge regression of the log errors: (lead, channel, column)."""
        x = x - x.mean(dim=(0, 2, 3), keepdim=True)
        y = y - y.mean(dim=(0, 3, 4), keepdim=True)
        square = torch.einsum("nchwj,nchwk->cjk", x, x).double()
        product = torch.einsum("nchwk,nlchw->clk", x, y).double()
        size = square.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        one = torch.eye(square.shape[1], dtype=square.dtype, device=square.device)
        solved = torch.linalg.solve(square + RIDGE * size * one, product.mT)
        return solved.permute(2, 0, 1).to(x.dtype)

    def _shrinkage(self, x, y, calibration):
        """Slope of the log errors on the predictions by the other folds' weights, clipped to [0, 1]."""
        product = square = 0.0
        for mine, others in by_fold(calibration):
            weights = self._weights(x[others], y[others])
            guess = torch.einsum("nchwk,lck->nlchw", x[mine], weights)
            guess = guess - guess.mean(dim=(0, 3, 4), keepdim=True)
            product = product + (guess * y[mine]).sum(dim=(0, 3, 4))
            square = square + guess.square().sum(dim=(0, 3, 4))
        return (product / square.clamp(min=1e-12)).clamp(0, 1)[..., None]
