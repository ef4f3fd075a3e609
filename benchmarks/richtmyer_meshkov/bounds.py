"""Which error is bounded, and the bounds that need no training.

A method takes a study and a setting and returns an ``Answer``: a bound in [0, 1] for each cell of the test cases.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.record import QUANTILE
from benchmarks.rivals import MCDropout
from benchmarks.rivals.gaussian_process import GAUSSIAN_95
from benchmarks.rivals.networks import spread
from geoq.bounds.network import pinball
from geoq.parts import identity
from geoq.quantiles import n_required, rank

# Distances to the predicted interface are counted up to this many cells.
FARTHEST = 16
# Edges of the bins of min(p, 1 - p).
DOUBT_EDGES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4)
# A bin with fewer held-out errors takes the quantile of all cells at that time.
FEWEST = 100
# Candidates for the factor of p (1 - p).
FACTORS = (0.0, *(2 ** (power / 4) for power in range(-8, 57)))
# Range of the initial value of a learned bound.
LEAST_START, MOST_START = 1e-5, 0.98
# Rows per chunk of computations in full precision.
CHUNK = 32


class Setting(NamedTuple):
    """Which error is bounded: ``error(y, p)`` of the truth and the probability; ``values(p)`` are its two values."""

    name: str
    error: Callable[[Tensor, Tensor], Tensor]
    prediction: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], tuple[Tensor, Tensor]]


def thresholded(p):
    return (p > 0.5).to(p.dtype)


def wrong(y, p):
    """1 where the thresholded prediction is not the truth."""
    return ((p > 0.5) != (y > 0.5)).float()


def gap(y, p):
    return (y - p).abs()


def of_class(p):
    return torch.zeros_like(p), torch.ones_like(p)


def of_probability(p):
    return torch.minimum(p, 1 - p), torch.maximum(p, 1 - p)


BINARY = Setting("binary", wrong, thresholded, of_class)
PROBABILITY = Setting("probability", gap, identity, of_probability)


class Answer(NamedTuple):
    """A bound per cell and the probabilities whose error it bounds; optionally the safe flag and the expected error."""

    bound: Tensor
    p: Tensor
    safe: Tensor | None = None
    expected: Tensor | None = None


def in_chunks(function, fields):
    """A function of fields, applied to a few rows at a time."""
    return torch.cat([function(part) for part in fields.split(CHUNK)])


def interface_distance(p):
    """Chessboard distance to the nearest cell of the other predicted gas, at most ``FARTHEST``; y is periodic."""

    def spread_out(field):
        wrapped = torch.cat([field[..., -1:, :], field, field[..., :1, :]], dim=-2)
        return nn.functional.max_pool2d(wrapped, 3, stride=1, padding=(0, 1))

    def of_few(p):
        heavy = thresholded(p).float()
        light = 1 - heavy
        distance = torch.ones_like(heavy, dtype=torch.uint8)
        for _ in range(FARTHEST - 1):
            heavy, light = spread_out(heavy), spread_out(light)
            distance += heavy != light
        return distance

    return in_chunks(of_few, p)


def smallest(values, place):
    """The value at a place, counted from 1, of the sorted values of each cell."""
    return values.sort(dim=0).values[min(place, len(values)) - 1]


def quantile_of_cells(error, quantile=QUANTILE):
    """The inverse-CDF quantile over the first axis."""
    return smallest(error, rank(len(error), quantile))


def quantile_of_all(error, quantile=QUANTILE):
    """The inverse-CDF quantile of all values together; for one slice, sorting is faster than selecting."""
    rank = max(1, math.ceil(error.numel() * quantile - 1e-9))
    return error.flatten().sort().values[rank - 1]


def quantile_by_bin(error, bins, n_bins, quantile=QUANTILE, fewest=FEWEST):
    """The inverse-CDF quantile of the errors in each bin; errors lie in [0, 1]."""
    # One sort key for bin and error; half the error, so that an error of 1 stays below the next bin.
    key = (bins.double() + error.double() / 2).flatten().sort().values
    count = torch.bincount(bins.flatten(), minlength=n_bins)
    rank = (count.double() * quantile - 1e-9).ceil().long().clamp(min=1)
    first = count.cumsum(0) - count
    number = torch.arange(n_bins, device=error.device)
    quantiles = 2 * (key[(first + rank - 1).clamp(max=len(key) - 1)] - number)
    pooled = quantile_of_all(error, quantile).double()
    return torch.where(count < fewest, pooled, quantiles).to(error.dtype)


def best_factor(error, scale, quantile=QUANTILE):
    """The candidate c with the smallest pinball loss of the bound min(c scale, 1)."""

    def loss(factor):
        bound = (factor * scale).clamp(max=1)
        return pinball(error, bound, quantile).mean(dtype=torch.float64)

    losses = torch.stack([loss(factor) for factor in FACTORS])
    return torch.tensor(FACTORS, device=error.device)[losses.argmin()]


# Bounds that need no training.


def zero_bound(study, setting):
    del setting
    return Answer(torch.zeros_like(study.p), study.p)


def best_constant(study, setting):
    """The constant with the smallest pinball loss on the test errors."""
    error = setting.error(study.y_test, study.p)
    quantiles = quantile_of_all(error)
    return Answer(quantiles.expand_as(study.p).clone(), study.p)


def split_conformal(study, setting):
    """Split conformal prediction per cell and time, with a network trained on 80 % of the simulations."""
    network, kept = study.networks["split"], study.kept_apart
    error = setting.error(study.y[kept], network(study.x[kept]))
    quantiles = smallest(error, rank(len(error) + 1, QUANTILE))
    test = network(study.x_test)
    return Answer(quantiles.expand_as(test).clone(), test)


def n_kept_apart(n_rows, fraction=0.2):
    return max(round(fraction * n_rows), n_required(QUANTILE))


def dropout_passes(study, name, x):
    """Mean and 1.96 standard deviations over passes of one network with dropout."""
    baseline = MCDropout(
        lambda x, y: study.networks[name],  # noqa: ARG005
        n_passes=study.settings.n_passes,
        random_state=study.seed,
    )
    return baseline.fit(study.x[:2], study.y[:2]).predict(x)


def mc_dropout(study, setting):
    del setting
    mean, bound = dropout_passes(study, "deployed", study.x_test)
    return Answer(bound, mean)


def mc_dropout_scaled(study, setting):
    """MC dropout times the best factor of each time on the held-out simulations of the fold networks."""

    def held_out():
        mean, bound = torch.empty_like(study.y), torch.empty_like(study.y)
        for number, name in enumerate(study.fold_names):
            rows = torch.from_numpy(study.fold == number).to(mean.device)
            mean[rows], bound[rows] = dropout_passes(study, name, study.x[rows])
        return mean, bound

    calibration = study.remembered("held-out passes", held_out)
    test = dropout_passes(study, "deployed", study.x_test)
    return scaled(setting, study.y, calibration, test)


def ensemble_spread(study, names, x):
    """Mean and 1.96 standard deviations of the members' probabilities."""
    mean, deviation = spread(study.networks[name](x) for name in names)
    return mean, GAUSSIAN_95 * deviation


def deep_ensemble(study, setting):
    del setting
    mean, bound = ensemble_spread(study, study.members, study.x_test)
    return Answer(bound, mean)


def deep_ensemble_scaled(study, setting):
    """An ensemble trained on 80 % of the simulations, times the best factor of each time on the others."""
    names, kept = study.split_members, study.kept_apart
    calibration = ensemble_spread(study, names, study.x[kept])
    test = ensemble_spread(study, names, study.x_test)
    return scaled(setting, study.y[kept], calibration, test)


def scaled(setting, y, calibration, test):
    """The bounds of the test cases, times the factor of each time that is best for those of the calibration cases."""
    by_time = zip(y.unbind(1), *(part.unbind(1) for part in calibration), strict=True)
    factors = [best_factor(setting.error(y, p), bound) for y, p, bound in by_time]
    mean, bound = test
    per_time = torch.stack(factors)[:, None, None]
    return Answer((per_time * bound).clamp(max=1), mean)


def static(study, setting):
    """The quantile of the held-out errors of each cell and time."""
    quantiles = [quantile_of_cells(setting.error(y, p)) for y, p in study.held_out_by_time()]
    return Answer(torch.stack(quantiles).expand_as(study.p).clone(), study.p)


def static_column(study, setting):
    """The quantile of the held-out errors of each column and time: the problem is homogeneous in y."""
    pairs = study.held_out_by_time()
    quantiles = [quantile_of_cells(setting.error(y, p).flatten(0, 1)) for y, p in pairs]
    return Answer(torch.stack(quantiles)[:, None].expand_as(study.p).clone(), study.p)


def by_distance(p, distance):
    del p
    return distance.int() - 1, FARTHEST


def by_doubt(p, distance):
    del distance
    edges = torch.tensor(DOUBT_EDGES, device=p.device, dtype=p.dtype)
    doubt = torch.minimum(p, 1 - p)
    return torch.bucketize(doubt, edges, out_int32=True), len(DOUBT_EDGES) + 1


def by_distance_and_doubt(p, distance):
    (near, n_near), (doubt, n_doubt) = by_distance(p, distance), by_doubt(p, distance)
    return near * n_doubt + doubt, n_near * n_doubt


def binned(study, setting, *, bins_of):
    """The quantile of the held-out errors in each bin, separately for each time."""
    bound = torch.empty_like(study.p)
    for time, (y, p) in enumerate(study.held_out_by_time()):
        bins, n_bins = bins_of(p, study.cross_fit_distance[:, time])
        quantiles = quantile_by_bin(setting.error(y, p), bins, n_bins)
        test_bins, _ = bins_of(study.p[:, time], study.distance[:, time])
        bound[:, time] = quantiles[test_bins.long()]
    return Answer(bound, study.p)


def best_factors(study, setting):
    """The best factor of p (1 - p) for each time."""
    factors = [best_factor(setting.error(y, p), p * (1 - p)) for y, p in study.held_out_by_time()]
    return torch.stack(factors)[:, None, None]


def doubt_times_factor(study, setting):
    """c_t p (1 - p), with the best factor for each time."""
    per_time = best_factors(study, setting)
    return Answer((per_time * study.p * (1 - study.p)).clamp(max=1), study.p)


# Two-valued bounds: the error of a probability takes the larger of its two values exactly where the thresholded
# prediction is wrong. The probability of a wrong cell therefore decides the bounds of both errors.


def two_valued_bound(study, setting, chance, safe=None):
    """The larger value where the probability of a wrong cell exceeds 1 - tau, and the expected error."""
    less, greater = setting.values(study.p)
    bound = torch.where(chance > 1 - QUANTILE, greater, less)
    return Answer(bound, study.p, safe, less + chance * (greater - less))


def binned_chance(study, setting, *, bins_of):
    """The chance of a wrong cell is the fraction of wrong held-out cells in its bin, separately for each time."""

    def chance():
        result = torch.empty_like(study.p)
        for time, (y, p) in enumerate(study.held_out_by_time()):
            bins, n_bins = bins_of(p, study.cross_fit_distance[:, time])
            test_bins, _ = bins_of(study.p[:, time], study.distance[:, time])
            result[:, time] = fraction_by_bin(wrong(y, p), bins, n_bins)[test_bins.long()]
        return result

    return two_valued_bound(study, setting, study.remembered(bins_of, chance))


def fraction_by_bin(is_wrong, bins, n_bins, fewest=FEWEST):
    """Fraction of wrong cells in each bin, or of all cells where the bin has fewer than ``fewest``."""
    bins = bins.flatten()
    count = torch.bincount(bins, minlength=n_bins)
    total = torch.bincount(bins, is_wrong.flatten().double(), minlength=n_bins)
    fraction = torch.where(count < fewest, is_wrong.mean(dtype=torch.float64), total / count)
    return fraction.to(is_wrong.dtype)
