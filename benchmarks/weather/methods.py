"""The methods of the weather benchmark, by the folds that they need.

A method has ``fit(case, kind)``, which returns a function that computes the answer at the test windows. To add one, add a line to the
dictionaries at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rivals.cross_fitted import NoIncrement
from benchmarks.weather import bounds
from benchmarks.weather.activity import Activity
from benchmarks.weather.bounds import Natural
from benchmarks.weather.case import NO_FOLDS
from geoq import (
    FieldIncrement,
    FieldScaleIncrement,
    Grid,
    SafeRegion,
    TwoLawIncrement,
    WholeField,
    identity,
)
from geoq.baselines import DeepEnsemble, MCDropout
from geoq.baselines.conformal import conformal_quantile
from geoq.conformal import POINTWISE
from geoq.increments import FieldFactor
from geoq.increments.factor import NoFactor

# Half precision can give several predictions that are equal; states lie between 0 and 1.
LEAST_DEVIATION = 1e-6
PAPER = "GeoQ (paper, k_a = 1)"


class Answer(NamedTuple):
    """Prediction and bound of a method at the test windows; optionally safe flags and support scores."""

    prediction: torch.Tensor
    error_hat: torch.Tensor
    safe: torch.Tensor | None = None
    score: torch.Tensor | None = None


@dataclass(frozen=True)
class OnTuples:
    """A bound that is fitted to the held-out forecasts; ``factor`` is a conformal factor for whole fields."""

    make: Callable
    factor: Callable | None = None

    def fit(self, case, kind):
        tuples = case.tuples(kind)

        def held_out():
            return bounds.held_out_ratios(self.make(case), tuples)

        factor = 1.0
        if self.factor is not None:
            key = "held-out ratios", kind, self.make
            factor = self.factor(case.shared(key, held_out), QUANTILE)
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
        fitted = case.geoq(kind, **self.parts(case)).fit(case.data.x, case.data.y)

        def answer():
            a = fitted.assess(case.data.x_test)
            score = a.support_score / a.threshold
            return Answer(a.prediction, a.error_hat, a.safe, score)

        answer.trainings = record.trainings(fitted)
        return answer


@dataclass(frozen=True)
class AnchorAlone:
    """The anchor error as the bound."""

    number: int

    def fit(self, case, kind):
        parts = {
            "representation": identity,
            "increment_model": NoIncrement(),
            "n_anchors": case.settings.n_anchors[self.number],
        }
        return OfGeoQ(lambda _: parts).fit(case, kind)


@dataclass(frozen=True)
class Spread:
    """1.96 standard deviations of several predictions, or a multiple fitted to the held-out forecasts."""

    make: Callable

    def fit(self, case, kind):
        name = self.make.__name__
        x, y = case.data.x, case.data.y
        deployed = case.shared(
            name, lambda: self.make(case, case.surrogate, case.task.seed).fit(x, y)
        )
        if kind == NO_FOLDS:
            return lambda: Answer(*deployed.predict(case.data.x_test))
        multiple = case.shared((name, kind), lambda: self._multiple(case, kind))

        def answer():
            prediction, deviation = deployed.predict(case.data.x_test)
            return Answer(prediction, multiple * deviation.clamp(min=LEAST_DEVIATION))

        return answer

    def _multiple(self, case, kind):
        """Quantile of the ratio of held-out errors to deviations, by lead and channel."""
        x, y, parts = case.data.x, case.data.y, []
        known, surrogates = case.folds(kind)
        for (seen, unseen), surrogate in zip(known.splits, surrogates, strict=True):
            method = self.make(case, surrogate, case.task.seed).fit(x[seen], y[seen])
            prediction, deviation = method.predict(x[unseen])
            error = (y[unseen] - prediction).abs()
            parts.append(error / deviation.clamp(min=LEAST_DEVIATION))
        return bounds.by_lead_and_channel(torch.cat(parts))


def dropout(case, surrogate, seed):
    return MCDropout(
        lambda _x, _y: surrogate, n_passes=case.settings.n_passes, random_state=seed
    )


def ensemble(case, surrogate, seed):
    del surrogate
    n_members = case.settings.n_members
    return DeepEnsemble(case.recipe, n_members, random_state=1000 * (seed + 1))


@dataclass(frozen=True)
class PerCellConformal:
    """Split conformal prediction per lead, channel and cell."""

    rows: Callable

    def fit(self, case, kind):
        del kind
        x, y = case.data.x, case.data.y
        training, calibration = self.rows(len(x), case)
        surrogate = case.recipe(x[training], y[training])
        residual = (y[calibration] - surrogate(x[calibration])).abs()
        quantiles = conformal_quantile(residual, QUANTILE)

        def answer():
            prediction = surrogate(case.data.x_test)
            return Answer(prediction, quantiles.expand_as(prediction))

        return answer


def last_fifth(n_rows, case):
    """The last fifth calibrates; windows with states in common with it are dropped."""
    first = n_rows - round(0.2 * n_rows)
    return torch.arange(first - case.settings.gap), torch.arange(first, n_rows)


def random_fifth(n_rows, case):
    generator = torch.Generator().manual_seed(case.task.seed)
    order = torch.randperm(n_rows, generator=generator)
    n_calibration = round(0.2 * n_rows)
    return order[n_calibration:], order[:n_calibration]


@dataclass(frozen=True)
class Oracle:
    """The quantile of the test errors per lead and channel: the best bound of this form."""

    def fit(self, case, kind):
        del kind
        prediction = case.surrogate(case.data.x_test)
        quantiles = bounds.by_lead_and_channel((case.data.y_test - prediction).abs())
        return lambda: Answer(prediction, quantiles.expand_as(prediction))


def field_increment(case, number):
    """The paper's form with the number of anchors ``settings.n_anchors[number]``."""
    settings = case.settings
    training = replace(settings.bound_training, random_state=case.task.seed)
    model = FieldIncrement(
        QUANTILE,
        widths=settings.bound_widths,
        training=training,
        weights=tuple(torch.linspace(1, 2, settings.n_leads).tolist()),
    )
    return {
        "representation": identity,
        "increment_model": model,
        "n_anchors": settings.n_anchors[number],
        "safe_region": SafeRegion(),
    }


@dataclass(frozen=True)
class AroundForecast:
    """Climatology of each cell around the forecast, at every lead."""

    natural: Natural
    shape: tuple[int, ...]

    def fit(self, outputs, quantile):
        del outputs, quantile
        return self

    def __call__(self, flat):
        return self.natural.around(flat.reshape(-1, *self.shape)).flatten(1)


@dataclass(frozen=True)
class CellDeviation:
    """Standard deviation of each cell, independent of the forecast."""

    natural: Natural
    shape: tuple[int, ...]

    def fit(self, outputs, quantile):
        del outputs, quantile
        return self

    def __call__(self, flat):
        spread = self.natural.spread.to(flat).expand(self.shape)
        return spread.flatten().expand_as(flat)


def of_default(case, *, reference=None, **factor):
    """The default increment model for fields, with the seed of the task."""
    shape = case.data.y.shape[1:]
    learned = FieldFactor(**factor)
    training = replace(learned.training, random_state=case.task.seed)
    return FieldScaleIncrement(
        QUANTILE,
        domain=Grid(2),
        reference=reference and reference(case.natural, shape),
        factor=replace(learned, training=training),
    )


def default_parts(case, *, increment_model):
    return {"increment_model": increment_model(case)}


def without_factor(case):
    return replace(of_default(case), factor=NoFactor())


def law_of_cells(case):
    """The default increment model for tables; each cell is a separate coordinate."""
    reference = AroundForecast(case.natural, case.data.y.shape[1:])
    return TwoLawIncrement(QUANTILE, reference=reference)


def quantile_network(inputs, start):
    def make(case):
        training = replace(case.settings.bound_training, random_state=case.task.seed)
        widths = case.settings.bound_widths
        return bounds.FieldQuantile(inputs, start, widths, training)

    return OnTuples(make)


def static(model, *parts):
    return OnTuples(lambda _: model(*parts))


def active(model, *parts):
    return OnTuples(lambda _: Activity(model(*parts)))


by_spread = static(bounds.LeadScale, bounds.cell_spread)


def whole_field_default(case):
    """The default with two networks instead of five, because it is fitted again without each fold."""
    return bounds.Increment(of_default(case, n_splits=2))


by_default = OnTuples(whole_field_default)
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
    "One number per lead and cell x activity": active(bounds.PerLeadAndCell),
    "Lead scale x cell standard deviation x activity": active(
        bounds.LeadScale, bounds.cell_spread
    ),
    "Cell quantile blended with deviation x activity": active(bounds.Blend),
    "Anchor error alone (k_a = 1)": AnchorAlone(0),
    "Anchor error alone (k_a = 10)": AnchorAlone(1),
    PAPER: OfGeoQ(partial(field_increment, number=0)),
    "GeoQ (paper, k_a = 10)": OfGeoQ(partial(field_increment, number=1)),
}
BLOCK_METHODS = {
    "GeoQ (default)": OfGeoQ(partial(default_parts, increment_model=of_default)),
    "GeoQ (default, no factor)": OfGeoQ(
        partial(default_parts, increment_model=without_factor)
    ),
    "GeoQ (default, cell deviation)": OfGeoQ(
        partial(
            default_parts, increment_model=partial(of_default, reference=CellDeviation)
        )
    ),
    "GeoQ (default, climatology)": OfGeoQ(
        partial(
            default_parts, increment_model=partial(of_default, reference=AroundForecast)
        )
    ),
    "GeoQ (each cell for itself, climatology)": OfGeoQ(
        partial(default_parts, increment_model=law_of_cells)
    ),
}
WHOLE_FIELD_METHODS = {
    "Lead scale x cell standard deviation (whole field, expected fraction)": replace(
        by_spread, factor=POINTWISE.factor
    ),
    "Lead scale x cell standard deviation (whole field, 9 in 10)": replace(
        by_spread, factor=WholeField(0.9).factor
    ),
    "GeoQ (default, two networks; whole field, expected fraction)": replace(
        by_default, factor=POINTWISE.factor
    ),
    "GeoQ (default, two networks; whole field, 9 in 10)": replace(
        by_default, factor=WholeField(0.9).factor
    ),
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
    "GeoQ (default)",
)
