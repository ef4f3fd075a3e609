"""Scores of a bound on all cells and where the errors are."""

import numpy as np
import torch

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov.bounds import BINARY, PROBABILITY, wrong
from benchmarks.richtmyer_meshkov.pictures import SHOWN, SHOWN_TIMES
from geoq.increment import pinball_loss
from geoq.metrics import correlation, coverage, pinball, relative_l2
from geoq.surrogate import evaluate

TOLERANCE = 1e-6
BAND = 4
# Bounds from here on count as a warning: the cell is flagged.
FLAG = 0.5


# Scores.


def score(setting, study, answer):
    """How good a bound is, on all cells and where the errors are."""
    y, bound = study.y_test, answer.bound
    error = setting.error(y, answer.p)
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    band, misses = study.distance <= BAND, wrong(y, answer.p) > 0
    lost = pinball_loss(error, bound, QUANTILE).double()
    nothing = dict.fromkeys(
        ("safe_fraction", "safe_pinball", "safe_correlation", "safe_coverage")
    )
    return {
        "pinball": pinball(error, bound, QUANTILE),
        "correlation": correlation(error, bound),
        "coverage": coverage(error, allowed),
        **(nothing if answer.safe is None else inside(answer.safe, error, bound)),
        "relative_l2": relative_l2(y, setting.prediction(answer.p)),
        "band_coverage": coverage(error, allowed, band),
        "band_correlation": correlation(error, bound, band),
        "recall": float((bound >= FLAG)[misses].double().mean()),
        "flagged": float((bound >= FLAG).double().mean()),
        "mean_bound": float(bound.double().mean()),
        "case_correlation": correlation(case_means(error), case_means(bound)),
        "wrong_cells": float(misses.double().mean()),
        "pinball_by_time": lost.mean(dim=(0, 2, 3)).tolist(),
        "pinball_by_case": lost.mean(dim=(1, 2, 3)).tolist(),
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
    """Relative L2 and share of wrong cells of the deployed network, in sample and not, and of the folds' on held-out data."""
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
    """What the pictures need of a bound: two times of the median case, means of all cases, and which cells it finds."""
    times = [time - 1 for time in SHOWN_TIMES]
    shown = slice(None) if method.name == SHOWN[0] else times
    bound, error = answer.bound, setting.error(study.y_test, answer.p)
    misses = wrong(study.y_test, answer.p) > 0
    # A verdict has one level; what it was read off has all.
    score = bound if answer.expected is None else answer.expected
    maps = {"bound": bound}
    if answer.expected is not None:
        maps["expected"] = answer.expected
    return {
        **{name: as_bytes(m[study.median_case, shown]) for name, m in maps.items()},
        "case_bound": case_means(bound).cpu().numpy(),
        "case_error": case_means(error).cpu().numpy(),
        "flagged_and_recall": flagged_and_recall(score, misses),
        "at_one_half": np.array([shares(bound >= FLAG, misses)]),
    }


def flagged_and_recall(score, misses):
    """Cells by falling score: which share of all has been flagged, and which share of the wrong ones found."""
    ordered = score.flatten().sort(descending=True).values
    places = np.geomspace(1e-3, 0.3, 60) * (len(ordered) - 1)
    levels = ordered[torch.as_tensor(places).long().to(ordered.device)]
    return np.array([shares(score >= level, misses) for level in levels])


def shares(flagged, misses):
    return [float(flagged.double().mean()), float(flagged[misses].double().mean())]


def as_bytes(field):
    return (255 * field).round().to(torch.uint8).cpu().numpy()
