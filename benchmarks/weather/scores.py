"""Scores of a bound of a forecast field: pooled, by lead, by area, by day, and for whole fields."""

import math

import numpy as np

from geoq.quantiles import pinball_loss

LEADS_A_DAY = 4


def scores(error, bound, latitude, quantile):
    """Scores of one row; fields have the shape (forecast, lead, channel, lat, lon)."""
    # Double precision, because millions of values are summed.
    error, bound = error.astype(float), bound.astype(float)
    loss = pinball_loss(error, bound, quantile)
    covered = (error <= bound).astype(float)
    area = area_weights(latitude)[:, None]
    fraction = covered.reshape(len(covered), -1).mean(axis=1)
    quarters = np.array_split(np.arange(error.shape[1]), 4)
    first, day = quarters[0], slice(LEADS_A_DAY)
    line = {
        "area_pinball": (area * loss).mean(),
        "area_coverage": (area * covered).mean(),
        "which_day": which_day(error, bound),
        "which_day_q1": which_day(error[:, first], bound[:, first]),
        "which_day_24h": which_day(error[:, day], bound[:, day]),
        "field_least": fraction.min(),
        "field_fraction_90": (fraction >= 0.90).mean(),
        "field_fraction_95": (fraction >= 0.95).mean(),
    }
    for number, leads in enumerate(quarters, start=1):
        line[f"pinball_q{number}"] = loss[:, leads].mean()
        line[f"coverage_q{number}"] = covered[:, leads].mean()
    return {name: float(value) for name, value in line.items()}


def area_weights(latitude):
    """Area of the cells at each latitude, divided by the mean area."""
    weight = np.cos(np.deg2rad(latitude.astype(float)))
    return weight / weight.mean()


def which_day(error, bound):
    """Correlation of error and bound after subtracting their means over the days; 0 for a bound that is the same every day."""
    parts = error, bound
    differs = [part - part.mean(axis=0) for part in parts]
    # A bound that is the same every day differs from its mean by rounding.
    if any(abs(d).max() <= 1e-9 * abs(p).max() for d, p in zip(differs, parts, strict=True)):
        return 0.0
    left, right = (part.ravel() for part in differs)
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def skill(y, prediction, reference):
    """1 - ratio of mean squared errors, by quarter of the leads, after 6 hours and after a day."""
    ours, theirs = ((y - part).astype(float) ** 2 for part in (prediction, reference))

    def over(leads):
        return 1 - float(ours[:, leads].mean() / theirs[:, leads].mean())

    quarters = np.array_split(np.arange(y.shape[1]), 4)
    line = {f"q{number}": over(leads) for number, leads in enumerate(quarters, 1)}
    return line | {"6h": over([0]), "24h": over([LEADS_A_DAY - 1])}


def window_correlation(first, second):
    """Correlation of two numbers per window; nan where one of them is constant."""
    if len(first) < 2 or first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])
