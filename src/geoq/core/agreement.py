"""Three models that must agree: the deployed surrogate, and the fold surrogates in sample and held out."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat
from geoq.checks import warn
from geoq.neighbors import sketch

# The training of a fold surrogate has failed if its errors are this many times the median over the folds, both on its
# training points and on its held-out points. Extrapolation raises only the errors on held-out points.
FAILED = 5.0
# Two folds are one model if they differ by at most this fraction of their errors, at this many rows or more.
ALIKE, FEWEST = 1e-4, 5
# A fold has seen its held-out rows if its errors there are below this fraction of the errors of the folds that are trained on
# them, for this many rows or more.
SEEN, ENOUGH = 0.5, 10
# Errors of up to this fraction of the largest output are rounding.
EXACT = 1e-12
# The deployed surrogate is another model if its errors are this many times the held-out errors, and larger by this number of deviations.
WORSE, SURELY = 1.15, 2.0
# The columns row, error and prediction, see ``fold_answers``.
Answers: TypeAlias = Any


def fold_answers(
    rows: np.ndarray, error: np.ndarray, prediction: np.ndarray, outputs: np.ndarray
) -> Answers:
    """Rows, the mean error of a surrogate at each of them, and a number that stands for its prediction."""
    parts = rows, _sizes(error, outputs), sketch(prediction, 1)[:, 0]
    return np.rec.fromarrays(parts, dtype=[("row", int), ("error", float), ("prediction", float)])


def warn_of_folds(
    held_out: dict[int, Answers],
    in_sample: dict[int, Answers],
    outputs: Float[np.ndarray, " n"],
    deployed: Float[np.ndarray, " n *field"],
    interpolating: Sequence[int],
    where: str = "at the data",
) -> None:
    """Warn of the first of four facts.

    ``held_out`` are the answers of each fold at the rows that it has not seen, ``in_sample`` at some of its training rows, ``outputs`` has
    a number that stands for the reference output of each row, ``deployed`` are the errors of the deployed surrogate at all rows, and the held-out
    rows of the folds ``interpolating`` are nearest to their training rows.
    """
    text = _failed(held_out, in_sample) or _seen(held_out, in_sample, len(outputs))
    text = text or _alike(held_out, in_sample, outputs)
    if text:
        warn(text)
        return
    parts = [held_out[fold] for fold in interpolating]
    out, rows = (np.concatenate([part[name] for part in parts]) for name in ("error", "row"))
    warn_if_worse(_sizes(deployed, outputs)[rows], out, where)


def _sizes(error: np.ndarray, outputs: np.ndarray) -> Float[np.ndarray, " m"]:
    """The mean error of each row; 0 if it is rounding."""
    found = mean_of_each(error)
    return np.where(found <= EXACT * abs(outputs).max(), 0, found)


def _listed(folds: Iterable[tuple[int, float, float]], n_folds: int) -> str:
    """Folds with their errors held out and in sample."""
    names = [f"fold {f + 1} ({a:.3g} held out, {b:.3g} in sample)" for f, a, b in folds]
    return f"{', '.join(names)} of {n_folds}"


def _failed(held_out: dict[int, Answers], in_sample: dict[int, Answers]) -> str:
    folds = sorted(held_out)
    out, own = (
        np.array([mean_error(part[f].error) for f in folds]) for part in (held_out, in_sample)
    )
    typical = np.median(out), np.median(own)
    # Interpolating surrogates have zero errors in sample, so every other error would exceed the ratio.
    most = FAILED * typical[1] or typical[0]
    failed = np.flatnonzero((out > FAILED * typical[0]) & (own > most))
    if not typical[0] or not len(failed):
        return ""
    listed = _listed([(folds[f], out[f], own[f]) for f in failed], len(folds))
    return (
        f"the mean errors of {listed} are more than {FAILED:g} "
        f"times the median over the folds ({typical[0]:.3g} held out, {typical[1]:.3g} in sample). The training of such a fold "
        "probably failed, which makes all bounds too large; train longer or with another seed, and fit again."
    )


def _alike(held_out: dict[int, Answers], in_sample: dict[int, Answers], outputs: np.ndarray) -> str:
    """Two folds one of which is trained on the rows that the other holds out; a rounded output is no evidence."""
    folds = sorted(held_out)
    for one, two in zip(folds, [*folds[1:], folds[0]], strict=True):
        a, b = held_out[one], in_sample[two]
        rows, i, j = np.intersect1d(a.row, b.row, return_indices=True)
        gap = abs(a.prediction[i] - b.prediction[j]).sum()
        error = abs(a.prediction[i] - outputs[rows]).sum()
        n_distinct = len(np.unique(a.prediction[i]))
        if gap <= ALIKE * error and n_distinct >= max(FEWEST, 0.8 * len(rows)):
            return (
                f"the surrogates of folds {one + 1} and {two + 1} of {len(folds)} give the same answers, although fold {one + 1} "
                "is trained without rows that the other is trained on, so at least one has seen its held-out rows, and the "
                "bounds are far too small if it has learned from them. Probably train_surrogate returns a model that was "
                "trained before; train a new one on the x and y that it receives. If the model has never seen x and y, pass "
                "train_surrogate=None."
            )
    return ""


def _seen(held_out: dict[int, Answers], in_sample: dict[int, Answers], n: int) -> str:
    total, count = np.zeros((2, n))
    for part in in_sample.values():
        known = ~np.isnan(part.error)
        np.add.at(total, part.row[known], part.error[known])
        np.add.at(count, part.row[known], 1)
    with np.errstate(invalid="ignore"):
        usual = total / count
    seen = []
    for fold, part in sorted(held_out.items()):
        both = ~np.isnan(part.error + usual[part.row])
        out, own = part.error[both], usual[part.row][both]
        # A fold can also have a better model than the others, which then has smaller errors in sample, too.
        luck = mean_error(in_sample[fold].error) / max(
            mean_error(usual[in_sample[fold].row]), 1e-300
        )
        if len(out) >= ENOUGH and out.mean() < SEEN * own.mean() * min(1.0, luck):
            seen.append((fold, out.mean(), own.mean()))
    if not seen:
        return ""
    return (
        f"the mean errors of {_listed(seen, len(held_out))}, at the same rows, show that the surrogate of "
        "such a fold was trained on its held-out rows and not on its training rows, so the bounds are far too small; pass "
        "the surrogates in the order of the folds, each trained on the training rows of its fold."
    )


def warn_if_worse(deployed: np.ndarray, held_out: np.ndarray, where: str) -> None:
    """Warn if errors of the deployed surrogate are larger than errors of the fold surrogates at the same held-out rows."""
    deployed, held_out = mean_of_each(deployed), mean_of_each(held_out)
    more = (deployed - held_out)[~np.isnan(deployed - held_out)]
    own, out = mean_error(deployed), mean_error(held_out)
    surely = SURELY * more.std() / max(1, len(more)) ** 0.5 if len(more) else np.inf
    if own > WORSE * out and more.mean() > surely:
        warn(
            f"the mean error of the deployed surrogate {where} is {own:.3g}, but of the fold surrogates at held-out points it is "
            f"{out:.3g}. So it is not what train_surrogate makes, or its training failed, and the bounds, which are learned from "
            "the folds, are too small for it. Pass surrogate=None, which trains it like the folds, or the recipe that makes it."
        )


def mean_of_each(error: np.ndarray) -> Float[np.ndarray, " n"]:
    """The mean error of each row; nan if no error of the row counts."""
    rows = flat(error)
    with warnings.catch_warnings(action="ignore"):
        parts = [np.nanmean(rows[p].astype(float), axis=1) for p in chunks(*rows.shape)]
    return np.concatenate(parts or [np.zeros(0)])


def mean_error(error: np.ndarray) -> float:
    """The mean of the errors that count; nan if there are none."""
    with warnings.catch_warnings(action="ignore"):
        return float(np.nanmean(error))
