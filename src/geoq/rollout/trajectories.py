"""Trajectories: what Algorithm 1 does for rollouts. The prediction of a fold surrogate is a whole rollout."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from geoq.arrays import flat
from geoq.bounds.climatology import Climatology
from geoq.checks import add_note_on_error, check_integer, check_object, warn
from geoq.core.agreement import warn_if_worse
from geoq.core.folds import ClusterFolds
from geoq.core.geometry import Geometry, Space
from geoq.core.plan import FoldPlan
from geoq.core.tuples import Points
from geoq.data.coordinates import Coordinates
from geoq.data.probes import N_PROBES, FirstFold, Probes
from geoq.neighbors import copied_runs
from geoq.quantiles import n_required
from geoq.regions.region import SAFE, SafeRegion
from geoq.rollout import features as along
from geoq.rollout.features import Reference, RolloutCalibration, RolloutFeatures, Scheme
from geoq.rollout.fitted import FittedRollouts
from geoq.rollout.horizon import HeldOutRollouts, n_leading
from geoq.rollout.layout import RowLayout
from geoq.rollout.members import Held, Noise, Source, distance_to, finite
from geoq.rollout.memory import REMEDY
from geoq.rollout.series import DataRange, Rollouts, Series, next_states, roll_out, step_errors
from geoq.surrogate import TRAINED, TrainTogether, check_callable
from geoq.training import sources
from geoq.training.checkpoint import Checkpoint, FinishedFolds, array_id
from geoq.training.progress import Trainings
from geoq.training.sources import Fold, TrainedFolds

if TYPE_CHECKING:
    from geoq.rollout.estimator import RolloutGeoQ

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of the user with the settings of the estimator, checked before any training.

    ``layout`` states what a row of ``series`` consists of, ``coordinates`` is nu of rows, ``plan`` has the folds (line 5), and
    ``starts`` has for each fold the rows from which its rollouts start.
    """

    how: "RolloutGeoQ"
    series: Series
    layout: RowLayout
    coordinates: Coordinates
    range: DataRange
    plan: FoldPlan
    starts: list[np.ndarray]

    @staticmethod
    def of(how: "RolloutGeoQ", trajectories: Any, forcing: Any) -> "Trajectories":
        """Check settings and data, and draw the folds."""
        _check_settings(how)
        series, layout = Series.forced(trajectories, forcing, how.output)
        longest, n_steps = int(series.lengths.max()), how.n_calibration
        if longest <= n_steps:
            raise ValueError(
                f"n_calibration={n_steps}, but the longest trajectory has {longest} states, and this number of steps needs "
                f"{n_steps + 1}; lower n_calibration or give longer trajectories (an array is one trajectory with time as the "
                "first axis; pass several trajectories as a list)."
            )
        rows = series.rows
        # Small rows in double precision; fields stay in the precision of the user.
        precise = rows.astype(float) if rows[0].size <= 2**10 else rows
        coordinates = Coordinates.fit(precise, logarithms=False)
        points = flat(coordinates(rows)).astype(float, copy=False)
        copies = copied_runs(points, series.number)
        plan = FoldPlan.draw(how.folds, points, series.number).without_copies(copies)
        around = DataRange.of(rows, coordinates, layout.n_forcing)
        known = layout, coordinates, around, plan, _starts(how, series, plan)
        return Trajectories(how, series, *known)

    @property
    def n_members(self) -> int:
        """The number of members that are simulated for each held-out rollout."""
        return int(getattr(self.how.scheme, "n_members", 0))

    @property
    def n_trainings(self) -> int:
        """One training per fold with a rollout, and one for a deployed surrogate that is not given."""
        n_folds = sum(len(first) > 0 for first in self.starts)
        return sources.count_trainings(self.how.surrogate, self.how.train_surrogate, n_folds)

    def open_checkpoint(self, place: Any) -> FinishedFolds | None:
        """The checkpoint in the folder; raises unless it belongs to these trajectories, folds and settings."""
        recipe = self.how.train_surrogate
        if place is None or sources.is_pretrained(recipe):
            return None
        facts = {
            "trajectories": array_id(self.series.rows),
            "lengths": str(self.series.lengths.tolist()),
            "folds": self.plan.identity,
            "starts": array_id(np.concatenate(self.starts)),
            "n_calibration": str(self.how.n_calibration),
            "n_members": str(self.n_members),
        }
        return Checkpoint.of(place).open(facts, {"train_surrogate": recipe})

    # Algorithm 1

    def deployed(self, progress: Trainings) -> Any:
        """The given surrogate, or one that is trained on all trajectories (line 1)."""
        if self.how.surrogate is not None:
            return self.how.surrogate
        with add_note_on_error("while training the deployed surrogate on all trajectories"):
            trained = self._source(self.how.train_surrogate).train([np.arange(len(self.series))])[0]
        progress.done("deployed surrogate")
        return trained

    def relate(self, surrogate: Any, finished: FinishedFolds | None) -> "ObservedStates":
        """The coordinates of all states, which the features of queries are relative to (lines 2 to 4).

        The nearest k of a random part of the states, such as those that a fold leaves in, are on average as far as the nearest k
        / p of all states, where p is the fraction of this part. ``ClusterFolds`` do not leave such a part, so k stays as it is.
        """
        del finished
        how, series, layout = self.how, self.series, self.layout
        ask = partial(next_states, layout, surrogate)
        few = series.native(slice(N_PROBES))
        probes = Probes.of(ask, few, ask(few), remedy=REMEDY)
        nu, kind = self.coordinates, (how.representation, series.like)
        space = along.embed(series.rows, nu, layout, *kind)
        n_support = how.n_support
        if not isinstance(how.folds, ClusterFolds):
            n_kept = np.mean([len(kept) for kept, _ in self.plan.splits])
            n_support = round(n_support * (len(series) / n_kept))
        return ObservedStates(probes, self.reference(space, slice(None), n_support))

    def reference(self, space: Space, rows: Any, n_support: int) -> Reference:
        """The geometry and the climatology of these rows."""
        geometry = Geometry(space[rows], self.how.n_anchors, n_support, sided=False)
        values = self.layout.outputs(self.series.rows[rows][:, None])[:, 0]
        climatology = Climatology().fit(values, self.how.quantile)
        return Reference(self.layout, self.coordinates, self.range, geometry, climatology)

    def folds(self, points: "ObservedStates") -> "RolloutsOfFolds":
        """The rollouts of all folds, which start from held-out states."""
        companion, models = getattr(self.how.scheme, "companion", None), []
        if companion is not None and self.n_members:
            models = companion.fit(
                self.series, self.coordinates, self.layout.n_values, self.plan.splits
            )
        return RolloutsOfFolds(self, points.reference.geometry.points, models)

    def predictions(
        self, folds: Any, surrogate: Any, progress: Trainings, finished: FinishedFolds | None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The rollouts of the fold surrogates (line 7), or of the deployed surrogate, which has seen none of these data."""
        del folds
        splits, recipe = self.plan.splits, self.how.train_surrogate
        if recipe is None:
            recipe = TrainedFolds([surrogate] * len(splits))
        source, pairs = self._source(recipe), zip(splits, self.starts, strict=True)
        own = [Fold(n, len(splits), rows[0], first) for n, (rows, first) in enumerate(pairs)]
        return sources.fold_predictions(source, None, None, own, progress, finished)

    def _source(self, recipe: Any) -> "FoldRollouts":
        how = self.how.n_calibration, self.how.n_support, self.n_members
        return FoldRollouts(self.series, self.layout, self.coordinates, recipe, self.range, *how)

    def tuples(self, points: "ObservedStates", held_out: "RolloutsOfFolds") -> RolloutCalibration:
        """The held-out rollouts of all folds with their errors (line 10)."""
        # Sorted, because folds can finish in any order.
        found = (held_out.found[n] for n in sorted(held_out.found))
        parts, errors, steps, at = zip(*found, strict=True)
        features = RolloutFeatures.cat(list(parts))
        known = features.support_distance[np.isfinite(features.support_distance)]
        models = zip((None, *held_out.companions[-1:]), zip(*steps, strict=True), strict=False)
        about = np.concatenate(at), float(known.max(initial=0.0))
        sources = tuple(
            self.member_source(model, np.concatenate(own), *about) for model, own in models
        )
        counts = [len(first) for first in self.starts]
        return RolloutCalibration(
            features=features,
            error=np.concatenate(errors),
            start=np.concatenate(self.starts),
            fold=np.repeat(np.arange(len(counts)), counts),
            family=np.repeat(np.array(self.plan.family), counts),
            points=self._points(points.reference.geometry.points),
            sources=sources,
        )

    def member_source(
        self, model: Any, errors: np.ndarray, distance: np.ndarray, furthest: float
    ) -> Source:
        """A source of the members of queries, from the held-out errors of single steps."""
        layout, n_steps = self.layout, self.how.n_calibration
        known = finite(errors, layout.n_values)
        size = np.sqrt(
            ((known / self.coordinates.scale.reshape(-1)[: layout.n_values]) ** 2).mean()
        )
        return Source(
            model, Noise.of(known, distance, self.n_members, n_steps), float(size), furthest
        )

    def held(self, start: np.ndarray) -> Held:
        """Held-out rollouts from these rows."""
        return Held(self.series, start, self.range, self.layout.n_values, self.n_members)

    def _points(self, space: Space) -> Points:
        """All rows with the states after them, and the coordinates in which the safe region compares states."""
        layout, nu, number = self.layout, self.coordinates, self.series.number
        states = layout.states(self.series.rows)
        following, goes_on = np.full_like(states, np.nan), np.flatnonzero(np.diff(number) == 0)
        following[goes_on] = states[goes_on + 1]
        parts = (layout.compared(p[None])[0] for p in (nu.mean, nu.scale, nu.log, nu.constant))
        error, known = np.zeros(len(number)), (Coordinates(*parts), None, layout.region_layout)
        return Points(space, following, error, self.plan.splits, *known)

    def fit_bound(self, tuples: RolloutCalibration) -> Any:
        """Line 12."""
        return self.how.scheme.fit(tuples, self.how.quantile)

    def fit_region(self, tuples: RolloutCalibration) -> Any:
        """The threshold of line 16."""
        return self.how.safe_region.fit(tuples.steps)

    def fitted(
        self, surrogate: Any, points: "ObservedStates", tuples: Any, bound: Any, region: Any
    ) -> FittedRollouts:
        """What answers queries (lines 13 to 17)."""
        points.probes.check_unchanged()
        self._warn_of_runaways(surrogate, tuples)
        if self.how.train_surrogate is not None:
            own = step_errors(self.series, self.layout, surrogate, tuples.start)
            warn_if_worse(own, tuples.error[:, 0], "after one step from the same states")
        bounds = along.bounds_along(bound, tuples.features)
        supported = n_leading(along.scores_along(region, tuples.features) <= SAFE)
        held_out = bounds, tuples.error, supported, tuples.start, self.how.quantile
        return FittedRollouts(
            quantile=self.how.quantile,
            reference=points.reference,
            bound=bound,
            region=region,
            held_out=HeldOutRollouts.of(*held_out),
            calibration=tuples,
            probes=points.probes.inputs,
            surrogate=surrogate,
            representation=self.how.representation,
        )

    def _warn_of_runaways(self, surrogate: Any, tuples: RolloutCalibration) -> None:
        """Warn if rollouts diverge, with their fraction for the fold surrogates and for the deployed surrogate.

        The deployed surrogate is rolled out only in this case, and not if it is the surrogate of every fold.
        """
        diverged = ~tuples.features.alive[:, -1]
        if not diverged.any():
            return
        worst = max(diverged[tuples.fold == fold].mean() for fold in np.unique(tuples.fold))
        text = (
            f"{_fraction(diverged)} calibration rollouts leave the range of the data by more than its width within "
            f"n_calibration={tuples.n_steps} steps (up to {100 * worst:.3g} % in a fold)"
        )
        if self.how.train_surrogate is not None:
            rolled = self._source(None).roll_out(surrogate, tuples.start)
            last = _fraction(np.isnan(flat(self.range.cut(rolled)[:, -1])).any(axis=1))
            text += f", and {last} rollouts of the deployed surrogate from the same states"
        warn(
            f"{text}. They count up to the step before, and they have no effect on the safe region except through their initial "
            "states. A query that leaves this range has an infinite bound from there on. To avoid it, train on rollouts "
            "(TrainRollout), clip the output of the surrogate to the range of the data, or lower n_calibration."
        )


def _fraction(holds: np.ndarray) -> str:
    return f"{holds.sum()} of {len(holds)} ({100 * holds.mean():.3g} %)"


class ObservedStates(NamedTuple):
    """The answers of the deployed surrogate to a few states, and all states in the coordinates of the geometry."""

    probes: Probes
    reference: Reference


@dataclass
class RolloutsOfFolds:
    """The features and errors of the rollouts of each fold."""

    task: Trajectories
    space: Space
    companions: list[Any]
    found: dict[int, tuple[RolloutFeatures, np.ndarray, list[np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )

    def put(self, number: int, answers: Rollouts) -> None:
        """Store the errors of one fold, and its features relative to the states that it leaves in (lines 8 and 9)."""
        task, series, layout = self.task, self.task.series, self.task.layout
        n_times = task.how.n_calibration + 1
        rolled, *simulated = np.split(answers, (n_times, answers.shape[1] - n_times + 1), axis=1)
        seen = task.plan.splits[number][0]
        reference = task.reference(self.space, seen, task.how.n_support)
        features = reference.features(rolled, task.how.representation, series.like)
        own = features.relation
        own = replace(own, anchors=seen[own.anchors], near=seen[own.near])  # rows of the data
        rows = task.starts[number][:, None] + np.arange(1, features.n_steps + 1)
        error = abs(layout.outputs(series.rows[rows]) - layout.outputs(features.prediction))
        held = task.held(task.starts[number])
        steps, members = [], []
        distance = distance_to(
            reference.geometry.points.normalized, task.coordinates, task.how.n_support
        )
        if task.n_members:
            steps, members = [simulated[0]], [np.stack([np.zeros_like(simulated[1]), simulated[1]])]
        for companion in self.companions[number : number + 1]:
            found = held.members(companion, rolled, distance, own=False)
            steps, members = [*steps, found[0]], [*members, found[1]]
        at = distance(series.rows[held.measured(n_times - 1)])
        outputs = tuple(np.stack([layout.outputs(p) for p in both]) for both in members)
        features = replace(features, relation=own, points=self.space, members=outputs)
        self.found[number] = features, error, steps, at
        mean = np.mean(error[features.alive[:, -1], -1]) if features.alive[:, -1].any() else np.nan
        logger.info("fold %d: mean error %.4g at the last step", number + 1, mean)


@dataclass(frozen=True)
class FoldRollouts:
    """A source of the rollouts of fold surrogates, which a recipe trains on the segments that each fold leaves in, or are given.

    A recipe that trains together receives all rows and, for each surrogate, the runs of consecutive rows that it is trained on.
    """

    series: Series
    layout: RowLayout
    coordinates: Coordinates
    recipe: Any
    range: DataRange
    n_steps: int
    n_support: int
    n_members: int
    first: FirstFold = field(default_factory=FirstFold, repr=False, compare=False)

    @property
    def pretrained(self) -> bool:
        """Whether the surrogates are given."""
        return isinstance(self.recipe, TrainedFolds)

    @property
    def _together(self) -> bool:
        return isinstance(self.recipe, TrainTogether) and self.layout.forcing is None

    def jobs(self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int) -> list[list[int]]:
        if self.pretrained:
            return [*self.recipe.jobs(x, y, folds, n_workers)]
        if not self._together:
            return sources.one_by_one(folds)
        n_together = self.recipe.n_together(self.series.native(slice(None)))
        return sources.in_jobs(folds, n_together, n_workers)

    def predictions(self, x: Any, y: Any, folds: Sequence[Fold]) -> list[Rollouts]:
        del x, y
        if self.pretrained:
            surrogates = [self.recipe.surrogates[fold.number] for fold in folds]
        else:
            with add_note_on_error(f"while training {sources.describe_folds(folds)}"):
                surrogates = self.train([fold.training_rows for fold in folds])
            self.first.check()
        rollouts = []
        for surrogate, fold in zip(surrogates, folds, strict=True):
            with add_note_on_error(f"while rolling out the surrogate of {fold}"):
                rollouts.append(self.answers(surrogate, fold))
        if not self.pretrained:
            ask = partial(next_states, self.layout, surrogates[0])
            starts = self.series.native(folds[0].evaluated_rows)
            self.first.keep(ask, starts, self.layout.states(rollouts[0][:, 1]), REMEDY)
        return rollouts

    def train(self, subsets: Sequence[np.ndarray]) -> list[Any]:
        """Train a surrogate on the segments of each subset of the rows, together if the recipe supports it."""
        series, split = self.series, self.layout.split
        runs = [series.runs(rows) for rows in subsets]
        if len(runs) > 1 and self._together:
            surrogates = list(self.recipe.train_many(series.native(slice(None)), runs))
        else:
            surrogates = [self.recipe([split(series.native(run)) for run in own]) for own in runs]
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
        return surrogates

    def roll_out(self, surrogate: Any, start: np.ndarray) -> Rollouts:
        """Rollouts from these rows of the data, with the forcing of the data along them."""
        along, n_forcing = start[:, None] + np.arange(self.n_steps + 1), self.layout.n_forcing
        forcing = self.series.rows[along, -n_forcing:] if n_forcing else None
        step, rows = self.layout.step(surrogate), self.series.native(start)
        return roll_out(step, rows, self.n_steps, self.range.largest, forcing)

    def answers(self, surrogate: Any, fold: Fold) -> Rollouts:
        """The rollouts of a fold and, as further times, errors of single steps and the distances of members."""
        rolled, step = self.roll_out(surrogate, fold.evaluated_rows), self.layout.step(surrogate)
        if not self.n_members:
            return rolled
        nu, kept = self.coordinates, self.series.rows[fold.training_rows]
        how = self.range, self.layout.n_values, self.n_members
        held = Held(self.series, fold.evaluated_rows, *how)
        errors, members = held.members(
            step, rolled, distance_to(nu(kept), nu, self.n_support), own=True
        )
        return np.concatenate([rolled, errors, members[1]], axis=1, dtype=rolled.dtype)


def _check_settings(how: "RolloutGeoQ") -> None:
    for name in ("n_calibration", "n_starts", "n_anchors", "n_support"):
        check_integer(getattr(how, name), name, 1)
    check_object(how.scheme, Scheme, "scheme", "MemberGrowth()")
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
