"""Scores of a bound, on all cells and near the predicted interface."""

import numpy as np
import torch

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov.bounds import BINARY, PROBABILITY, wrong
from benchmarks.richtmyer_meshkov.pictures import SHOWN, SHOWN_TIMES
from geoq.metrics import correlation, coverage, pinball, relative_l2
from geoq.quantiles import pinball_loss
from geoq.surrogate import evaluate

TOLERANCE = 1e-6
BAND = 4
# A cell is flagged if its bound is at least this large.
FLAG = 0.5


# Scores.


def score(setting, study, answer):
    """Scores of a bound on all cells, in the safe region and near the predicted interface."""
    y, bound = study.y_test, answer.bound
    error = setting.error(y, answer.p)
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    band, misses = study.distance <= BAND, wrong(y, answer.p) > 0
    loss = pinball_loss(error, bound, QUANTILE).double()
    without = dict.fromkeys(
        ("safe_fraction", "safe_pinball", "safe_correlation", "safe_coverage")
    )
    return {
        "pinball": pinball(error, bound, QUANTILE),
        "correlation": correlation(error, bound),
        "coverage": coverage(error, allowed),
        **(without if answer.safe is None else inside(answer.safe, error, bound)),
        "relative_l2": relative_l2(y, setting.prediction(answer.p)),
        "band_coverage": coverage(error, allowed, band),
        "band_correlation": correlation(error, bound, band),
        "recall": float((bound >= FLAG)[misses].double().mean()),
        "flagged": float((bound >= FLAG).double().mean()),
        "mean_bound": float(bound.double().mean()),
        "case_correlation": correlation(case_means(error), case_means(bound)),
        "wrong_cells": float(misses.double().mean()),
        "pinball_by_time": loss.mean(dim=(0, 2, 3)).tolist(),
        "pinball_by_case": loss.mean(dim=(1, 2, 3)).tolist(),
    }


def inside(safe, error, bound):
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    return {
        "safe_fraction": float(safe.double().mean()),
        "safe_pinball": pinball(error, bound, QUANTILE, safe),
        "safe_correlation": correlation(error, bound, safe),
        "safe_coverage": coverage(error, allowed, safe),
    }


def case_means(field):
    return field.double().mean(dim=(1, 2, 3))


def surrogate_accuracy(study):
    """Relative L2 error and fraction of wrong cells, on training, held-out and test simulations."""
    in_sample = evaluate(study.networks["deployed"], study.x, "surrogate")
    pairs = {
        "in_sample": (study.y, in_sample),
        "cross_fit": (study.y, study.cross_fit),
        "test": (study.y_test, study.p),
    }
    return {
        "seed": study.seed,
        "n_train": len(study.y),
        "n_test": len(study.y_test),
        "fold_sizes": np.bincount(study.fold).tolist(),
        "median_case": study.median_case,
        **{
            f"{setting.name} relative_l2 {name}": relative_l2(y, setting.prediction(p))
            for setting in (BINARY, PROBABILITY)
            for name, (y, p) in pairs.items()
        },
        **{
            f"wrong_cells {name}": float(wrong(y, p).double().mean())
            for name, (y, p) in pairs.items()
        },
    }


def fields_of(setting, study, method, answer):
    """Arrays of a bound for the pictures: maps of the median case, means of all cases, and flagged fractions."""
    times = [time - 1 for time in SHOWN_TIMES]
    shown = slice(None) if method.name == SHOWN[0] else times
    bound, error = answer.bound, setting.error(study.y_test, answer.p)
    misses = wrong(study.y_test, answer.p) > 0
    # A two-valued bound has one threshold; the expected error behind it has all.
    score = bound if answer.expected is None else answer.expected
    maps = {"bound": bound}
    if answer.expected is not None:
        maps["expected"] = answer.expected
    return {
        **{name: as_bytes(m[study.median_case, shown]) for name, m in maps.items()},
        "case_bound": case_means(bound).cpu().numpy(),
        "case_error": case_means(error).cpu().numpy(),
        "flagged_and_recall": flagged_and_recall(score, misses),
        "at_one_half": np.array([fractions(bound >= FLAG, misses)]),
    }


def flagged_and_recall(score, misses):
    """Pairs of fractions, of all cells and of the wrong cells, that are flagged at falling thresholds of a score."""
    ordered = score.flatten().sort(descending=True).values
    places = np.geomspace(1e-3, 0.3, 60) * (len(ordered) - 1)
    thresholds = ordered[torch.as_tensor(places).long().to(ordered.device)]
    return np.array([fractions(score >= threshold, misses) for threshold in thresholds])


def fractions(flagged, misses):
    return [float(flagged.double().mean()), float(flagged[misses].double().mean())]


def as_bytes(field):
    return (255 * field).round().to(torch.uint8).cpu().numpy()
