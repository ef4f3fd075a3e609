"""The paper's third problem: error fields for ten-day forecasts of the whole globe, on reanalysis data.

    python benchmarks/weatherbench.py --data DIR --jobs 9              # 2 forms, 3 origins, 3 seeds, all methods
    python benchmarks/weatherbench.py --data DIR --information         # which features know a bad day
    python benchmarks/weatherbench.py --data DIR --small               # short trainings: within a minute

A U-Net learns windows of 3 past and 40 future states, 6 hours apart, and forecasts the days after an origin; three
origins, one horizon apart. The paper scores one window. The forecast is the paper's (``direct``) or a correction of
damped persistence (``anomalies``).

Neighbouring windows share nearly all targets. ``clusters`` are the paper's folds and share targets between training and
held-out windows, ``blocks`` are five stretches of time with a gap on either side and share none.

Each task (form, origin, seed) is kept in a file of its own as soon as it is done; a rerun measures only what is missing.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import record
import torch
import weather_bounds as bounds
import weather_information
from forecast import FORMS, TrainForecast, chosen_steps
from joblib import Parallel, delayed
from record import QUANTILE
from threadpoolctl import threadpool_limits
from weather_bounds import KnownFolds, Natural, Seen, Tuples
from weather_data import DAYS, STAND_IN, Split, load, origins, split
from weather_scores import scores, skill, window_correlation

import geoq
from geoq import (
    ClusterFolds,
    DistanceRegion,
    FieldIncrement,
    GeoQ,
    PowerLawIncrement,
    SafeRegion,
    TemporalFolds,
    Training,
    identity,
)
from geoq.baselines import DeepEnsemble, MCDropout
from geoq.baselines.conformal import conformal_quantile
from geoq.baselines.cross_fitted import CrossFitted, NoIncrement
from geoq.fold_surrogates import TrainedFolds
from geoq.metrics import relative_l2
from geoq.representation import Standardization

SEEDS = 3
KINDS = ("clusters", "blocks")
NO_FOLDS = "no folds"


@dataclass(frozen=True)
class Settings:
    """How much of everything: the paper's numbers, or few for a small run."""

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
    # Every pair of the power law's grid sorts all held-out values, tens of millions: all 66 would take minutes.
    exponents: tuple[float, ...] = (0.0, 1.0)
    anchor_weights: tuple[float, ...] = (0.0,)
    # And so do five more fits, for whole fields.
    every: int = 4
    every_whole_field: int = 8
    n_origins: int = 3

    @property
    def gap(self):
        """Windows so far apart share no state."""
        return self.n_past + self.n_leads - 1


SMALL = Settings(
    n_leads=8,
    widths=(4, 8, 8),
    most_steps=4,
    n_folds=3,
    check_every=2,
    n_members=2,
    n_passes=3,
    every=1,
    every_whole_field=2,
    n_anchors=(1, 3),
    bound_widths=(4, 8),
    bound_training=Training(n_steps=4, batch_size=16, check_every=2),
    n_origins=1,
)


class Task(NamedTuple):
    """One surrogate with all its bounds."""

    form: str
    origin: int
    seed: int

    @property
    def name(self):
        return f"{self.form}-{self.origin}-{self.seed}"


class Answer(NamedTuple):
    """A method's prediction and bound at the test windows, and which of them it calls safe."""

    prediction: torch.Tensor
    error_hat: torch.Tensor
    safe: torch.Tensor | None = None
    score: torch.Tensor | None = None


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Shared:
    """Work that several methods need; each is charged for it as if it had done it alone."""

    known: dict = field(default_factory=dict)
    saved: float = 0.0

    def __call__(self, key, make):
        if key in self.known:
            self.saved += self.known[key][1]
        else:
            saved, started = self.saved, now()
            made = make()
            self.known[key] = made, now() - started + self.saved - saved
        return self.known[key][0]

    def timed(self, work):
        saved, started = self.saved, now()
        result = work()
        return result, now() - started + self.saved - saved


@dataclass
class Case:
    """The data, the surrogate and the folds of one task."""

    task: Task
    data: Split
    latitude: torch.Tensor
    settings: Settings
    shared: Shared = field(default_factory=Shared)
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
        """Held-out forecasts with all that was known of them: of the fold's own training states alone."""
        return self.shared(("tuples", kind), lambda: self._tuples(kind))

    def _tuples(self, kind):
        calibration = self.cross_fitted(kind).calibration
        prediction = calibration.features.prediction
        around = torch.empty_like(prediction)
        spread = torch.empty_like(prediction[:, 0])
        for number, (seen, _) in enumerate(self.folds(kind)[0].splits):
            natural = Natural.fit(self.data.states[self._states(seen)])
            mine = calibration.fold == number
            around[mine] = natural.around(prediction[mine])
            spread[mine] = natural.spread
        seen = Seen(calibration.features, around, spread, self.latitude)
        return Tuples(seen, calibration)

    def _states(self, rows):
        """Time steps of all states of the windows in these rows."""
        reach = np.arange(-self.settings.n_past, self.settings.n_leads)
        return np.unique(self.data.first.numpy()[rows][:, None] + reach)

    def queries(self, kind):
        """The test windows, as the tuples see theirs."""

        def make():
            features = self.cross_fitted(kind).view(self.data.x_test)
            around = self.natural.around(features.prediction)
            spread = self.natural.spread.expand(len(features), -1, -1, -1)
            return Seen(features, around, spread, self.latitude)

        return self.shared(("queries", kind), make)


# Methods: fit(case, kind) returns a function that answers the test windows.


@dataclass(frozen=True)
class OnTuples:
    """A bound that is read off the held-out forecasts; ``factor``, for whole fields, reads one more number off them."""

    make: Callable
    factor: Callable | None = None

    def fit(self, case, kind):
        tuples = case.tuples(kind)

        def held_out():
            return bounds.held_out_ratios(self.make(case), tuples)

        factor = 1.0
        if self.factor is not None:
            key = "held-out ratios", kind, self.make
            factor = self.factor(case.shared(key, held_out))
        key = "on tuples", kind, self.make
        model = case.shared(key, lambda: self.make(case).fit(tuples))

        def answer():
            seen = case.queries(kind)
            return Answer(seen.features.prediction, factor * model.bound(seen))

        return answer


@dataclass(frozen=True)
class OfGeoQ:
    """GeoQ itself, of the parts given."""

    parts: Callable

    def fit(self, case, kind):
        fitted = case.geoq(kind, **self.parts(case)).fit(case.data.x, case.data.y)

        def answer():
            a = fitted.assess(case.data.x_test)
            score = a.support_score / a.threshold
            return Answer(a.prediction, a.error_hat, a.safe, score)

        return answer


@dataclass(frozen=True)
class AnchorAlone:
    """The anchors' error as the bound."""

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
    """1.96 standard deviations of several predictions, or as many as the held-out forecasts need."""

    make: Callable

    def fit(self, case, kind):
        name = self.make.__name__
        x, y = case.data.x, case.data.y
        deployed = case.shared(
            name, lambda: self.make(case, case.surrogate, case.task.seed).fit(x, y)
        )
        if kind == NO_FOLDS:
            return lambda: Answer(*deployed.predict(case.data.x_test))
        level = case.shared((name, kind), lambda: self._level(case, kind))

        def answer():
            prediction, deviation = deployed.predict(case.data.x_test)
            return Answer(prediction, level * deviation)

        return answer

    def _level(self, case, kind):
        """By lead and channel, the ratio of held-out errors to their deviations."""
        x, y, parts = case.data.x, case.data.y, []
        known, surrogates = case.folds(kind)
        for (seen, unseen), surrogate in zip(known.splits, surrogates, strict=True):
            method = self.make(case, surrogate, case.task.seed).fit(x[seen], y[seen])
            prediction, deviation = method.predict(x[unseen])
            parts.append((y[unseen] - prediction).abs() / deviation)
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
    """Split conformal per lead, channel and cell: a surrogate of fewer windows, and the residuals of the others."""

    rows: Callable

    def fit(self, case, kind):
        del kind
        x, y = case.data.x, case.data.y
        training, calibration = self.rows(len(x), case)
        surrogate = case.recipe(x[training], y[training])
        residual = (y[calibration] - surrogate(x[calibration])).abs()
        level = conformal_quantile(residual, QUANTILE)

        def answer():
            prediction = surrogate(case.data.x_test)
            return Answer(prediction, level.expand_as(prediction))

        return answer


def last_fifth(n_rows, case):
    """The last fifth calibrates; windows that share states with it are dropped."""
    first = n_rows - round(0.2 * n_rows)
    return torch.arange(first - case.settings.gap), torch.arange(first, n_rows)


def random_fifth(n_rows, case):
    generator = torch.Generator().manual_seed(case.task.seed)
    order = torch.randperm(n_rows, generator=generator)
    n_calibration = round(0.2 * n_rows)
    return order[n_calibration:], order[:n_calibration]


@dataclass(frozen=True)
class Oracle:
    """Fits the test errors themselves: the best that one number per lead and channel can do."""

    def fit(self, case, kind):
        del kind
        prediction = case.surrogate(case.data.x_test)
        level = bounds.by_lead_and_channel((case.data.y_test - prediction).abs())
        return lambda: Answer(prediction, level.expand_as(prediction))


def field_increment(case, number):
    """The paper's form, with so many anchors."""
    settings = case.settings
    training = replace(settings.bound_training, random_state=case.task.seed)
    model = FieldIncrement(QUANTILE, widths=settings.bound_widths, training=training)
    return {
        "representation": identity,
        "increment_model": model,
        "n_anchors": settings.n_anchors[number],
        "safe_region": SafeRegion,
    }


def power_law(case, *, reference, every):
    settings = case.settings
    law = PowerLawIncrement(
        QUANTILE,
        exponents=settings.exponents,
        anchor_weights=settings.anchor_weights,
        reference=AroundForecast(case.natural, case.data.y.shape[1:])
        if reference
        else None,
    )
    return bounds.SomeWindows(law, every)


@dataclass(frozen=True)
class AroundForecast:
    """The climatology of a cell, at every lead."""

    natural: Natural
    shape: tuple[int, ...]

    def __call__(self, flat):
        return self.natural.around(flat.reshape(-1, *self.shape)).flatten(1)


def default_parts(case, *, reference):
    model = power_law(case, reference=reference, every=case.settings.every)
    return {"increment_model": model, "safe_region": DistanceRegion}


def quantile_network(inputs, level):
    def make(case):
        training = replace(case.settings.bound_training, random_state=case.task.seed)
        widths = case.settings.bound_widths
        return bounds.FieldQuantile(inputs, level, widths, training)

    return OnTuples(make)


def static(model, *parts):
    return OnTuples(lambda _: model(*parts))


by_spread = static(bounds.LeadScale, bounds.cell_spread)


def whole_field_default(case):
    every = case.settings.every_whole_field
    return bounds.Increment(power_law(case, reference=True, every=every))


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
    "Anchor error alone (k_a = 1)": AnchorAlone(0),
    "Anchor error alone (k_a = 10)": AnchorAlone(1),
    "GeoQ (paper, k_a = 1)": OfGeoQ(partial(field_increment, number=0)),
    "GeoQ (paper, k_a = 10)": OfGeoQ(partial(field_increment, number=1)),
}
BLOCK_METHODS = {
    "GeoQ (power law)": OfGeoQ(partial(default_parts, reference=False)),
    "GeoQ (power law, climatology)": OfGeoQ(partial(default_parts, reference=True)),
    "Lead scale x cell standard deviation (whole field, expected share)": replace(
        by_spread, factor=bounds.expected_share
    ),
    "Lead scale x cell standard deviation (whole field, 9 in 10)": replace(
        by_spread, factor=bounds.nine_in_ten
    ),
    "GeoQ (power law, climatology; whole field, expected share)": replace(
        by_default, factor=bounds.expected_share
    ),
    "GeoQ (power law, climatology; whole field, 9 in 10)": replace(
        by_default, factor=bounds.nine_in_ten
    ),
}
METHODS = {
    NO_FOLDS: NO_FOLD_METHODS,
    "clusters": FOLD_METHODS,
    "blocks": FOLD_METHODS | BLOCK_METHODS,
}
# Drawn, and kept for it.
SHOWN = (
    "Deep ensemble, scaled per lead and channel",
    "Horizon x climatology",
    "Lead scale x cell standard deviation",
    "GeoQ (paper, k_a = 10)",
    "GeoQ (power law, climatology)",
)


# One task.


def make_case(task, weather, settings):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = split(weather.values, task.origin, settings.n_past, settings.n_leads)
    on_device = {
        name: getattr(data, name).to(device)
        for name in ("x", "y", "x_test", "y_test", "states")
    }
    latitude = torch.as_tensor(weather.lat.astype(np.float32), device=device)
    return Case(task, replace(data, **on_device), latitude, settings)


def begin(task, plan):
    weather = plan.weather()
    case = make_case(task, weather, plan.settings)
    print(
        f"{task.name}: {case.recipe.n_steps} steps, chosen in {case.choosing_seconds:.1f} s, trained in "
        f"{case.training_seconds:.2f} s",
        flush=True,
    )
    return case, weather


def run(task, plan):
    """The methods of a task that its file does not have yet; the file grows by each of them."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with threadpool_limits(1):
        case, weather = begin(task, plan)
        missing, rows, shown = plan.missing(task), plan.rows(task), {}
        head = {"surrogate": describe(case), "leaks": leaks(case)}
        print(
            f"{task.name}: folds by {time.perf_counter() - started:.0f} s", flush=True
        )
        for kind, method in missing:
            line, answer = measure(case, kind, method)
            rows.append(line)
            plan.write(task, head, rows)
            if kind == "blocks" and method in SHOWN:
                shown[method] = answer
        if task.seed == 0 and set(SHOWN) <= shown.keys():
            file = plan.part(task).with_suffix(".npz")
            np.savez_compressed(file, **to_draw(case, weather, shown))
    print(f"{task.name}: {time.perf_counter() - started:.0f} s in all", flush=True)


def inform(task, plan):
    """The information study of a task."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return weather_information.study(begin(task, plan)[0])


def measure(case, kind, name):
    """One row, and the answer itself."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    task, y = case.task, case.data.y_test
    fit = METHODS[kind][name].fit
    answer, fit_seconds = case.shared.timed(lambda: fit(case, kind))
    result, asking = case.shared.timed(answer)
    inside = (
        torch.ones(len(y), dtype=torch.bool) if result.safe is None else result.safe
    )
    line = record.row(
        name,
        setting=f"{task.form}, {kind}",
        seed=task.seed,
        y=y,
        prediction=result.prediction,
        error_hat=result.error_hat,
        safe=inside.cpu().numpy(),
        train_seconds=fit_seconds,
        inference_seconds=asking,
    )
    if result.safe is None:
        line |= {key: None for key in line if key.startswith("safe_")}
    error = (y - result.prediction).abs()
    line |= scores(error, result.error_hat, case.latitude, QUANTILE)
    line |= {
        "form": task.form,
        "folds": kind,
        "origin": task.origin,
        "calibration_over_training": fit_seconds / case.training_seconds,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30
        if torch.cuda.is_available()
        else None,
    }
    by_quarter = " ".join(f"{line[f'coverage_q{q}']:.3f}" for q in range(1, 5))
    print(
        f"{task.name} {kind:8s} {name:66s} pinball {1000 * line['pinball']:7.3f}e-3  correlation "
        f"{line['correlation']:.3f}  which day {line['which_day']:+.3f}  coverage {line['coverage']:.3f} ({by_quarter})  "
        f"{fit_seconds:.1f} s, {asking:.1f} s; at {time.perf_counter() - case.started:.0f} s",
        flush=True,
    )
    return line, result


def describe(case):
    """Is the surrogate any good?"""
    data = case.data
    prediction = case.surrogate(data.x_test)
    cell_mean = data.states.mean(dim=0).expand_as(prediction)
    references = {
        "persistence": data.x_test[:, -1:].expand_as(prediction),
        "climatology": cell_mean,
    }
    line = {
        **case.task._asdict(),
        "n_steps": case.recipe.n_steps,
        "n_train": len(data.x),
        "n_test": len(data.x_test),
        "training_seconds": case.training_seconds,
        "choosing_seconds": case.choosing_seconds,
        "relative_l2": relative_l2(data.y_test, prediction),
        "mae_in_sample": float((case.surrogate(data.x) - data.y).abs().mean()),
        "mae_test": float((prediction - data.y_test).abs().mean()),
    }
    for name, reference in references.items():
        gained = skill(data.y_test, prediction, reference)
        line |= {f"skill_{name}_{lead}": value for lead, value in gained.items()}
        line[f"relative_l2_{name}"] = relative_l2(data.y_test, reference)
    return line


def leaks(case):
    """What each kind of folds lets its surrogates see of the held-out windows, and what comes of it."""
    lines = []
    for kind in KINDS:
        calibration = case.tuples(kind).calibration
        features = case.queries(kind).features
        known, surrogates = case.folds(kind)
        x, y = case.data.x, case.data.y
        in_sample = [
            float((surrogate(x[seen]) - y[seen]).abs().mean())
            for (seen, _), surrogate in zip(known.splits, surrogates, strict=True)
        ]
        test_error = (features.prediction - case.data.y_test).abs()
        lines.append(
            {
                **case.task._asdict(),
                "folds": kind,
                "shared_targets": shared_targets(known.splits, case.settings.n_leads),
                "fewest_left_in": min(len(seen) for seen, _ in known.splits),
                "mae_fold_in_sample": float(np.mean(in_sample)),
                "mae_held_out": float(calibration.error.mean()),
                "mae_test": float(test_error.mean()),
                "distance_correlation_held_out": window_correlation(
                    calibration.error.flatten(1).mean(dim=1),
                    calibration.features.support_distance,
                ),
                "distance_correlation_test": window_correlation(
                    test_error.flatten(1).mean(dim=1), features.support_distance
                ),
            }
        )
    return lines


def shared_targets(splits, n_leads):
    """Share of the held-out target states that are targets of the fold's training, too."""
    shared = total = 0
    for seen, held_out in splits:
        trained, asked = (
            np.unique(rows[:, None] + np.arange(n_leads)) for rows in (seen, held_out)
        )
        shared += np.isin(asked, trained).sum()
        total += len(asked)
    return float(shared / total)


def to_draw(case, weather, shown):
    """What the pictures need: maps of the first test window at the last lead, and curves over leads and windows."""
    y = case.data.y_test
    prediction = case.surrogate(case.data.x_test)
    error = (y - prediction).abs()
    pooled = error.permute(1, 0, 2, 3, 4).flatten(1)
    arrays = {
        "names": weather.names,
        "lat": weather.lat,
        "lon": weather.lon,
        "methods": list(shown),
        "truth": y[0, -1],
        "prediction": prediction[0, -1],
        "error": error[0, -1],
        "mean_error": pooled.mean(dim=1),
        "high_error": geoq.increment.inverse_cdf_quantile(pooled.T, QUANTILE),
        "mean_bound": torch.stack(
            [a.error_hat.mean(dim=(0, 2, 3, 4)) for a in shown.values()]
        ),
        "bound": torch.stack([a.error_hat[0, -1] for a in shown.values()]),
    }
    for number, answer in enumerate(shown.values()):
        if answer.safe is not None:
            arrays[f"score_{number}"] = answer.score
            covered = (case.data.y_test - answer.prediction).abs() <= answer.error_hat
            arrays[f"covered_{number}"] = covered.flatten(1).float().mean(dim=1)
    return {
        name: part.cpu().numpy() if isinstance(part, torch.Tensor) else np.array(part)
        for name, part in arrays.items()
    }


# All tasks.


@dataclass(frozen=True)
class Plan:
    """What is to be measured, from which data, and where each task's rows are kept."""

    folder: Path | None
    settings: Settings
    parts: Path
    conditions: dict
    only: str = ""
    start: str | None = None
    days: int = DAYS
    keep: bool = False

    def weather(self):
        return load(self.folder, start=self.start, days=self.days)

    def part(self, task):
        return self.parts / f"{task.name}.json"

    def read(self, task):
        """The task's file, unless it was measured under other conditions."""
        if not self.part(task).is_file():
            return {"rows": []}
        part = json.loads(self.part(task).read_text())
        ignored = {"source"} if self.keep else set()
        same = all(part[k] == v for k, v in self.conditions.items() if k not in ignored)
        return part if same else {"rows": []}

    def write(self, task, head, rows):
        self.parts.mkdir(parents=True, exist_ok=True)
        text = record.as_text({**self.conditions, **head}, rows)
        # Never half a file, wherever the run is cut off.
        whole = self.part(task).with_suffix(".tmp")
        whole.write_text(text)
        whole.replace(self.part(task))

    def rows(self, task):
        return self.read(task)["rows"]

    def missing(self, task):
        done = {(row["folds"], row["method"]) for row in self.rows(task)}
        wanted = [(kind, name) for kind in METHODS for name in METHODS[kind]]
        return [w for w in wanted if w not in done and self.only in w[1]]


def source():
    """Fingerprint of the code that the rows depend on."""
    here = Path(__file__).parent
    files = sorted(Path(geoq.__file__).parent.rglob("*.py"))
    files += [here / "record.py", here / "forecast.py", Path(__file__)]
    files += sorted(here.glob("weather_*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:16]


def merge(plan, tasks, path, weather):
    """One results file of all tasks' files."""
    parts = [part for task in tasks if "surrogate" in (part := plan.read(task))]
    rows = [row for part in parts for row in part["rows"]]
    rows.sort(key=lambda r: (r["form"], [*METHODS].index(r["folds"])))
    record.write(
        path.stem,
        rows,
        path,
        **plan.conditions,
        variables=[*weather.names],
        first_time=str(weather.time[0]),
        last_time=str(weather.time[-1]),
        surrogates=[part["surrogate"] for part in parts],
        leaks=[line for part in parts for line in part["leaks"]],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of netCDF files")
    parser.add_argument("--small", action="store_true", help="short trainings")
    parser.add_argument("--start", help="first day of the data to use")
    parser.add_argument("--days", type=int, default=DAYS, help="days of data to use")
    parser.add_argument(
        "--form", action="append", choices=FORMS, help="may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--origins", type=int, help="number of origins, the last ones")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep", action="store_true", help="keep rows of older code")
    parser.add_argument("--information", action="store_true", help="that study instead")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else Settings()
    source_of = partial(load, arguments.data, start=arguments.start)
    try:
        weather = source_of(days=arguments.days)
    except ValueError as refusal:
        raise SystemExit(str(refusal)) from None
    problem = "weather_era5" if weather.names == STAND_IN else "weatherbench"
    ending = "_information" if arguments.information else ""
    ending += "-small" if arguments.small else ""
    path = arguments.out or record.RESULTS / f"{problem}{ending}.json"
    plan = Plan(
        arguments.data,
        settings,
        path.with_name(f"{path.stem}-parts"),
        {
            "source": source(),
            "small": arguments.small,
            "settings": json.loads(json.dumps(asdict(settings))),
        },
        arguments.only,
        arguments.start,
        arguments.days,
        arguments.keep,
    )
    chosen = origins(len(weather.values), settings.n_leads)
    tasks = [
        Task(form, origin, seed)
        for seed in range(1 if arguments.small else arguments.seeds)
        for origin in chosen[-(arguments.origins or settings.n_origins) :]
        for form in arguments.form or FORMS
    ]
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    started = time.perf_counter()
    if arguments.information:
        lines = [
            line
            for part in parallel(delayed(inform)(t, plan) for t in tasks)
            for line in part
        ]
        record.write(f"{problem}_information", lines, path, **plan.conditions)
        print(weather_information.table(lines))
    else:
        missing = [task for task in tasks if plan.missing(task)]
        for n_done, _ in enumerate(parallel(delayed(run)(t, plan) for t in missing), 1):
            seconds = time.perf_counter() - started
            print(f"{n_done} of {len(missing)} tasks, {seconds:.0f} s", flush=True)
            merge(plan, tasks, path, weather)
    if arguments.pictures:
        import weather_pictures  # here, because only those who draw need Matplotlib

        weather_pictures.draw(path, plan.parts, arguments.pictures)
    print(path)


if __name__ == "__main__":
    main()
