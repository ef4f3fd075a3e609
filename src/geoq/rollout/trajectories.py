"""Trajectories: what Algorithm 1 does for rollouts. The prediction of a fold surrogate is a whole rollout."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from geoq.arrays import flat
from geoq.bounds.climatology import Climatology
from geoq.bounds.protocol import BoundModel
from geoq.checks import add_note_on_error, check_integer, check_object, warn
from geoq.core.agreement import EXACT, Answers, fold_answers, warn_of_folds
from geoq.core.folds import ClusterFolds
from geoq.core.geometry import Geometry, Space
from geoq.core.plan import FoldPlan
from geoq.core.tuples import Points
from geoq.data.coordinates import Coordinates
from geoq.data.probes import N_PROBES, Probes
from geoq.neighbors import copied_runs, sketch
from geoq.quantiles import n_required
from geoq.regions.region import SAFE, SafeRegion
from geoq.rollout import features as along
from geoq.rollout.features import Reference, RolloutCalibration, RolloutFeatures
from geoq.rollout.fitted import FittedRollouts
from geoq.rollout.fold_rollouts import FoldRollouts
from geoq.rollout.horizon import HeldOutRollouts, n_leading
from geoq.rollout.members import Source
from geoq.rollout.memory import REMEDY
from geoq.rollout.series import DataRange, Rollouts, Series, next_states
from geoq.surrogate import check_callable
from geoq.training import sources
from geoq.training.checkpoint import Checkpoint, array_id
from geoq.training.sources import Fold, Report, TrainedFolds

if TYPE_CHECKING:
    from geoq.rollout.estimator import RolloutGeoQ

logger = logging.getLogger(__name__)
# The answers of the deployed surrogate to a few states, and all states with their geometry and climatology.
Observed: TypeAlias = tuple[Probes, Reference]


@dataclass
class Trajectories:
    """The trajectories of the user with the settings of the estimator, checked before any training, and the rollouts of the folds.

    ``plan`` has the folds (line 5), and ``starts`` has for each fold the rows from which its rollouts start. ``found`` has for each
    fold the features and errors of its rollouts, the errors of single steps of each source of members, and where they were measured.
    """

    how: "RolloutGeoQ"
    data: FoldRollouts
    plan: FoldPlan
    starts: list[np.ndarray]
    companions: list[Any] = field(default_factory=list)
    found: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    held_out: dict[int, Answers] = field(default_factory=dict)
    in_sample: dict[int, Answers] = field(default_factory=dict)

    @staticmethod
    def of(how: "RolloutGeoQ", trajectories: Any, forcing: Any) -> "Trajectories":
        _check_settings(how)
        series, layout = Series.forced(trajectories, forcing, how.output)
        longest, n_steps, rows = int(series.lengths.max()), how.n_calibration, series.rows
        if longest <= n_steps:
            raise ValueError(
                f"n_calibration={n_steps}, but the longest trajectory has {longest} states, and this number of steps needs "
                f"{n_steps + 1}; lower n_calibration or give longer trajectories (an array is one trajectory with time as the "
                "first axis; pass several trajectories as a list)."
            )
        # Small rows in double precision; fields stay in the precision of the user.
        precise = rows.astype(float) if rows[0].size <= 2**10 else rows
        nu = Coordinates.fit(precise, logarithms=False)
        points = flat(nu(rows)).astype(float, copy=False)
        copies = copied_runs(points, series.number)
        plan = FoldPlan.draw(how.folds, points, series.number).without_copies(copies)
        around = DataRange.of(rows, nu, layout.n_forcing)
        settings = n_steps, how.n_support, int(getattr(how.scheme, "n_members", 0))
        starts, recipe = _starts(how, series, plan), how.train_surrogate
        if recipe is not None and sources.is_pretrained(recipe):
            again = FoldPlan.draw(how.folds, points, series.number).without_copies(copies)
            plan.check_same(again)
        compared = np.unique(np.concatenate(starts))[: None if recipe is not None else 0]
        data = FoldRollouts(series, layout, nu, around, *settings, recipe, compared)
        return Trajectories(how, data, plan, starts)

    @property
    def n_trainings(self) -> int:
        """One training per fold with a rollout, and one for a deployed surrogate that is not given."""
        n_folds = sum(len(first) > 0 for first in self.starts)
        return sources.count_trainings(self.how.surrogate, self.how.train_surrogate, n_folds)

    def open_checkpoint(self, place: Any) -> Checkpoint | None:
        """The checkpoint in the folder; raises unless it belongs to these trajectories, folds and settings."""
        recipe = self.how.train_surrogate
        if place is None or sources.is_pretrained(recipe):
            return None
        facts = {
            "trajectories": array_id(self.data.series.rows),
            "lengths": str(self.data.series.lengths.tolist()),
            "folds": self.plan.identity,
            "starts": array_id(np.concatenate(self.starts)),
            "n_calibration": str(self.data.n_steps),
            "n_members": str(self.data.n_members),
        }
        return Checkpoint.of(place).open(facts, {"train_surrogate": recipe})

    # Algorithm 1

    def deployed(self, progress: Report) -> Any:
        """The given surrogate, or one that is trained on all trajectories (line 1)."""
        if self.how.surrogate is not None:
            return self.how.surrogate
        note = "while training the deployed surrogate: train_surrogate(segments) receives a list of trajectories"
        with add_note_on_error(note):
            trained = self.data.train([np.arange(len(self.data.series))])[0]
        progress("deployed surrogate")
        return trained

    def relate(self, surrogate: Any, finished: Checkpoint | None) -> Observed:
        """What the features of queries are relative to, with answers to a few states (lines 2 to 4).

        The nearest k of a random part of the states, such as those that a fold leaves in, are on average as far as the nearest k
        / p of all states, where p is the fraction of this part. ``ClusterFolds`` do not leave such a part, so k stays as it is.
        """
        del finished
        how, series, layout = self.how, self.data.series, self.data.layout
        ask, few = partial(next_states, layout, surrogate), series.native(slice(N_PROBES))
        probes = Probes.of(ask, few, ask(few), remedy=REMEDY)
        kind = layout, how.representation, series.like
        space = along.embed(series.rows, self.data.coordinates, *kind)
        n_support = how.n_support
        if not isinstance(how.folds, ClusterFolds):
            n_kept = np.mean([len(kept) for kept, _ in self.plan.splits])
            n_support = round(n_support * (len(series) / n_kept))
        return probes, self.reference(space, slice(None), n_support)

    def reference(self, space: Space, rows: Any, n_support: int) -> Reference:
        """The geometry and the climatology of these rows."""
        data = self.data
        geometry = Geometry(space[rows], self.how.n_anchors, n_support, sided=False)
        values = data.layout.outputs(data.series.rows[rows][:, None])[:, 0]
        climatology = Climatology().fit(values, self.how.quantile)
        return Reference(data.layout, data.coordinates, data.range, geometry, climatology)

    def folds(self, points: Observed) -> "Trajectories":
        """The companions of the folds, and where the rollouts of the folds are put."""
        data, companion = self.data, getattr(self.how.scheme, "companion", None)
        self.space = points[1].geometry.points
        if companion is not None and data.n_members:
            about = data.series, data.coordinates, data.layout.n_values
            self.companions = companion.fit(*about, self.plan.splits)
        return self

    def predictions(
        self, folds: Any, surrogate: Any, progress: Report, finished: Checkpoint | None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The rollouts of the fold surrogates (line 7), or of the deployed surrogate, which has seen none of these data."""
        del folds
        splits, data = self.plan.splits, self.data
        if data.recipe is None:
            data = replace(data, recipe=TrainedFolds([surrogate] * len(splits)))
        pairs = zip(splits, self.starts, strict=True)
        own = [Fold(n, len(splits), rows[0], first) for n, (rows, first) in enumerate(pairs)]
        return sources.fold_predictions(data, own, progress, finished)

    def put(self, number: int, answers: Rollouts) -> None:
        """Store the errors of one fold, and its features relative to the states that it leaves in (lines 8 and 9)."""
        how, data, start = self.how, self.data, self.starts[number]
        layout, n_times, seen = data.layout, data.n_steps + 1, self.plan.splits[number][0]
        known = data.in_sample(seen, start)
        ends = n_times, n_times + known.shape[1], answers.shape[1] - n_times + 1
        rolled, stepped, *simulated = np.split(answers, ends, axis=1)
        self.held_out[number] = self._answers(start, rolled[:, 1])
        self.in_sample[number] = self._answers(
            known.reshape(-1), stepped.reshape(known.size, *rolled.shape[2:])
        )
        reference = self.reference(self.space, seen, how.n_support)
        features = reference.features(rolled, how.representation, data.series.like)
        truth = data.series.rows[start[:, None] + np.arange(1, n_times)]
        error = abs(layout.outputs(truth) - layout.outputs(features.prediction))
        distance = data.distance_to(seen)
        found = []
        if data.n_members:
            errors, spread = simulated
            found.append((errors, np.stack([np.zeros_like(spread), spread])))
        for companion in self.companions[number : number + 1]:
            found.append(data.members(companion, start, rolled, distance, own=False))
        own = features.relation
        relation = replace(own, anchors=seen[own.anchors], near=seen[own.near])
        members = tuple(np.stack([layout.outputs(part) for part in both]) for _, both in found)
        features = replace(features, relation=relation, points=self.space, members=members)
        at = distance(data.series.rows[data.measured(start)])
        self.found[number] = features, error, [errors for errors, _ in found], at
        last = error[features.alive[:, -1], -1]
        mean = last.mean() if last.size else np.nan
        logger.info("fold %d: mean error %.4g at the last step", number + 1, mean)

    def _answers(self, places: np.ndarray, after: np.ndarray) -> Answers:
        """The answers of a surrogate to these rows of the data after one step, and their errors."""
        layout = self.data.layout
        truth, found = (
            layout.outputs(rows[:, None])[:, 0]
            for rows in (self.data.series.rows[places + 1], after)
        )
        return fold_answers(places, abs(truth - found), found, self._following)

    @cached_property
    def _following(self) -> np.ndarray:
        """A number that stands for the row after each row of the data."""
        rows = np.roll(self.data.series.rows, -1, axis=0)
        return sketch(self.data.layout.outputs(rows[:, None])[:, 0], 1)[:, 0]

    def tuples(self, *_: Any) -> RolloutCalibration:
        """The held-out rollouts of all folds with their errors (line 10)."""
        data = self.data
        # Sorted, because folds can finish in any order.
        found = (self.found[n] for n in sorted(self.found))
        parts, errors, steps, at = zip(*found, strict=True)
        features = RolloutFeatures.cat(list(parts))
        distance, members = features.support_distance, []
        furthest = float(distance[np.isfinite(distance)].max(initial=0.0))
        scale = data.coordinates.scale.reshape(-1)[: data.layout.n_values]
        models = zip((None, *self.companions[-1:]), zip(*steps, strict=True), strict=False)
        for model, own in models:
            each = np.concatenate(own)
            size = float(np.sqrt(((data.finite(each) / scale) ** 2).mean()))
            noise = data.noise(each, np.concatenate(at))
            members.append(Source(model, noise, size, furthest))
        counts = [len(first) for first in self.starts]
        return RolloutCalibration(
            features=features,
            error=np.concatenate(errors),
            start=np.concatenate(self.starts),
            fold=np.repeat(np.arange(len(counts)), counts),
            family=np.repeat(np.array(self.plan.family), counts),
            points=self._points(),
            sources=tuple(members),
        )

    def _points(self) -> Points:
        """All rows with the states after them, and the coordinates in which the safe region compares states."""
        layout, nu, number = self.data.layout, self.data.coordinates, self.data.series.number
        states = layout.states(self.data.series.rows)
        following, goes_on = np.full_like(states, np.nan), np.flatnonzero(np.diff(number) == 0)
        following[goes_on] = states[goes_on + 1]
        parts = (layout.compared(p[None])[0] for p in (nu.mean, nu.scale, nu.log, nu.constant))
        error, known = np.zeros(len(number)), (Coordinates(*parts), None, layout.region_layout)
        return Points(self.space, following, error, self.plan.splits, *known)

    def fit_bound(self, tuples: RolloutCalibration) -> Any:
        """Line 12."""
        return self.how.scheme.fit(tuples, self.how.quantile)

    def fit_region(self, tuples: RolloutCalibration) -> Any:
        """The threshold of line 16."""
        return self.how.safe_region.fit(tuples.steps)

    def fitted(
        self, surrogate: Any, points: Observed, tuples: RolloutCalibration, bound: Any, region: Any
    ) -> FittedRollouts:
        """What answers queries (lines 13 to 17)."""
        (probes, reference), how = points, self.how
        probes.check_unchanged()
        self._warn_of_runaways(surrogate, tuples)
        self._compare_models(surrogate, tuples)
        bounds = along.bounds_along(bound, tuples.features)
        supported = n_leading(along.scores_along(region, tuples.features) <= SAFE)
        numbers = bounds, tuples.error, supported, tuples.start, how.quantile
        known = how.quantile, reference, bound, region, HeldOutRollouts.of(*numbers), tuples
        return FittedRollouts(*known, probes.inputs, surrogate, how.representation)

    def _compare_models(self, surrogate: Any, tuples: RolloutCalibration) -> None:
        """Warn if a fold surrogate has seen its held-out states, or if the deployed one is worse or was trained on the data."""
        first = np.nan_to_num(tuples.error[:, 0], nan=np.inf).max(axis=1)
        if self.how.train_surrogate is not None:
            starts = self.data.starts
            own = self.data.step_errors(self.data.layout.step(surrogate), starts[:, None])
            error = np.full((len(self.data.series), tuples.error.shape[2]), np.nan)
            error[starts] = abs(self.data.layout.outputs(own))[:, 0]
            answers = self.held_out, self.in_sample, self._following, error, [*self.held_out]
            warn_of_folds(*answers, "after one step from the same states")
        elif np.median(first) <= EXACT * abs(self._following).max():
            warn(
                "most errors of the surrogate after one step are 0, as at states that a surrogate was trained on. With "
                "train_surrogate=None it must never have seen the trajectories; otherwise the bounds are far too small. Pass "
                "trajectories that it was not trained on, or a function train_surrogate(segments)."
            )

    def _warn_of_runaways(self, surrogate: Any, tuples: RolloutCalibration) -> None:
        """Warn if rollouts diverge, with their fraction for the fold surrogates and for the deployed surrogate."""
        diverged = ~tuples.features.alive[:, -1]
        if not diverged.any():
            return
        worst = max(diverged[tuples.fold == fold].mean() for fold in np.unique(tuples.fold))
        text = (
            f"{_fraction(diverged)} calibration rollouts leave the range of the data by more than its width within "
            f"n_calibration={tuples.n_steps} steps (up to {100 * worst:.3g} % in a fold)"
        )
        if self.how.train_surrogate is not None:
            rolled = self.data.range.cut(self.data.roll_out(surrogate, tuples.start))
            last = _fraction(np.isnan(flat(rolled[:, -1])).any(axis=1))
            text += f", and {last} rollouts of the deployed surrogate from the same states"
        warn(
            f"{text}. They count up to the step before, and they have no effect on the safe region except through their initial "
            "states. A query that leaves this range has an infinite bound from there on. To avoid it, train on rollouts "
            "(TrainRollout), clip the output of the surrogate to the range of the data, or lower n_calibration."
        )


def _fraction(holds: np.ndarray) -> str:
    return f"{holds.sum()} of {len(holds)} ({100 * holds.mean():.3g} %)"


def _check_settings(how: "RolloutGeoQ") -> None:
    for name in ("n_calibration", "n_starts", "n_anchors", "n_support"):
        check_integer(getattr(how, name), name, 1)
    check_object(how.scheme, BoundModel, "scheme", "MemberGrowth()")
    check_object(how.safe_region, SafeRegion, "safe_region", "RolloutRegion(quantile=0.95)")
    sources.check_sources(how.surrogate, how.train_surrogate, "segments")
    if isinstance(how.train_surrogate, sources.PredictedFolds):
        raise TypeError(
            "train_surrogate is a PredictedFolds, but rollouts need the surrogates themselves; pass TrainedFolds."
        )
    if how.representation is not None:
        check_callable(how.representation, "representation")


def _starts(how: "RolloutGeoQ", series: Series, plan: FoldPlan) -> list[np.ndarray]:
    """The rows from which the rollouts of each fold start; raises for unusable folds before any training."""
    recipe: Any = how.train_surrogate
    plan.check(n_anchors=how.n_anchors, n_support=how.n_support)
    if hasattr(how.safe_region, "check_neighbors"):
        how.safe_region.check_neighbors(plan.n_independent)
    for fold, (kept, _) in enumerate(plan.splits, start=1):
        lengths = [len(run) for run in series.runs(kept)]
        if not lengths:
            raise ValueError(
                f"folds={how.folds!r}, but fold {fold} of {len(plan.splits)} leaves no pair of consecutive states to train on; "
                "choose folds of contiguous states, for example TemporalFolds(5)."
            )
        if hasattr(recipe, "check_lengths"):
            with add_note_on_error(f"these are the segments of fold {fold}"):
                recipe.check_lengths(lengths)
    starts = [series.starts(rows, how.n_calibration, how.n_starts) for _, rows in plan.splits]
    n_rollouts, needed = sum(map(len, starts)), n_required(how.quantile)
    if n_rollouts < needed:
        raise ValueError(
            f"quantile={how.quantile} needs at least {needed} calibration rollouts, but there are only {n_rollouts} with "
            f"n_starts={how.n_starts} and n_calibration={how.n_calibration}; lower n_calibration, or raise n_starts."
        )
    return starts
