"""One surrogate of the weather benchmark, its folds and its held-out forecasts, computed once for all methods."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.rivals import AnchorError
from benchmarks.timing import Memo
from benchmarks.weather.bounds import HeldOut, KnownFolds, Natural, Seen
from benchmarks.weather.data import Split, split
from benchmarks.weather.forecast import FORMS, TrainForecast, chosen_steps
from geoq import ClusterFolds, GeoQ, TemporalFolds, TrainedFolds, Training
from geoq.data.coordinates import spread

KINDS = ("clusters", "blocks")
NO_FOLDS = "no folds"


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are the paper's."""

    n_past: int = 3
    n_leads: int = 40
    widths: tuple[int, ...] = (32, 64, 128, 256)
    most_steps: int = 400
    check_every: int = 20
    patience: int = 6
    n_folds: int = 5
    n_members: int = 5
    n_passes: int = 20
    n_anchors: tuple[int, ...] = (1, 10)
    bound_widths: tuple[int, ...] = (32, 64, 128)
    bound_training: Training = field(
        default_factory=lambda: Training(n_steps=400, batch_size=16, check_every=50, patience=3)
    )
    n_origins: int = 3

    @property
    def gap(self):
        """Distance in time steps at which two windows have no state in common."""
        return self.n_past + self.n_leads - 1


SMALL = Settings(
    n_leads=8,
    widths=(4, 8),
    most_steps=4,
    n_folds=3,
    check_every=2,
    n_members=2,
    n_passes=3,
    n_anchors=(1, 3),
    bound_widths=(4, 8),
    bound_training=Training(n_steps=4, batch_size=16, check_every=2),
    n_origins=1,
)


@dataclass
class Case:
    """The data, the surrogate and the folds of one form, origin and seed."""

    form: str
    origin: int
    seed: int
    data: Split
    latitude: np.ndarray
    settings: Settings
    shared: Memo = field(default_factory=Memo)

    @staticmethod
    def of(form, origin, seed, weather, settings):
        data = split(weather.values, origin, settings.n_past, settings.n_leads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        names = ("x", "y", "x_test", "y_test")
        data = replace(data, **{name: getattr(data, name).to(device) for name in names})
        return Case(form, origin, seed, data, weather.lat.astype(np.float32), settings)

    def __post_init__(self):
        x, y, settings = self.data.x, self.data.y, self.settings
        recipe = TrainForecast(FORMS[self.form], settings.most_steps, self.seed, settings.widths)
        stop = {"check_every": settings.check_every, "patience": settings.patience}
        n_steps, self.choosing_seconds = self.shared.timed(
            lambda: chosen_steps(recipe, x, y, gap=settings.n_leads, **stop)
        )
        self.recipe = replace(recipe, n_steps=n_steps)
        self.surrogate, self.training_seconds = self.shared.timed(lambda: self.recipe(x, y))
        self.natural = Natural.fit(self.data.states.numpy())
        self.truth = self.data.y_test.cpu().numpy()

    def folds(self, kind):
        """The splits of one kind and their surrogates."""
        return self.shared(("folds", kind), lambda: self._train_folds(kind))

    def _train_folds(self, kind):
        x, y, n_folds = self.data.x, self.data.y, self.settings.n_folds
        flat = x.flatten(1).cpu().numpy()
        mean, scale = spread(flat)
        gap = self.settings.gap if kind == "blocks" else 0
        clusters = ClusterFolds(n_folds, random_state=self.seed)
        scheme = TemporalFolds(n_folds, gap=gap) if kind == "blocks" else clusters
        known = KnownFolds(kind, [*scheme.split((flat - mean) / scale)], gap)
        return known, [self.recipe(x[seen], y[seen]) for seen, _ in known.splits]

    def geoq(self, kind, **parts):
        """A fitted GeoQ on the folds of one kind."""
        known, surrogates = self.folds(kind)
        geoq = GeoQ(self.surrogate, TrainedFolds(surrogates), folds=known, **parts)
        return geoq.fit(self.data.x, self.data.y, progress=None)

    def plain(self, kind):
        """The calibration without a bound, for the other bounds."""

        def make():
            return self.geoq(kind, bound_model=AnchorError()).fitted_

        return self.shared(("plain", kind), make)

    def held_out(self, kind):
        """Held-out forecasts; their climatology uses the training states of their fold only."""

        def make():
            tuples = self.plain(kind).tuples
            features, error = tuples.features, tuples.error
            around, deviation = np.empty_like(error), np.empty_like(error[:, 0])
            for number, (seen, _) in enumerate(self.folds(kind)[0].splits):
                natural = Natural.fit(self.data.states.numpy()[self._states(seen)])
                mine = tuples.fold == number
                around[mine] = natural.around(features.prediction[mine])
                deviation[mine] = natural.spread
            return HeldOut(Seen(features, around, deviation, self.latitude), tuples, error)

        return self.shared(("held out", kind), make)

    def _states(self, rows):
        """Time steps of all states in the windows of these rows."""
        reach = np.arange(-self.settings.n_past, self.settings.n_leads)
        return np.unique(self.data.first.numpy()[rows][:, None] + reach)

    def queries(self, kind):
        """The test windows, with the same features as the held-out forecasts."""

        def make():
            fitted = self.plain(kind)
            ((_, features, *_),) = fitted.views(fitted.rows_of(self.data.x_test))
            around = self.natural.around(features.prediction)
            deviation = np.repeat(self.natural.spread[None], len(around), axis=0)
            return Seen(features, around, deviation, self.latitude)

        return self.shared(("queries", kind), make)
