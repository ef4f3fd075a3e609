"""Pairs of inputs and reference outputs: what Algorithm 1 does for points."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from geoq.arrays import CHUNK_NUMBERS, flat, is_lazy, native, stored, take
from geoq.bounds.protocol import fit_bound, model_for
from geoq.checks import add_note_on_error, check_finite, warn
from geoq.core.agreement import Answers, fold_answers, mean_error, warn_of_folds
from geoq.core.beyond import errors_at_levels
from geoq.core.conformal import ConformalFactors
from geoq.core.fitted import Fitted, embed
from geoq.core.geometry import Geometry, Relation, Space, anchor_mean
from geoq.core.intervals import Tails, limits_of
from geoq.core.opinion import (
    CLEARLY,
    compared,
    for_parameters,
    mixed_rows,
    warn_if_trained_on,
    warn_of_training_rows,
    with_second_opinion,
    with_user_features,
)
from geoq.core.pair_checks import (
    beyond_text,
    check_models,
    check_pairs,
    check_settings,
    coordinates_of,
    features_of_user,
    planned_coordinates,
    shapes_of,
    warn_if_few,
    warn_of_decades,
)
from geoq.core.plan import FoldPlan, draw_folds
from geoq.core.tuples import Points, Repeats, Tuples
from geoq.data.coordinates import Coordinates, regular_gaps
from geoq.data.domain import MAX_COLUMNS, Layout, layout_of
from geoq.data.masks import Mask, exact_cells, filled_with_means, predict
from geoq.data.metric import FittedMetric, Metric, rows_like
from geoq.data.probes import N_PROBES, Probes
from geoq.data.process import Process
from geoq.data.table import Table, check_same_order, input_rows, output_names, output_rows
from geoq.neighbors import Neighbors, near_copies, sketch
from geoq.surrogate import ELEMENTWISE, absolute_error, answers_of, errors_of, log_error, on_scale
from geoq.training.checkpoint import Checkpoint, array_id
from geoq.training.sources import (
    Fold,
    PairFolds,
    Report,
    count_trainings,
    fold_predictions,
    is_pretrained,
    train_deployed,
)

if TYPE_CHECKING:
    from geoq.core.estimator import GeoQ

logger = logging.getLogger(__name__)

# The paper's k, used for n_support=None if the folds leave enough points.
USUAL_COUNT = 20
# In-sample errors are measured at about this many training points of a fold, and at fewer large fields.
N_IN_SAMPLE, IN_SAMPLE_NUMBERS = 256, 2**19
# More than this fraction of the planned queries beyond all held-out points gives a warning.
FEW = 0.01


@dataclass(frozen=True)
class Pairs:
    """The pairs of the user with the settings of the estimator, checked before any training.

    ``x`` and ``y`` are rows of the user's kind, ``inputs`` and ``outputs`` numbers, with nan where a value is missing or masked, and
    ``for_training`` are the outputs that recipes receive.
    """

    how: "GeoQ"
    x: Any
    y: Any
    inputs: np.ndarray
    outputs: np.ndarray
    for_training: Any
    mask: Mask | None
    coordinates: Coordinates
    plan: FoldPlan
    layout: Layout
    n_support: int
    limits: tuple[np.ndarray, np.ndarray] | None = None
    planned: np.ndarray | None = None  # the coordinates T of planned queries

    @staticmethod
    def of(how: "GeoQ", x: Any, y: Any, groups: Any, planned: Any = None) -> "Pairs":
        """Check settings and data, and draw the folds."""
        check_settings(how)
        rows, outputs = input_rows(stored(x)), output_rows(stored(y))
        check_same_order(rows, outputs)
        check_same_order(rows, groups, "groups")
        mask = Mask.of(outputs)
        for_training = outputs if mask is None else mask.for_training(outputs)
        inputs, numbers = check_pairs(rows, outputs, mask)
        # Later changes of y change nothing; only a memory map that is too large for a copy is used as it is.
        numbers = numbers if is_lazy(y) and numbers.size > CHUNK_NUMBERS else numbers.copy()
        check_models(how, rows, numbers)
        known = coordinates_of(how.representation, inputs, rows)
        points = flat(known(inputs))
        rho = how.error_functional
        limits = limits_of(how.limits, numbers, rho)
        if inputs.ndim == 2 and rho in ELEMENTWISE:
            known = replace(known, gaps=regular_gaps(points))
        # Near copies lie at one place, so that the folds hold them out together.
        copies = near_copies(points, numbers)
        places = np.asarray(points, dtype=float)[copies]
        asked = planned_coordinates(planned, rows, known)
        plan = draw_folds(how.folds, places, groups, asked)
        plan.warn_of_copies(copies)
        if how.train_surrogate is not None and is_pretrained(how.train_surrogate):
            plan.check_same(draw_folds(how.folds, places, groups, asked))
        usual = max(1, min(USUAL_COUNT, plan.fewest_left_in))
        n_support = usual if how.n_support is None else how.n_support
        plan.check(n_anchors=how.n_anchors, n_support=n_support)
        if hasattr(how.safe_region, "check_neighbors"):
            how.safe_region.check_neighbors(plan.n_independent)
        warn_if_few(how.quantile, plan.n_groups)
        shapes = shapes_of(how, rows, outputs, numbers)
        layout = layout_of(how.domain, shapes)
        logger.info("%d %s", len(rows), layout.described())
        warn_of_decades(how, numbers, layout)
        model = how.bound_for(layout)
        if hasattr(model, "check_shapes"):
            model.check_shapes(shapes, layout)
        numbers = on_scale(numbers, rho)
        parts = rows, outputs, inputs, numbers, for_training, mask, known, plan, layout, n_support
        return Pairs(how, *parts, limits, asked)

    @property
    def n_trainings(self) -> int:
        """One training per fold, and one for a deployed surrogate that is not given."""
        how, n_folds = self.how, len(self.plan.splits)
        return count_trainings(how.surrogate, how.train_surrogate, n_folds)

    def open_checkpoint(self, place: Any) -> Checkpoint | None:
        """The checkpoint in the folder; raises unless it belongs to these data, folds and settings."""
        how = self.how
        if place is None or is_pretrained(how.train_surrogate):
            return None
        facts = {"x": array_id(self.x), "y": array_id(self.y), "folds": self.plan.identity}
        facts["n_anchors"] = str(how.n_anchors)
        callables = {"representation": how.representation, "train_surrogate": how.train_surrogate}
        return Checkpoint.of(place).open(facts, callables)

    # Algorithm 1

    def deployed(self, progress: Report) -> Any:
        """The given surrogate, or one that is trained on all data (line 1)."""
        if self.how.surrogate is not None:
            return self.how.surrogate
        recipe: Any = self.how.train_surrogate
        trained = train_deployed(recipe, self.x, self.for_training)
        progress("deployed surrogate")
        return trained

    def errors(self, prediction: np.ndarray, rows: Any) -> np.ndarray:
        """The errors of predictions at some rows, whose masked cells do not count."""
        y, way_out = self.outputs[rows], "surrogate must return finite numbers"
        rho = self.how.error_functional
        if rho is log_error:
            rho, way_out = absolute_error, "with error_functional=log_error it must be positive"
        if self.mask is not None and prediction.shape == y.shape:
            prediction = np.where(np.isnan(y), 0, prediction)
            way_out += ", or mask y there"
        if prediction.shape == y.shape:
            check_finite(prediction, "surrogate(x)", way_out)
        return errors_of(prediction, rho, y, native(self.y))

    def relate(self, surrogate: Any, finished: Checkpoint | None) -> "ObservedPoints":
        """The observed errors and the coordinates of all points (lines 2 to 4)."""
        rho = self.how.error_functional
        ask = partial(predict, surrogate, self.mask, error_functional=rho)
        given = answers_of(surrogate, self.x, "surrogate")
        user = features_of_user(self.how, self.x, given, surrogate)
        prediction = on_scale(given, rho)
        error = self.errors(prediction, slice(None))
        if self.mask is not None:
            prediction = self.mask.filled(prediction)
        model = self.how.bound_for(self.layout)
        if hasattr(model, "check_errors"):
            model.check_errors(prediction, error)
        metric = self._metric(ask, finished)
        space = embed(self.how.representation, metric, self.x, self.coordinates(self.inputs))
        if metric is None:
            check_finite(space.z, "representation(x)", "representation must return finite numbers")
        probes = self._probes(ask, prediction, space)
        return ObservedPoints(space, metric, error, prediction, probes, user)

    def _probes(self, ask: Any, prediction: np.ndarray, space: Space) -> Probes:
        """Probes between the data, where interpolating models differ; at the data if the surrogate has no answers between them."""
        at_data = Probes.of(ask, self.x, prediction)
        if len(self.inputs) < 3 or (isinstance(self.x, Table) and self.inputs.shape[1] == 1):
            return at_data
        z = flat(space.normalized).astype(float)
        mixed = rows_like(mixed_rows(self.inputs, z, N_PROBES), self.x)
        answers = ask(mixed)
        return at_data if np.isinf(answers).any() else Probes.of(ask, mixed, answers)

    def _metric(self, ask: Any, finished: Checkpoint | None) -> FittedMetric | None:
        """The fitted metric; None for a representation of the user. A resumed run uses the metric of the first run."""
        if not isinstance(self.how.representation, Metric):
            return None
        metric = self.how.representation.fit(
            self.coordinates, self.inputs, self.outputs, lambda q: ask(rows_like(q, self.x))
        )
        if not isinstance(metric, FittedMetric):
            raise TypeError(
                f"{type(self.how.representation).__name__}.fit returned {type(metric).__name__}; return a FittedMetric."
            )
        if finished is None:
            return metric
        own = {k: v for k, v in vars(metric).items() if isinstance(v, np.ndarray)}
        stored: Any = finished.first("metric", own)
        return replace(metric, **stored)

    def geometry(self, space: Space) -> Geometry:
        """The geometry of these points."""
        sided = getattr(self.how.bound_for(self.layout), "uses_neighborhood", True)
        sided |= self.how.bound_model is None and self.inputs[0].size <= MAX_COLUMNS
        return Geometry(space, self.how.n_anchors, self.n_support, sided)

    def folds(self, points: "ObservedPoints") -> "HeldOutPoints":
        """The held-out points of all folds, related to the points that their fold left in."""
        geometry = self.geometry(points.space)
        parts = []
        for seen, unseen in self.plan.splits:
            found = replace(geometry, points=points.space[seen]).relate(points.space[unseen])
            # The rows of the data, not of the fold.
            rows = {"anchors": seen[found.anchors], "near": seen[found.near].astype(np.int32)}
            parts.append(replace(found, **rows))
        beyond = self.beyond(points.space, points.metric, max(part.nearest.max() for part in parts))
        if beyond is not None and beyond > FEW:
            warn(beyond_text(beyond))
        return HeldOutPoints(self, parts)

    def beyond(self, space: Space, metric: FittedMetric | None, farthest: float) -> float | None:
        """The fraction of the planned queries that are farther from the data than held-out points are from the points left in."""
        if self.planned is None:
            return None
        there = self.planned if metric is None else metric(self.planned)
        nearest = Neighbors(flat(space.normalized)).nearest(flat(there), 1)[0]
        return float((nearest > farthest).mean())

    def predictions(
        self, folds: "HeldOutPoints", surrogate: Any, progress: Report, finished: Any
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The predictions of the fold surrogates (line 7); none if the deployed surrogate has not seen the data."""
        del surrogate
        recipe = self.how.train_surrogate
        if recipe is None:
            return iter(())
        source = PairFolds(recipe, self.x, self.for_training)
        return fold_predictions(source, folds.folds, progress, finished)

    def tuples(self, points: "ObservedPoints", held_out: "HeldOutPoints") -> Tuples:
        """The calibration tuples (line 10), and the cells that are exact."""
        plan, rows = self.plan, self.plan.point
        found = held_out.found or {"errors": points.error, "predictions": points.prediction}
        errors = found["errors"]
        exact = exact_cells([points.error, errors])
        if exact is not None:
            errors = np.where(exact, np.nan, errors).astype(errors.dtype)
        error = filled_with_means(points.error)
        known = error, plan.splits, self.coordinates, points.metric, self.layout, exact
        tuples = Tuples(
            relation=Relation.cat(held_out.relations),
            point=rows,
            fold=plan.per_tuple(range(len(plan.splits))),
            family=plan.per_tuple(plan.family),
            row=np.arange(len(rows)) if held_out.found else rows,
            errors=errors,
            anchor_errors=found.get("anchor_errors"),
            predictions=found["predictions"],
            points=Points(points.space, self.outputs, *known),
            position=None if plan.position is None else plan.position[rows],
            reach=plan.reach,
        )
        if held_out.found:
            answers = held_out.held_out, held_out.in_sample, held_out.outputs
            warn_of_folds(*answers, points.error, tuples.interpolating_folds)
        usual = with_second_opinion(tuples, self.how.bound_for(self.layout))
        chosen = for_parameters(tuples, usual, self.how)
        return with_user_features(chosen, found.get("user", points.user), self.how)

    def fit_bound(self, tuples: Tuples) -> Any:
        """Line 12."""
        return fit_bound(model_for(self.how, tuples), tuples, self.how.quantile)

    def fit_region(self, tuples: Tuples) -> Any:
        """The threshold of line 16."""
        region = self.how.safe_region.fit(tuples)
        if not (hasattr(region, "support_score") and hasattr(region, "explain")):
            raise TypeError(
                f"{type(self.how.safe_region).__name__}.fit returned {region!r}; return an object with support_score(features) and "
                "explain(features, names)."
            )
        return region

    def fitted(
        self, surrogate: Any, points: "ObservedPoints", tuples: Tuples, bound: Any, region: Any
    ) -> Fitted:
        """What answers queries (lines 13 to 17)."""
        points.probes.check_unchanged()
        known = tuples.points
        self._compare_opinions(surrogate, points, tuples)
        return Fitted(
            quantile=self.how.quantile,
            coordinates=self.coordinates,
            metric=points.metric,
            geometry=self.geometry(points.space),
            error=known.error,
            error_size=np.nanmean(flat(points.error), axis=1),
            process=known.process,
            between=errors_at_levels(known, known.process, flat(filled_with_means(self.outputs))),
            bound=bound,
            region=region,
            typical=tuples.typical(),
            layout=self.layout,
            output_shape=points.prediction.shape[1:],
            mask=self.mask,
            exact=known.exact if getattr(bound, "scalable", True) else None,
            repeats=Repeats.of(self.coordinates(self.inputs), self.outputs),
            schema=self.x.schema if isinstance(self.x, Table) else None,
            output_names=output_names(self.y),
            families=self.plan.family_names,
            beyond=self.beyond(known.space, points.metric, tuples.relation.nearest.max()),
            conformal=ConformalFactors(),
            tuples=tuples,
            probes=points.probes.inputs,
            surrogate=surrogate,
            representation=self.how.representation,
            error_functional=self.how.error_functional,
            limits=self.limits,
            tails=Tails.of(tuples, bound, self.how),
            features=self.how.features,
            user=known.user,
        )

    def _compare_opinions(self, surrogate: Any, points: "ObservedPoints", tuples: Tuples) -> None:
        """Warn if the process is the better model, or if the surrogate was probably trained on the data."""
        alone = self.how.train_surrogate is None
        if alone and warn_if_trained_on(points.prediction, self.outputs):
            return
        comparison, process = compared(tuples, output_names(self.y)), tuples.points.process
        if comparison is None or process is None:
            return
        text, ratio = comparison
        if ratio < CLEARLY:
            warn(
                f"{text}. The bounds use this, but a better surrogate would make them smaller: see assess(x).second_opinion for "
                "its predictions."
            )
        z = flat(points.space.normalized).astype(float)
        if not alone or len(z) < 3 or not isinstance(process, Process):
            return
        mixed = mixed_rows(self.inputs, z)
        asked, rho = rows_like(mixed, self.x), self.how.error_functional
        between = flat(predict(surrogate, self.mask, asked, rho)).astype(float)
        coordinates = self.coordinates(mixed)
        there = coordinates if points.metric is None else points.metric(coordinates)
        opinion = process(flat(there).astype(float))
        warn_of_training_rows(
            abs(flat(points.prediction).astype(float) - flat(self.outputs)),
            abs(between - opinion.mean),
            np.sqrt(process.signal) * opinion.left[:, None],
        )


class ObservedPoints(NamedTuple):
    """All points with the predictions and the observed errors of the deployed surrogate."""

    space: Space
    metric: FittedMetric | None
    error: Float[np.ndarray, " n *field"]
    prediction: Float[np.ndarray, " n *output"]
    probes: Probes
    user: Float[np.ndarray, " n k"] | None


@dataclass
class HeldOutPoints:
    """The held-out points of all folds, and what the fold surrogates predict there.

    The surrogate of a fold is evaluated at the held-out points, at the points that serve as anchors, and at a few more of its
    training points. The tuples of all folds are written into one place: joining fields would take twice the memory.
    """

    pairs: Pairs
    relations: list[Relation]
    found: dict[str, np.ndarray] = field(default_factory=dict)
    held_out: dict[int, Answers] = field(default_factory=dict)
    in_sample: dict[int, Answers] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> Float[np.ndarray, " n"]:
        """A number that stands for the reference output of each row."""
        return sketch(self.pairs.outputs, 1)[:, 0]

    @cached_property
    def folds(self) -> list[Fold]:
        """The rows that each fold is trained on, and the rows at which its predictions are needed."""
        splits, folds = self.pairs.plan.splits, []
        n_few = min(N_IN_SAMPLE, max(20, IN_SAMPLE_NUMBERS // self.pairs.inputs[0].size))
        for number, (seen, unseen) in enumerate(splits):
            few = seen[:: max(1, len(seen) // n_few)]
            asked = np.concatenate([unseen, np.unique(self.relations[number].anchors), few])
            folds.append(Fold(number, len(splits), seen, asked))
        return folds

    def put(self, number: int, prediction: np.ndarray) -> None:
        """Store the errors of one fold, given the predictions of its surrogate (line 8)."""
        fold, relation, pairs = self.folds[number], self.relations[number], self.pairs
        n, asked = len(relation), fold.evaluated_rows
        user = features_of_user(pairs.how, take(pairs.x, asked[:n]), prediction[:n])
        prediction = on_scale(prediction, pairs.how.error_functional)
        used, places = np.unique(relation.anchors, return_inverse=True)
        with add_note_on_error(f"while evaluating the surrogate of {fold}"):
            error = pairs.errors(prediction, asked)
        answers = fold_answers(asked, error, prediction, self.outputs)
        self.held_out[number], self.in_sample[number] = own = answers[:n], answers[n:]
        # In-sample on purpose: at deployment anchor errors are observed, query errors are not.
        of_anchors = filled_with_means(error[n : n + len(used)])
        anchors = anchor_mean(places.reshape(relation.anchors.shape), of_anchors)
        prediction = prediction[:n]
        if pairs.mask is not None:
            prediction = np.nan_to_num(pairs.mask.filled(prediction))
        ends = np.cumsum([len(relation) for relation in self.relations])
        parts = {"errors": error[:n], "anchor_errors": anchors, "predictions": prediction}
        for name, part in (parts if user is None else parts | {"user": user}).items():
            if name not in self.found:
                self.found[name] = np.empty((ends[-1], *part.shape[1:]), part.dtype)
            self.found[name][ends[number] - n : ends[number]] = part
        means = (mean_error(part.error) for part in own)
        logger.info("%s: mean error %.4g held out, %.4g in sample", fold, *means)
