"""Three models that must agree: the deployed surrogate, and the fold surrogates in sample and held out."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

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


class Answers(NamedTuple):
    """Rows of the data, and for each the mean error of a surrogate and a number that stands for its prediction."""

    rows: Int[np.ndarray, " m"]
    error: Float[np.ndarray, " m"]
    prediction: Float[np.ndarray, " m"]


@dataclass
class Agreement:
    """What the fold surrogates answer at the rows that they have not seen, and at some rows that they are trained on.

    Attributes:
        outputs: a number that stands for the reference output of each row.
        held_out: the answers of each fold at its held-out rows.
        in_sample: the answers of each fold at some of its training rows.
    """

    outputs: Float[np.ndarray, " n"]
    held_out: dict[int, Answers] = field(default_factory=dict)
    in_sample: dict[int, Answers] = field(default_factory=dict)

    def put(
        self, fold: int, rows: np.ndarray, n_held_out: int, error: np.ndarray, answer: np.ndarray
    ) -> tuple[float, float]:
        """Keep the answers of a fold, first those at its held-out rows; returns the mean errors held out and in sample."""
        found = Answers(rows, self._sizes(error), sketch(answer, 1)[:, 0])
        self.held_out[fold] = Answers(*(part[:n_held_out] for part in found))
        self.in_sample[fold] = Answers(*(part[n_held_out:] for part in found))
        means = [float(_mean(part[fold].error)) for part in (self.held_out, self.in_sample)]
        return means[0], means[1]

    def warn(self, deployed: np.ndarray, interpolating: Sequence[int]) -> None:
        """Warn of the first of four facts; ``deployed`` are the errors of the deployed surrogate at all rows."""
        if not self.held_out:
            return
        text = self._failed() or self._seen() or self._alike()
        text = text or self._worse(self._sizes(deployed), interpolating)
        if text:
            warn(text)

    def _sizes(self, error: np.ndarray) -> Float[np.ndarray, " m"]:
        """The mean error of each row; 0 if it is rounding."""
        found = mean_of_each(error)
        return np.where(found <= EXACT * abs(self.outputs).max(), 0, found)

    def _listed(self, folds: Sequence[int], held_out: np.ndarray, in_sample: np.ndarray) -> str:
        names = [
            f"fold {f + 1} ({a:.3g} held out, {b:.3g} in sample)"
            for f, a, b in zip(folds, held_out, in_sample, strict=True)
        ]
        return f"{', '.join(names)} of {len(self.held_out)}"

    def _failed(self) -> str:
        folds = sorted(self.held_out)
        parts = (self.held_out, self.in_sample)
        out, own = (np.array([_mean(part[f].error) for f in folds]) for part in parts)
        typical = np.median(out), np.median(own)
        failed = np.flatnonzero((out > FAILED * typical[0]) & (own > FAILED * typical[1]))
        # Interpolating surrogates have zero errors in sample, so every other error would exceed the ratio.
        if not all(typical) or not len(failed):
            return ""
        return (
            f"the mean errors of {self._listed([folds[f] for f in failed], out[failed], own[failed])} are more than {FAILED:g} "
            f"times the median over the folds ({typical[0]:.3g} held out, {typical[1]:.3g} in sample). The training of such a fold "
            "probably failed, which makes all bounds too large; train longer or with another seed, and fit again."
        )

    def _alike(self) -> str:
        """Two folds one of which is trained on the rows that the other holds out; a rounded output is no evidence."""
        folds = sorted(self.held_out)
        for one, two in zip(folds, [*folds[1:], folds[0]], strict=True):
            a, b = self.held_out[one], self.in_sample[two]
            rows, i, j = np.intersect1d(a.rows, b.rows, return_indices=True)
            gap = abs(a.prediction[i] - b.prediction[j]).sum()
            error = abs(a.prediction[i] - self.outputs[rows]).sum()
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

    def _seen(self) -> str:
        total, count = np.zeros((2, len(self.outputs)))
        for part in self.in_sample.values():
            known = ~np.isnan(part.error)
            np.add.at(total, part.rows[known], part.error[known])
            np.add.at(count, part.rows[known], 1)
        with np.errstate(invalid="ignore"):
            usual = total / count
        seen = []
        for fold, part in sorted(self.held_out.items()):
            both = ~np.isnan(part.error + usual[part.rows])
            means = part.error[both], usual[part.rows][both]
            if both.sum() >= ENOUGH and means[0].mean() < SEEN * means[1].mean():
                seen.append((fold, *(m.mean() for m in means)))
        if not seen:
            return ""
        folds, out, own = zip(*seen, strict=True)
        return (
            f"the mean errors of {self._listed(folds, np.array(out), np.array(own))}, at the same rows, show that the surrogate of "
            "such a fold was trained on its held-out rows and not on its training rows, so the bounds are far too small; pass "
            "the surrogates in the order of the folds, each trained on the training rows of its fold."
        )

    def _worse(self, deployed: np.ndarray, interpolating: Sequence[int]) -> str:
        parts = [self.held_out[fold] for fold in interpolating if fold in self.held_out]
        out = np.concatenate([part.error for part in parts])
        own = deployed[np.concatenate([part.rows for part in parts])]
        return worse_than_folds(own, out, "at the data")


def worse_than_folds(deployed: np.ndarray, held_out: np.ndarray, where: str) -> str:
    """The warning of a deployed surrogate that is worse than the fold surrogates, given errors of each at the same rows."""
    more = (deployed - held_out)[~np.isnan(deployed - held_out)]
    own, out = _mean(deployed), _mean(held_out)
    surely = SURELY * more.std() / max(1, len(more)) ** 0.5 if len(more) else np.inf
    if own <= WORSE * out or more.mean() <= surely:
        return ""
    return (
        f"the mean error of the deployed surrogate {where} is {own:.3g}, but of the fold surrogates at held-out points it is "
        f"{out:.3g}. So it is not what train_surrogate makes, or its training failed, and the bounds, which are learned from "
        "the folds, are too small for it. Pass surrogate=None, which trains it like the folds, or the recipe that makes it."
    )


def warn_if_worse(deployed: np.ndarray, held_out: np.ndarray, where: str) -> None:
    """Warn if errors of the deployed surrogate are larger than held-out errors from the same states."""
    if text := worse_than_folds(mean_of_each(deployed), mean_of_each(held_out), where):
        warn(text)


def mean_of_each(error: np.ndarray) -> Float[np.ndarray, " n"]:
    """The mean error of each row; nan if no error of the row counts."""
    rows, found = flat(error), np.empty(len(error))
    with warnings.catch_warnings(action="ignore"):
        for part in chunks(*rows.shape):
            found[part] = np.nanmean(rows[part].astype(float), axis=1)
    return found


def _mean(error: np.ndarray) -> float:
    with warnings.catch_warnings(action="ignore"):
        return float(np.nanmean(error))
