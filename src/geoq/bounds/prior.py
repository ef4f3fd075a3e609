r"""The prior of an error with two values: the probability of the larger value, estimated without a network.

.. math:: \operatorname{logit} P_{cj}(x) = a_c \, s_c(\widehat F_{cj}(x)) + b_c \, m_{cj} + d_c + h_{cj}(x)

The network h corrects the other terms: s_c is the logit of the frequency of the larger value among held-out points with the same
prediction, and m in each cell. With few fields, networks that start from both end with a lower loss than those that start from m.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import logit

from geoq.arrays import permutation
from geoq.bounds.fields import Maps, low_rank_maps

Flags: TypeAlias = Bool[np.ndarray, " n n_channels n_cells"]
# Frequencies are at least this and at most 1 minus this. At most this many values of a channel are used.
MIN_FREQUENCY, MAX_CHANNEL_VALUES = 1e-6, 2**19
# Bins of predictions, and the fewest errors of the rarer value in each, so that few errors make no peaks.
N_BINS, MIN_PER_BIN = 64, 8


@dataclass(frozen=True)
class Prior:
    """The logits b m + d of each cell, and the logits a s of each channel at the mean predictions of its bins, if any."""

    offset: Maps
    tables: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def __call__(self, prediction: Float[np.ndarray, " n *output"]) -> np.ndarray:
        at = prediction.reshape(len(prediction), len(self.offset), -1)
        each = [np.interp(at[:, c], *table) for c, table in enumerate(self.tables)]
        return self.offset + (np.stack(each, axis=1) if each else 0)

    @staticmethod
    def fit(larger: Flags, present: Flags, prediction: Any, group: np.ndarray) -> "Prior":
        """Estimate s, m and their coefficients from held-out errors that count; the prior is m if the prediction is None.

        A coefficient is fitted on groups of rows that m was not computed from: on the same rows m would seem too informative.
        """
        from sklearn.linear_model import LogisticRegression  # here: a slow import

        cells = _cell_logits(larger, present)
        if prediction is None:
            return Prior(cells)
        distinct, number = np.unique(group, return_inverse=True)
        half = (permutation(len(distinct)) < len(distinct) / 2)[number]
        other = half if half.all() else ~half
        of_others = [_cell_logits(larger[rows], present[rows]) for rows in (half, other)]
        offsets, tables = [], []
        for c, own in enumerate(cells):
            places = np.flatnonzero(present[:, c])
            if len(places) > MAX_CHANNEL_VALUES:
                places = np.random.default_rng(0).choice(places, MAX_CHANNEL_VALUES)
            row, cell = np.divmod(places, len(own))
            target, at = larger[row, c, cell], prediction.reshape(larger.shape)[row, c, cell]
            value, table = _frequency_table(target, at)
            held_out = np.stack(of_others)[half[row].astype(int), c, cell]
            a, b, d = np.eye(3)[0]
            if target.any() and not target.all():
                columns = np.stack([np.interp(at, value, table), held_out], axis=1)
                model = LogisticRegression(solver="newton-cholesky").fit(columns, target)
                a, b, d = np.append(model.coef_[0], model.intercept_)
            offsets.append(b * own + d)
            tables.append((value, a * table))
        return Prior(np.stack(offsets), tuple(tables))


def _cell_logits(larger: Flags, present: Flags) -> Maps:
    """The map m: logits of the frequencies, approximated with few maps and at most 0."""
    frequency = larger.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    return np.asarray(logit(low_rank_maps(frequency).clip(MIN_FREQUENCY, 0.5)))


def _frequency_table(larger: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean predictions and the logits of bins with equally many errors of the rarer value; a repeated edge is a bin."""
    rarer = np.sort(at[larger == (larger.mean() < 0.5)])
    n_bins = max(1, min(N_BINS, len(rarer) // MIN_PER_BIN))
    edges = rarer[np.arange(1, n_bins) * len(rarer) // n_bins]
    ends, count = np.unique(edges, return_counts=True)
    ends = np.unique(np.concatenate([ends, np.nextafter(ends[count > 1], -np.inf)]))
    bins = np.searchsorted(ends, at)
    n, n_larger, total = (np.bincount(bins, w, len(ends) + 1) for w in (None, larger, at))
    used = n > 0
    return total[used] / n[used], logit((n_larger[used] + 0.5) / (n[used] + 1))
