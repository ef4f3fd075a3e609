"""The methods of the weather benchmark, by the folds that they need.

A method has ``fit(case, kind)``, which returns a function that computes the answer at the test windows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rivals import AnchorError, DeepEnsemble, MCDropout
from benchmarks.rivals.cross_fitted import permuted
from benchmarks.weather import bounds
from benchmarks.weather.bounds import Natural
from benchmarks.weather.case import NO_FOLDS
from geoq import Grid, WholeField, parts
from geoq.bounds.climatology import Climatology, FittedClimatology
from geoq.quantiles import conformal_factor

# Half precision can give several predictions that are equal; states lie between 0 and 1.
LEAST_DEVIATION = 1e-6
PAPER, DEFAULT = "GeoQ (paper, k_a = 1)", "GeoQ (default)"


class Answer(NamedTuple):
    """Prediction and bound of a method at the test windows; optionally safe flags and support scores."""

    prediction: np.ndarray
    error_hat: np.ndarray
    safe: np.ndarray | None = None
    score: np.ndarray | None = None


def numbers(part):
    return part.cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)


@dataclass(frozen=True)
class OnTuples:
    """A bound that is fitted to the held-out forecasts; ``factor`` is a conformal factor for whole fields."""

    make: Callable
    factor: Callable | None = None

    def fit(self, case, kind):
        tuples, factor = case.held_out(kind), 1.0
        if self.factor is not None:
            key = "held-out ratios", kind, self.make
            make = partial(bounds.held_out_ratios, self.make(case), tuples)
            factor = self.factor(case.shared(key, make), QUANTILE)
        key = "on tuples", kind, self.make
        model = case.shared(key, lambda: self.make(case).fit(tuples))

        def answer():
            seen = case.queries(kind)
            return Answer(seen.features.prediction, factor * model.bound(seen))

        return answer


@dataclass(frozen=True)
class OfGeoQ:
    """GeoQ with the given parts."""

    parts: Callable

    def fit(self, case, kind):
        fitted = case.geoq(kind, **self.parts(case))

        def answer():
            a = fitted.assess(case.data.x_test)
            parts = (a.prediction, a.error_hat, a.safe, a.support_score)
            return Answer(*map(numbers, parts))

        answer.trainings = record.trainings(fitted)
        return answer


def anchor_alone(case, number):
    """The anchor error as the bound."""
    chosen = {"representation": parts.identity, "bound_model": AnchorError()}
    return chosen | {"n_anchors": case.settings.n_anchors[number], "domain": Grid(2)}


@dataclass(frozen=True)
class Spread:
    """1.96 standard deviations of several predictions, or a multiple fitted to the held-out forecasts."""

    make: Callable

    def fit(self, case, kind):
        name, (x, y) = self.make.__name__, (case.data.x, case.data.y)
        deployed = case.shared(name, lambda: self.make(case, case.surrogate).fit(x, y))
        if kind == NO_FOLDS:
            return lambda: Answer(*map(numbers, deployed.predict(case.data.x_test)))
        multiple = case.shared((name, kind), lambda: self._multiple(case, kind))

        def answer():
            prediction, deviation = map(numbers, deployed.predict(case.data.x_test))
            return Answer(prediction, multiple * deviation.clip(min=LEAST_DEVIATION))

        return answer

    def _multiple(self, case, kind):
        """Quantile of the ratio of held-out errors to deviations, by lead and channel."""
        x, y, parts = case.data.x, case.data.y, []
        known, surrogates = case.folds(kind)
        for (seen, unseen), surrogate in zip(known.splits, surrogates, strict=True):
            fitted = self.make(case, surrogate).fit(x[seen], y[seen])
            prediction, deviation = map(numbers, fitted.predict(x[unseen]))
            error = abs(numbers(y[unseen]) - prediction)
            parts.append(error / deviation.clip(min=LEAST_DEVIATION))
        return bounds.by_lead_and_channel(np.concatenate(parts))


def dropout(case, surrogate):
    return MCDropout(lambda _x, _y: surrogate, case.settings.n_passes, case.seed)


def ensemble(case, surrogate):
    del surrogate
    return DeepEnsemble(case.recipe, case.settings.n_members, 1000 * (case.seed + 1))


@dataclass(frozen=True)
class PerCellConformal:
    """Split conformal prediction per lead, channel and cell."""

    rows: Callable

    def fit(self, case, kind):
        del kind
        x, y = case.data.x, case.data.y
        training, calibration = self.rows(len(x), case)
        surrogate = case.recipe(x[training], y[training])
        quantiles = bounds.by_cell(numbers((y[calibration] - surrogate(x[calibration])).abs()))

        def answer():
            prediction = numbers(surrogate(case.data.x_test))
            return Answer(prediction, np.broadcast_to(quantiles, prediction.shape))

        return answer


def last_fifth(n_rows, case):
    """The last fifth calibrates; windows with states in common with it are dropped."""
    first = n_rows - round(0.2 * n_rows)
    return np.arange(first - case.settings.gap), np.arange(first, n_rows)


def random_fifth(n_rows, case):
    order, n_calibration = permuted(n_rows, case.seed), round(0.2 * n_rows)
    return order[n_calibration:], order[:n_calibration]


@dataclass(frozen=True)
class Oracle:
    """The quantile of the test errors per lead and channel: the best bound of this form."""

    def fit(self, case, kind):
        del kind
        prediction = numbers(case.surrogate(case.data.x_test))
        quantiles = bounds.by_lead_and_channel(abs(case.truth - prediction))
        return lambda: Answer(prediction, np.broadcast_to(quantiles, prediction.shape))


def paper_form(case, number):
    """The paper's form with the number of anchors ``settings.n_anchors[number]``."""
    settings = case.settings
    training = replace(settings.bound_training, random_state=case.seed)
    weights = tuple(np.linspace(1, 2, settings.n_leads).tolist())
    return {
        "domain": Grid(2),
        "representation": parts.identity,
        "bound_model": parts.NormScaledFieldBound(settings.bound_widths, training, weights),
        "n_anchors": settings.n_anchors[number],
        "safe_region": parts.PaperRegion(),
    }


class AtEveryLead(FittedClimatology):
    """Climatology of each cell around the forecast, at every lead."""

    def __call__(self, states):
        by_lead = states.reshape(len(states), -1, len(self.low))
        return super().__call__(by_lead).reshape(states.shape)


@dataclass(frozen=True)
class AroundForecast(Climatology):
    """The climatology of the states of the training windows."""

    natural: Natural

    def fit(self, outputs, quantile):
        del outputs, quantile
        return AtEveryLead(**vars(self.natural.climatology))


def field_bound(case, *, reference=None, **factor):
    """The default bound for fields, with the seed of the task."""
    learned = parts.FieldFactor(**factor)
    training = replace(learned.training, random_state=case.seed)
    natural = reference and reference(case.natural)
    return parts.FieldBound(replace(learned, training=training), natural)


def default(case, **settings):
    return {"domain": Grid(2), "bound_model": field_bound(case, **settings)}


def without_factor(_case):
    return {"domain": Grid(2), "bound_model": parts.FieldBound(parts.NoFactor())}


def quantile_network(inputs, start):
    def make(case):
        training = replace(case.settings.bound_training, random_state=case.seed)
        return bounds.FieldQuantile(inputs, start, case.settings.bound_widths, training)

    return OnTuples(make)


def static(model, *parts):
    return OnTuples(lambda _: model(*parts))


def whole_field_default(case):
    """The default with two networks instead of five, because it is fitted again without each fold."""
    return bounds.OfLibrary(field_bound(case, n_splits=2))


by_spread, by_default = static(bounds.LeadScale, bounds.cell_spread), OnTuples(whole_field_default)
EXPECTED, NINE_IN_TEN = conformal_factor, WholeField(0.9).factor
NO_FOLD_METHODS = {
    "MC dropout, 1.96 s": Spread(dropout),
    "Deep ensemble, 1.96 s": Spread(ensemble),
    "Split conformal per cell (last fifth, gap)": PerCellConformal(last_fifth),
    "Split conformal per cell (random fifth)": PerCellConformal(random_fifth),
    "Oracle per lead and channel": Oracle(),
}
FOLD_METHODS = {
    "MC dropout, scaled per lead and channel": Spread(dropout),
    "Deep ensemble, scaled per lead and channel": Spread(ensemble),
    "UQNO-style network (x)": quantile_network(bounds.of_input, bounds.by_cell),
    "UQNO-style network (x, prediction)": quantile_network(
        bounds.of_input_and_prediction, bounds.by_cell
    ),
    "U-Net of latitude and cell spread": quantile_network(
        bounds.of_latitude_and_spread, bounds.by_lead_and_channel
    ),
    "kNN-distance conformal per cell": static(bounds.DistanceNormalised),
    "Horizon x climatology": static(bounds.LeadScale, bounds.climatology),
    "Lead scale x cell standard deviation": by_spread,
    "One number per lead and cell": static(bounds.PerLeadAndCell),
    "One number per lead and channel": static(bounds.LeadScale, bounds.one),
    "Cell quantile blended with deviation": static(bounds.Blend),
    "Anchor error alone (k_a = 1)": OfGeoQ(partial(anchor_alone, number=0)),
    "Anchor error alone (k_a = 10)": OfGeoQ(partial(anchor_alone, number=1)),
    PAPER: OfGeoQ(partial(paper_form, number=0)),
    "GeoQ (paper, k_a = 10)": OfGeoQ(partial(paper_form, number=1)),
}
BLOCK_METHODS = {
    DEFAULT: OfGeoQ(default),
    "GeoQ (default, no factor)": OfGeoQ(without_factor),
    "GeoQ (default, climatology)": OfGeoQ(partial(default, reference=AroundForecast)),
}
WHOLE_FIELD_METHODS = {
    f"{name} {form})": replace(method, factor=factor)
    for name, method in (
        ("Lead scale x cell standard deviation (whole field,", by_spread),
        ("GeoQ (default, two networks; whole field,", by_default),
    )
    for form, factor in (("expected fraction", EXPECTED), ("9 in 10", NINE_IN_TEN))
}
METHODS = {
    NO_FOLDS: NO_FOLD_METHODS,
    "blocks": BLOCK_METHODS | FOLD_METHODS | WHOLE_FIELD_METHODS,
    "clusters": FOLD_METHODS,
}
# Methods in the pictures.
SHOWN = (
    "MC dropout, scaled per lead and channel",
    "Horizon x climatology",
    "Lead scale x cell standard deviation",
    PAPER,
    DEFAULT,
)
