r"""``smooth``: a differentiable guide to where the bound is small, for optimisers that need gradients. It is not a bound.

.. math:: u(x) = c \sqrt{(\widehat F(x) - m(x))^2 + v(x)}

Here m and v are mean and variance of the Gaussian process of the calibration, given its centres, and c is the median ratio of the bound
to this expected error at the calibration tuples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from geoq.bounds.protocol import bounds_of
from geoq.checks import module_with_torch
from geoq.data.process import Process
from geoq.planning.distances import MAX_TUPLES, calibration_of, mean_over_field


def smooth(estimator: Any, surrogate: Any = None) -> Callable[[Any], Any]:
    """Returns a function of torch tensors, with gradients: one positive number per query; where the optimiser ends, ask ``assess``.

    Args:
        estimator: a ``GeoQ`` or ``GeoQRegressor`` that was fitted on an array of numbers, with the default bound.
        surrogate: the surrogate as a function of tensors; None means the one of the estimator.

    Raises:
        TypeError: the inputs are a table, or the calibration has no Gaussian process.
    """
    torch = module_with_torch("torch", "smooth")
    fitted = calibration_of(estimator)
    process, known, tuples = fitted.process, fitted.coordinates, fitted.tuples
    if not isinstance(process, Process) or fitted.metric is None or known.column is not None:
        raise TypeError(
            "smooth needs inputs in an array and a Gaussian process, which tables of text and bounds of fields do without; use "
            "constraint, which needs no gradients."
        )
    assert tuples is not None
    some = tuples.subsample(MAX_TUPLES).features
    expected = mean_over_field(some.expected_error)
    ratio = float(np.median(mean_over_field(bounds_of(fitted.bound, some)) / expected))
    weight = np.broadcast_to(
        1.0 if fitted.metric.weight is None else fitted.metric.weight, known.mean.shape
    )
    arrays = [known.mean, known.scale, weight, process.scales, process.centres, process.weights]
    arrays += [process.inverse_factor, process.mean, process.signal]
    mean, scale, w, scales, centres, weights, inverse, level, signal = (
        torch.from_numpy(np.array(a, dtype=float)) for a in arrays
    )
    log, model = torch.from_numpy(np.array(known.log)), surrogate or fitted.surrogate

    def guide(x: Any) -> Any:
        own = x.double()
        own = torch.where(log, torch.log(torch.where(log, own, torch.ones_like(own))), own)
        z = ((own - mean) / scale * w).flatten(1) / scales
        squared = ((z[:, None] - centres) ** 2).sum(dim=2)
        r = torch.sqrt({"matern32": 3, "matern52": 5}.get(process.kernel, 1) * squared + 1e-18)
        kernels = {"matern32": (1 + r) * torch.exp(-r)}
        kernels["matern52"] = (1 + r + r * r / 3) * torch.exp(-r)
        k = kernels.get(process.kernel, torch.exp(-squared / 2))
        left = (1 - ((k @ inverse.T) ** 2).sum(dim=1)).clamp(min=1e-12)
        gap = model(x).double().reshape(len(z), -1) - (k @ weights + level)
        variance = signal * (left[:, None] + process.noise)
        return ratio * torch.sqrt(gap**2 + variance).mean(dim=1)

    return guide
