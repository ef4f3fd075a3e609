"""GeoQ: Algorithm 1 from end to end, and what it answers."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq import artifact, border, progress
from geoq.assessment import Assessment, QueryFeatures
from geoq.checkpoint import Checkpoint, of_array, of_folds, of_object
from geoq.coverage import POINTWISE, Finish, Promise, level_factors, ratios
from geoq.crossfit import CalibrationSet, Observations, cross_fit
from geoq.fold_surrogates import (
    FoldSurrogates,
    FreshFolds,
    TrainedFolds,
    is_given,
)
from geoq.folds import FoldPlan, Folds, ForgottenFolds, default_folds
from geoq.geometry import (
    Embedding,
    GeometricFeatures,
    Geometry,
    Relation,
    anchor_error,
)
from geoq.increment import (
    ChecksErrors,
    FieldIncrement,
    HasExpected,
    HasLevels,
    IncrementModel,
    NormScaledIncrement,
    Storable,
    check_quantile,
)
from geoq.indicator import IndicatorIncrement
from geoq.power_law import PowerLawIncrement
from geoq.representation import Representation, Standardization
from geoq.safe_region import DistanceRegion, SafeRegion, SafeRule
from geoq.surrogate import (
    TRAINED,
    Array,
    ErrorFunctional,
    Surrogate,
    TrainSurrogate,
    absolute_error,
    check_callable,
    check_fitted,
    check_pairs,
    chunks,
    evaluate,
    norm_error,
    noting,
    observe,
    relative_norm_error,
    restore,
    take,
    to_tensor,
)

_OWN_MODELS: dict[
    str | None,
    type[NormScaledIncrement | FieldIncrement | PowerLawIncrement | IndicatorIncrement],
] = {
    model.__name__: model
    for model in (
        NormScaledIncrement,
        FieldIncrement,
        PowerLawIncrement,
        IndicatorIncrement,
    )
}
_OWN_REGIONS: dict[str | None, type[SafeRegion | DistanceRegion]] = {
    region.__name__: region for region in (SafeRegion, DistanceRegion)
}
_OWN_ERRORS: dict[str | None, ErrorFunctional] = {
    error.__name__: error for error in (absolute_error, norm_error, relative_norm_error)
}
_COUNTS = ("n_anchors", "n_support", "n_safe", "safe_quantile")
_MODELS = ("surrogate", "train_surrogate")
_FEATURES = ("displacement", "support_distance", "anchor_error", "prediction", "inputs")

# What n_support=None and n_safe=None mean wherever the folds leave so many points: the paper's k.
USUAL_COUNT = 20
# Rows kept to recognise the user's callables by: they must answer the same when asked twice, and after loading.
N_PROBES = 8
# Settings are shown in full up to so many characters, and by their type beyond.
LONGEST_SETTING = 100


def _no_recipe() -> Any:
    raise TypeError(
        "GeoQ got no train_surrogate, the recipe for the surrogates of the folds; pass a function train_surrogate(x, y) that "
        "returns a trained model, or None if the surrogate has never seen the data that fit will get."
    )


@dataclass(eq=False)
class GeoQ:
    r"""Error bound, safe flag and reason for the predictions of a fixed, trained surrogate.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + g_\eta(\psi_{k_a, k}(x))  (eq:anchor_error_decomposition)

    A dataclass with ``get_params`` instead of scikit-learn's ``BaseEstimator``, which ``clone`` accepts just as well:
    importing scikit-learn would nearly double the time of ``import geoq``.

    Attributes:
        surrogate: the trained model, kept fixed, called on batches; None trains it on all data first.
        train_surrogate: ``train_surrogate(x, y)`` returns a fresh surrogate; called once per fold, or once for many
            folds if it is a ``TrainTogether``. ``TrainedFolds`` and ``PredictedFolds`` bring folds that were trained
            elsewhere. None means that no retraining is possible: the data given to ``fit`` were never seen by the
            surrogate, folds only separate queries from anchors, and all errors are the surrogate's own.
        representation: phi, fixed and shared by all folds. None means the standardised input nu(x), a departure from
            the paper, since in raw units the choice of unit decides who is near; ``identity`` is the paper's form.
        error_functional: rho, which error is meant.
        folds: which points are held out together; scikit-learn's splitters serve as well.
        increment_model: g, copied before it is fitted.
        n_anchors: k_a, anchors whose errors are averaged.
        n_support: k, points that the support distance averages over; None means the paper's 20, or as many as the folds
            leave.
        n_safe: K_safe, calibration features that the support score averages over; None as for ``n_support``.
        safe_quantile: alpha_safe, share of the calibration tuples, of the interpolating ones for ``DistanceRegion``, that
            the region contains.
        safe_region: the rule of the safe region; ``SafeRegion`` is the paper's, and the only one that reads ``n_safe``.
    """

    surrogate: Surrogate | None
    train_surrogate: TrainSurrogate | FoldSurrogates | None = field(
        default_factory=_no_recipe  # refused, not defaulted: None is a claim about the data
    )
    _: KW_ONLY
    representation: Representation | None = None
    error_functional: ErrorFunctional = absolute_error
    folds: Folds = field(default_factory=default_folds)
    increment_model: IncrementModel = field(default_factory=PowerLawIncrement)
    n_anchors: int = 1
    n_support: int | None = None
    n_safe: int | None = None
    safe_quantile: float = 0.95
    safe_region: SafeRule = DistanceRegion

    def fit(
        self,
        x: Array,
        y: Array,
        *,
        groups: Sequence[Any] | None = None,
        checkpoint: str | Path | None = None,
    ) -> "GeoQ":
        """Calibrate on pairs of inputs and reference outputs (lines 1-12).

        Args:
            x: inputs, one per row, of any shape.
            y: reference outputs, one per row, of any shape.
            groups: a label per row, for fold schemes that hold out whole groups.
            checkpoint: a folder that keeps each finished fold. A run that was killed and is started again goes on from
                there, and ends as it would have ended.

        Raises:
            ValueError: x, y or a setting is unusable, or the checkpoint is that of another calibration; said before any
                training starts.
        """
        # On a copy, so that an interrupted or refused fit leaves the estimator as it was.
        fitted = copy.copy(self)
        fitted._fit(x, y, None if groups is None else np.asarray(groups), checkpoint)
        vars(self).update(vars(fitted))
        return self

    def _fit(
        self,
        x: Array,
        y: Array,
        groups: np.ndarray | None,
        checkpoint: str | Path | None,
    ) -> None:
        inputs = self._check_arguments(x, y)
        self.normalization_ = Standardization.fit(inputs)
        embedding = self._embed(x)
        points = embedding.normalized.reshape(len(embedding), -1).cpu().numpy()
        plan = FoldPlan.draw(self.folds, points, groups)
        self.n_support_ = _usual(self.n_support, plan.fewest_left_in)
        self.n_safe_ = _usual(self.n_safe, plan.n_independent)
        plan.check(
            n_anchors=self.n_anchors,
            n_support=self.n_support_,
            n_safe=self.safe_region.n_others(self.n_safe_),
        )
        border.warn_if_few(self.increment_model, plan.n_units)
        border.check_shapes(
            self.increment_model, self.error_functional, y[:N_PROBES], embedding
        )
        kept = self._open(checkpoint, x, y, embedding, plan)
        if self.surrogate is not None:
            border.check_repeats(self.surrogate, x[:N_PROBES])
        # One unit per training, one for the increment model and one for the safe region.
        with progress.bar(len(plan.splits) + 2 + (self.surrogate is None)):
            self._calibrate(Observations(x, y, embedding), plan, kept)
        evenly = np.linspace(0, len(x) - 1, min(N_PROBES, len(x))).astype(int)
        self.probes_ = take(x, torch.from_numpy(evenly))

    def _calibrate(
        self, data: Observations, plan: FoldPlan, checkpoint: Checkpoint | None
    ) -> None:
        """Surrogate, cross-fitted tuples, increment model and safe region (lines 1 and 4-12)."""
        self.surrogate_ = (
            self._train_deployed(data.x, data.y)
            if self.surrogate is None
            else self.surrogate
        )
        prediction, error = observe(
            self.surrogate_, self.error_functional, data.x, data.y
        )
        self.error_ = error.to(data.embedding.z)
        if isinstance(self.increment_model, ChecksErrors):
            self.increment_model.check_errors(prediction.to(self.error_), self.error_)
        self.error_size_ = _size(self.error_)
        self.geometry_ = Geometry(
            data.embedding, n_anchors=self.n_anchors, n_support=self.n_support_
        )
        self.calibration_ = cross_fit(
            data,
            plan,
            fold_surrogates=self._fold_surrogates(len(plan.splits)),
            error_functional=self.error_functional,
            n_anchors=self.n_anchors,
            n_support=self.n_support_,
            checkpoint=checkpoint,
        )
        with progress.stage("increment model"):
            self.increment_model_ = copy.deepcopy(self.increment_model).fit(
                self.calibration_
            )
        with progress.stage("safe region"):
            self.safe_region_ = self.safe_region.fit(
                self.calibration_, n_safe=self.n_safe_, safe_quantile=self.safe_quantile
            )
        self.finish_ = Finish()

    def _fold_surrogates(self, n_folds: int) -> FoldSurrogates:
        if self.train_surrogate is None:
            # Every fold is served by the deployed surrogate, which saw none of these data.
            return TrainedFolds([self.surrogate_] * n_folds)
        if isinstance(self.train_surrogate, FoldSurrogates):
            return self.train_surrogate
        return FreshFolds(self.train_surrogate)

    def _open(
        self,
        folder: str | Path | None,
        x: Array,
        y: Array,
        embedding: Embedding,
        plan: FoldPlan,
    ) -> Checkpoint | None:
        """The checkpoint in the folder, refused unless it is of these data, folds and settings."""
        # What nobody trains need not be kept.
        if folder is None or is_given(self.train_surrogate):
            return None
        facts = {
            "x": of_array(x),
            "y": of_array(y),
            "representation of x": of_array(embedding.z),
            "folds": of_folds(plan),
            "n_anchors": str(self.n_anchors),
            "train_surrogate": of_object(self.train_surrogate),
        }
        return Checkpoint.open(folder, facts)

    def assess(self, x: Array) -> Assessment:
        """Error bound, safe flag and their parts at each query (lines 13-17)."""
        parts = list(self._answers(x))
        arrays = {
            name: restore(torch.cat([part[name] for part in parts]), x)
            for name in parts[0]
        }
        features = QueryFeatures(
            arrays.pop("displacement"), arrays.pop("support_distance")
        )
        return Assessment(
            **arrays,
            features=features,
            threshold=self.safe_region_.threshold,
            meaning=self.safe_region_.meaning,
            typical_distance=self.calibration_.typical_distance,
            typical_support_distance=self.calibration_.typical_support_distance,
        )

    def predict(self, x: Array) -> Array:
        """The error bound of each query, not the surrogate's prediction.

        It is ``assess(x).error_hat``, without keeping the rest in memory; what the surrogate itself answers is
        ``assess(x).prediction``.
        """
        return restore(torch.cat([part["error_hat"] for part in self._answers(x)]), x)

    def predict_expected(self, x: Array) -> Array:
        """The expected error at each query: no bound, but the sharper map of where a field is wrong.

        Raises:
            TypeError: the increment model knows nothing but a quantile.
        """
        check_fitted(self, "probes_")
        model = self.increment_model_
        if not isinstance(model, HasExpected):
            raise TypeError(
                f"{type(model).__name__} knows an upper quantile of the error and not its mean; for errors that take one of "
                "two values use IndicatorIncrement, for others look at predict_levels(x, (0.5,))."
            )
        parts = [model.expected(features) for _, features in self._views(x)]
        return restore(torch.cat(parts), x)

    def _answers(self, x: Array) -> Iterator[dict[str, Tensor]]:
        """Answers to chunks of queries, as tensors by the names of ``Assessment`` and of psi."""
        for relation, features in self._views(x):
            score = self.safe_region_.support_score(features)
            safe = self.safe_region_.contains(score)
            increment = self._increment(features, safe)
            yield {
                "prediction": features.prediction,
                "error_hat": features.anchor_error + increment,
                "safe": safe,
                "support_score": score,
                "anchor_error": features.anchor_error,
                "increment": increment,
                "anchors": relation.anchors,
                "anchor_distance": relation.anchor_distance,
                "observed_error": self.error_size_[relation.anchors],
                "displacement": relation.displacement,
                "support_distance": relation.support_distance,
            }

    def _views(self, x: Array) -> Iterator[tuple[Relation, GeometricFeatures]]:
        """Chunks of queries, their anchors, and all that is known of them (line 14)."""
        self._check_queries(x)
        row_numbers = max(
            x[:1].size if isinstance(x, np.ndarray) else x[:1].numel(),
            self.error_[:1].numel(),
        )
        for rows in chunks(len(x), row_numbers):
            queries = self._embed(x[rows])
            relation = self.geometry_.relate(queries)
            prediction = evaluate(self.surrogate_, x[rows], "surrogate").to(queries.z)
            yield (
                relation,
                GeometricFeatures(
                    relation.displacement,
                    relation.support_distance,
                    anchor_error(relation.anchors, self.error_),
                    prediction,
                    inputs=queries.normalized,
                ),
            )

    def _increment(self, features: GeometricFeatures, safe: Tensor) -> Tensor:
        """g, and what the finish adds to it or takes from it."""
        increment = self.increment_model_(features)
        if self.finish_ == Finish():
            return increment
        baseline = features.anchor_error
        finished = self.finish_(baseline + increment, safe) - baseline
        rests_on_anchors = getattr(self.increment_model_, "rests_on_anchors", True)
        return finished.clamp(min=0) if rests_on_anchors else finished

    def conformalize(
        self, x: Array, y: Array, *, promise: Promise = POINTWISE
    ) -> "GeoQ":
        """Make the bound hold at its level on pairs set aside, which neither surrogate nor calibration has seen.

        One factor for safe queries and one for the others. For queries exchangeable with the pairs, a safe one's error
        is within its bound with at least the probability ``quantile`` of the increment model; of a field, that share of
        the values is expected to be. ``WholeField(0.9)`` promises that share for nine fields out of ten instead. A
        further call starts from the bound without a finish.

        Raises:
            ValueError: the pairs are unusable, or too few of them are safe to promise anything.
            TypeError: the increment model gives verdicts, or the promise is none.
        """
        check_fitted(self, "probes_")
        if isinstance(promise, type) or not isinstance(promise, Promise):
            raise TypeError(
                f"promise={promise!r} promises nothing; pass an object such as promise=WholeField(0.9)."
            )
        check_pairs(x, y)
        if isinstance(self.increment_model_, HasLevels):
            raise TypeError(
                f"{type(self.increment_model_).__name__} gives verdicts, which no factor makes hold more often; choose a "
                "higher quantile for it, or look at several by predict_levels."
            )
        plain = copy.copy(self)
        plain.finish_ = Finish()
        assessment = plain.assess(x)
        _, error = observe(self.surrogate_, self.error_functional, x, y)
        bound, safe = (
            to_tensor(part, "assessment")
            for part in (assessment.error_hat, assessment.safe)
        )
        ratio = ratios(error.to(bound), bound)
        self.finish_ = Finish.fit(ratio, safe.bool(), self._level, promise)
        return self

    def predict_levels(
        self, x: Array, levels: Sequence[float] | Array
    ) -> dict[float, Array]:
        """Bounds of several levels at once, by level; they never cross.

        The bound itself, scaled by how the errors of the calibration spread around it; apart for safe queries and the
        others. Verdicts are judged anew at each level.
        """
        check_fitted(self, "probes_")
        if np.ndim(levels) != 1:
            raise TypeError(f"levels={levels!r}; pass several, for example (0.5, 0.9).")
        # In single precision 0.9 is 0.8999999762, and nobody would find its bound by that name.
        levels = [
            level if isinstance(level, float) else float(f"{float(level):.7g}")
            for level in levels
        ]
        if isinstance(self.increment_model_, HasLevels):
            return {level: self._at_level(level).predict(x) for level in levels}
        features, error = self.calibration_.features, self.calibration_.error
        safe = self.safe_region_.contains(self.safe_region_.support_score(features))
        bound = features.anchor_error + self.increment_model_(features)
        factors = level_factors(ratios(error, bound), safe, levels, self._level)
        parts = [
            [scale(part["error_hat"], part["safe"]) for scale in factors]
            for part in self._answers(x)
        ]
        bounds = (torch.cat(of_level) for of_level in zip(*parts, strict=True))
        return {
            level: restore(bound, x)
            for level, bound in zip(levels, bounds, strict=True)
        }

    def _at_level(self, level: float) -> "GeoQ":
        assert isinstance(self.increment_model_, HasLevels)
        other = copy.copy(self)
        other.increment_model_ = self.increment_model_.at_level(level)
        return other

    @property
    def _level(self) -> float:
        """The level that the increment model was asked for."""
        quantile = getattr(self.increment_model_, "quantile", None)
        if not isinstance(quantile, Real):
            raise TypeError(
                f"the level of a bound is its increment model's attribute quantile, but {self.increment_model_!r} has "
                "none; give it one."
            )
        return float(quantile)

    def _embed(self, x: Array) -> Embedding:
        """Phi and nu of the inputs (lines 3 and 4)."""
        mean = self.normalization_.mean
        normalized = self.normalization_(to_tensor(x, "x").to(mean))
        if self.representation is None:
            return Embedding(z=normalized, normalized=normalized)
        return Embedding(
            evaluate(self.representation, x, "representation").to(mean), normalized
        )

    def _train_deployed(self, x: Array, y: Array) -> Surrogate:
        assert callable(self.train_surrogate)
        with noting("while training the deployed surrogate on all data"):
            with progress.stage("deployed surrogate"):
                surrogate: Surrogate = self.train_surrogate(x, y)
            check_callable(surrogate, TRAINED)
        return surrogate

    def _check_arguments(self, x: Array, y: Array) -> Tensor:
        """Everything that can be known to be wrong before anything is computed; returns the inputs."""
        check_quantile(self.safe_quantile, "safe_quantile")
        for name in ("n_anchors", "n_support", "n_safe"):
            count = getattr(self, name)
            if count is not None or name == "n_anchors":
                border.check_count(count, name, "neighbours")
        border.check_parts(self.increment_model, self.safe_region)
        border.check_models(
            self.surrogate,
            self.train_surrogate,
            self.representation,
            self.error_functional,
        )
        return border.inputs_of(x, y, self.surrogate)

    def _check_callables(self) -> None:
        """At each call, since a module may have been switched back to training mode."""
        check_callable(self.surrogate_, "surrogate")
        if self.representation is not None:
            check_callable(self.representation, "representation")

    def _check_queries(self, x: Array) -> None:
        check_fitted(self, "probes_")
        self._check_callables()
        border.check_queries(x, tuple(self.normalization_.mean.shape))

    def save(self, path: str | Path) -> None:
        """Write the calibrated estimator to one file of arrays and numbers; callables are not in it.

        A fingerprint of the callables is: what they answer on a few stored inputs.
        """
        artifact.write(path, *self.state())

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The numbers and arrays that ``save`` writes."""
        check_fitted(self, "probes_")
        model: str | None = None
        settings: dict[str, Any] = {}
        weights: dict[str, Tensor] = {}
        if isinstance(self.increment_model_, Storable):
            model = type(self.increment_model_).__name__
            settings, weights = self.increment_model_.state()
        region = type(self.safe_region_).__name__
        if region not in _OWN_REGIONS:
            raise ValueError(
                f"a safe region of the user's own ({region}) cannot be saved; use one of {[*_OWN_REGIONS]}."
            )
        numbers = {
            # As fitted: the constructor's arguments may have been changed since.
            "n_anchors": self.geometry_.n_anchors,
            "n_support": self.geometry_.n_support,
            "n_safe": int(self.n_safe_),
            "finish": [self.finish_.safe, self.finish_.unsafe],
            "safe_quantile": float(self.safe_quantile),
            "threshold": self.safe_region_.threshold,
            "safe_region": region,
            "reach": self.calibration_.reach,
            "numpy": isinstance(self.probes_, np.ndarray),
            "cuda": self.error_.is_cuda,
            "increment_model": model,
            "increment_settings": settings,
            "folds": repr(self.folds),
            "error_functional": getattr(self.error_functional, "__name__", None),
        }
        arrays = {
            "mean": self.normalization_.mean,
            "scale": self.normalization_.scale,
            "error": self.error_,
            "points.z": self.geometry_.points.z,
            **_prefixed("increment", weights),
            **{
                f"calibration.{name}": getattr(self.calibration_, name)
                for name in ("error", "point", "fold", "family")
            },
            **_prefixed(
                "features",
                dict(zip(_FEATURES, self.calibration_.features.parts, strict=True)),
            ),
            **_prefixed("probe", self._fingerprint()),
        }
        if not self.geometry_.points.shared:
            arrays["points.normalized"] = self.geometry_.points.normalized
        if self.calibration_.position is not None:
            arrays["calibration.position"] = self.calibration_.position
        return numbers, arrays

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Representation | None = None,
        increment_model: IncrementModel | None = None,
        error_functional: ErrorFunctional | None = None,
    ) -> "GeoQ":
        """Read a calibrated estimator; it answers bit for bit as the saved one did.

        Args:
            path: a file that ``save`` wrote.
            surrogate: the model that the file was calibrated for.
            representation: the representation that it was calibrated with, if any.
            increment_model: the fitted increment model, where it was one of the user's own.
            error_functional: the error functional, where it was one of the user's own; only ``conformalize`` reads it.

        Raises:
            ValueError: the file is truncated, altered or foreign, or a callable is not the one it was made with.
        """
        numbers, stored = artifact.read(path)
        if "estimator" in numbers:
            raise ValueError(
                f"{path} holds a {numbers['estimator']}; load it with {numbers['estimator']}.load."
            )
        arrays = artifact.placed(numbers, stored)
        if error_functional is not None:
            check_callable(error_functional, "error_functional")
        geoq = cls(
            surrogate,
            None,
            representation=representation,
            error_functional=error_functional
            or _OWN_ERRORS.get(numbers["error_functional"], _lost_error_functional),
            folds=ForgottenFolds(numbers["folds"]),
            **{name: numbers[name] for name in _COUNTS},
        )
        geoq._restore(numbers, arrays, increment_model)
        return geoq

    def _restore(
        self,
        numbers: dict[str, Any],
        arrays: dict[str, Tensor],
        increment_model: IncrementModel | None,
    ) -> None:
        assert self.surrogate is not None
        self.surrogate_ = self.surrogate
        self.normalization_ = Standardization(arrays["mean"], arrays["scale"])
        self.error_ = arrays["error"]
        self.error_size_ = _size(self.error_)
        z = arrays["points.z"]
        points = Embedding(z, arrays.get("points.normalized", z))
        self.geometry_ = Geometry(
            points, n_anchors=self.n_anchors, n_support=numbers["n_support"]
        )
        self.finish_ = Finish(*numbers["finish"])
        self.n_support_, self.n_safe_ = numbers["n_support"], numbers["n_safe"]
        self.calibration_ = CalibrationSet(
            features=GeometricFeatures(
                *(arrays[f"features.{name}"] for name in _FEATURES)
            ),
            error=arrays["calibration.error"],
            point=arrays["calibration.point"],
            fold=arrays["calibration.fold"],
            family=arrays["calibration.family"],
            position=arrays.get("calibration.position"),
            reach=numbers["reach"],
        )
        own = _OWN_MODELS.get(numbers["increment_model"])
        if own is not None and increment_model is not None:
            raise ValueError(
                f"the file holds its own increment model ({numbers['increment_model']}); leave increment_model out."
            )
        if own is None and increment_model is None:
            raise ValueError(
                "the file was saved with an increment model of the user's own, which is not in it; "
                "pass the fitted one as increment_model."
            )
        weights = {
            name.removeprefix("increment."): a
            for name, a in arrays.items()
            if name.startswith("increment.")
        }
        fitted = (
            own.from_state(numbers["increment_settings"], weights)
            if own is not None
            else increment_model
        )
        assert fitted is not None
        self.increment_model = self.increment_model_ = fitted
        self.safe_region = _OWN_REGIONS[numbers["safe_region"]]
        self.safe_region_ = self.safe_region.at(
            self.calibration_, n_safe=self.n_safe_, threshold=numbers["threshold"]
        )
        probes = arrays["probe.x"]
        self.probes_ = probes.cpu().numpy() if numbers["numpy"] else probes
        present = self._fingerprint()
        for name in ("surrogate", "representation", "increment_model"):
            artifact.check_same(name, present.get(name), arrays.get(f"probe.{name}"))

    def _fingerprint(self) -> dict[str, Tensor]:
        """Stored inputs, and what the callables answer on them."""
        self._check_callables()
        answers = {
            "x": _raw(self.probes_),
            "surrogate": evaluate(self.surrogate_, self.probes_, "surrogate"),
        }
        if self.representation is not None:
            answers["representation"] = evaluate(
                self.representation, self.probes_, "representation"
            )
        if not isinstance(self.increment_model_, Storable):
            answers["increment_model"] = self.increment_model_(
                self.calibration_.features[:N_PROBES]
            )
        return answers

    def __repr__(self) -> str:
        usual = GeoQ(None, None).get_params()
        parts = [
            f"{name}={_name(value)}" if name in _MODELS else f"{name}={_short(value)}"
            for name, value in self.get_params().items()
            if name in _MODELS or repr(value) != repr(usual[name])
        ]
        state = "fitted" if hasattr(self, "probes_") else "not fitted"
        return f"GeoQ({', '.join(parts)}), {state}"

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 (scikit-learn's signature)
        """The constructor's arguments, as scikit-learn's ``clone`` asks for them."""
        del deep
        return {
            argument.name: getattr(self, argument.name) for argument in fields(self)
        }

    def set_params(self, **params: Any) -> "GeoQ":
        """Change constructor arguments."""
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(
                    f"GeoQ has no parameter {name!r}; it has {', '.join(self.get_params())}."
                )
            setattr(self, name, value)
        return self


def _name(part: object) -> str:
    """A function or class by its name, an object by that of its type."""
    if part is None:
        return "None"
    return str(getattr(part, "__qualname__", type(part).__name__))


def _short(value: object) -> str:
    text = _name(value) if hasattr(value, "__qualname__") else repr(value)
    flat = len(text) <= LONGEST_SETTING and "\n" not in text
    return text if flat else f"{_name(value)}(...)"


def _lost_error_functional(_y: Array, _prediction: Array) -> Array:
    raise ValueError(
        "the file was calibrated with an error functional of the user's own, which is not in it; "
        "pass it to load as error_functional."
    )


def _usual(count: int | None, allowed: int) -> int:
    """The count asked for, or the usual one where the folds allow it."""
    # At least 1, so that points without independent others are refused in the plan's words.
    return max(1, min(USUAL_COUNT, allowed)) if count is None else count


def _size(error: Float[Tensor, " n *field"]) -> Float[Tensor, " n"]:
    """The error of each point, averaged over its field."""
    return error.reshape(len(error), -1).mean(dim=1)


def _prefixed(prefix: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def _raw(array: Array) -> Tensor:
    """The array as a tensor of its own dtype."""
    return (
        torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        if isinstance(array, np.ndarray)
        else array.detach()
    )
