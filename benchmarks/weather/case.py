"""One surrogate of the weather benchmark, its folds and its held-out forecasts, computed once for all methods."""

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.record import Memo
from benchmarks.rivals.cross_fitted import CrossFitted, NoIncrement
from benchmarks.weather.bounds import KnownFolds, Natural, Seen, Tuples
from benchmarks.weather.data import Split, split
from benchmarks.weather.forecast import FORMS, TrainForecast, chosen_steps
from geoq import ClusterFolds, GeoQ, TemporalFolds, Training
from geoq.representation import Standardization
from geoq.training.fold_surrogates import TrainedFolds

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
        default_factory=lambda: Training(
            n_steps=400, batch_size=16, check_every=50, patience=3
        )
    )
    n_origins: int = 3

    @property
    def gap(self):
        """Distance in time steps at which two windows have no state in common."""
        return self.n_past + self.n_leads - 1


SMALL = Settings(
    n_leads=8,
    widths=(4, 8, 8),
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


class Task(NamedTuple):
    """Form, origin and seed of one surrogate."""

    form: str
    origin: int
    seed: int

    @property
    def name(self):
        return f"{self.form}-{self.origin}-{self.seed}"


@dataclass
class Case:
    """The data, the surrogate and the folds of one task."""

    task: Task
    data: Split
    latitude: torch.Tensor
    settings: Settings
    shared: Memo = field(default_factory=Memo)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        x, y, settings = self.data.x, self.data.y, self.settings
        recipe = TrainForecast(
            FORMS[self.task.form],
            settings.most_steps,
            self.task.seed,
            settings.widths,
        )
        n_steps, self.choosing_seconds = self.shared.timed(
            lambda: chosen_steps(
                recipe,
                x,
                y,
                gap=settings.n_leads,
                check_every=settings.check_every,
                patience=settings.patience,
            )
        )
        self.recipe = replace(recipe, n_steps=n_steps)
        self.surrogate, self.training_seconds = self.shared.timed(
            lambda: self.recipe(x, y)
        )
        self.natural = Natural.fit(self.data.states)

    def folds(self, kind):
        """The splits of one kind and their surrogates."""
        return self.shared(("folds", kind), lambda: self._train_folds(kind))

    def _train_folds(self, kind):
        x, y, n_folds = self.data.x, self.data.y, self.settings.n_folds
        points = Standardization.fit(x)(x).flatten(1).cpu().numpy()
        gap = self.settings.gap if kind == "blocks" else 0
        scheme = {
            "clusters": ClusterFolds(n_folds, random_state=self.task.seed),
            "blocks": TemporalFolds(n_folds, gap=gap),
        }[kind]
        known = KnownFolds(kind, [*scheme.split(points)], gap)
        return known, [self.recipe(x[seen], y[seen]) for seen, _ in known.splits]

    def geoq(self, kind, **parts):
        known, surrogates = self.folds(kind)
        folds = TrainedFolds(surrogates)
        return GeoQ(self.surrogate, folds, folds=known, **parts)

    def cross_fitted(self, kind):
        def make():
            plain = self.geoq(kind, increment_model=NoIncrement())
            return CrossFitted.fit(plain, self.data.x, self.data.y, None)

        return self.shared(("cross-fitted", kind), make)

    def tuples(self, kind):
        """Held-out forecasts; their climatology uses the training states of their fold only."""
        return self.shared(("tuples", kind), lambda: self._tuples(kind))

    def _tuples(self, kind):
        calibration = self.cross_fitted(kind).calibration
        prediction = calibration.features.prediction
        around = torch.empty_like(prediction)
        mean, spread = (torch.empty_like(prediction[:, 0]) for _ in range(2))
        for number, (seen, _) in enumerate(self.folds(kind)[0].splits):
            natural = Natural.fit(self.data.states[self._states(seen)])
            mine = calibration.fold == number
            around[mine] = natural.around(prediction[mine])
            mean[mine], spread[mine] = natural.mean, natural.spread
        seen = Seen(calibration.features, around, mean, spread, self.latitude)
        return Tuples(seen, calibration)

    def _states(self, rows):
        """Time steps of all states in the windows of these rows."""
        reach = np.arange(-self.settings.n_past, self.settings.n_leads)
        return np.unique(self.data.first.numpy()[rows][:, None] + reach)

    def queries(self, kind):
        """The test windows, with the same features as the held-out forecasts."""

        def make():
            features = self.cross_fitted(kind).view(self.data.x_test)
            around = self.natural.around(features.prediction)
            mean, spread = (
                part.expand(len(features), -1, -1, -1)
                for part in (self.natural.mean, self.natural.spread)
            )
            return Seen(features, around, mean, spread, self.latitude)

        return self.shared(("queries", kind), make)


def make_case(task, weather, settings):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = split(weather.values, task.origin, settings.n_past, settings.n_leads)
    on_device = {
        name: getattr(data, name).to(device)
        for name in ("x", "y", "x_test", "y_test", "states")
    }
    latitude = torch.as_tensor(weather.lat.astype(np.float32), device=device)
    return Case(task, replace(data, **on_device), latitude, settings)
