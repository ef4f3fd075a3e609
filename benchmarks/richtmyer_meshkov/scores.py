"""Scores of a bound, on all cells and near the predicted interface."""

import torch

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov.bounds import BINARY, PROBABILITY, wrong
from benchmarks.richtmyer_meshkov.pictures import SHOWN, SHOWN_TIMES
from benchmarks.scores import relative_l2, scores
from geoq.bounds.network import pinball as pinball_loss
from geoq.metrics import correlation, coverage

# A cell is covered up to this fraction and difference, near the interface up to this distance, and flagged from this bound on.
TOLERANCE, BAND, FLAG = 1e-6, 4, 0.5


def score(setting, study, answer):
    """Scores of a bound on all cells, in the safe region and near the predicted interface."""
    y, bound = study.y_test, answer.bound
    error = setting.error(y, answer.p)
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    band, misses = study.distance <= BAND, wrong(y, answer.p) > 0
    loss = pinball_loss(error, bound, QUANTILE).double()
    flagged = bound >= FLAG
    return {
        **scores(error, bound, allowed, answer.safe),
        "relative_l2": relative_l2(y.cpu(), setting.prediction(answer.p).cpu()),
        "band_coverage": coverage(error, allowed, band),
        "band_correlation": correlation(error, bound, band),
        "recall": float(flagged[misses].double().mean()),
        "flagged": float(flagged.double().mean()),
        "mean_bound": float(bound.double().mean()),
        "case_correlation": correlation(case_means(error), case_means(bound)),
        "wrong_cells": float(misses.double().mean()),
        "pinball_by_time": loss.mean(dim=(0, 2, 3)).tolist(),
        "pinball_by_case": loss.mean(dim=(1, 2, 3)).tolist(),
    }


def case_means(field):
    return field.double().mean(dim=(1, 2, 3))


def accuracy(study):
    """Relative L2 error and fraction of wrong cells, on training, held-out and test simulations."""
    pairs = {
        "in_sample": (study.y, study.networks["deployed"](study.x)),
        "cross_fit": (study.y, study.cross_fit),
        "test": (study.y_test, study.p),
    }
    found = {"seed": study.seed, "n_train": len(study.y), "n_test": len(study.y_test)}
    for name, (y, p) in pairs.items():
        for setting in (BINARY, PROBABILITY):
            error = relative_l2(y.cpu(), setting.prediction(p).cpu())
            found[f"{setting.name} relative_l2 {name}"] = error
        found[f"wrong_cells {name}"] = float(wrong(y, p).double().mean())
    return found


def arrays_of(study, name, answer):
    """Arrays of a bound for the pictures: maps of the median case."""
    times = [time - 1 for time in SHOWN_TIMES]
    shown = slice(None) if name == SHOWN[0] else times
    maps = {"bound": answer.bound, "expected": answer.expected}
    return {k: as_bytes(m[study.median_case, shown]) for k, m in maps.items() if m is not None}


def as_bytes(field):
    return (255 * field).round().to(torch.uint8).cpu().numpy()
