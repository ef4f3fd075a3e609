"""Answers to queries: their coordinates, anchors and features (lines 3, 4 and 14), flags and bounds (lines 15 and 16)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geoq.arrays import Array, Rows, chunks, restore, to_tensor
from geoq.checks import check_fitted, check_rows
from geoq.columns import ColumnCoordinates
from geoq.conformal import ConformalFactors, factors_of
from geoq.geometry import Embedding, GeometricFeatures, Relation, anchor_error
from geoq.increments.protocol import HasLevels, IncrementModel
from geoq.masks import hidden
from geoq.preparation import check_fitted_callables
from geoq.regions.safe_region import Explains, Explanations, flags_of
from geoq.surrogate import answers_of
from geoq.table import input_rows, is_frame
from geoq.unanswered import (
    blank,
    either,
    rows_not_finite,
    unusable_rows,
    with_stand_in,
)

if TYPE_CHECKING:
    from geoq.estimator import GeoQ


class View(NamedTuple):
    """Some queries, related to the data.

    Attributes:
        relation: their anchors.
        features: their features; a query without an answer has the features of a stand-in.
        prediction: what the surrogate returned, nan for queries that it did not receive.
        lost: which queries have no answer; None if all have one.
        absent: which cells of the prediction are absent; None if none are.
    """

    relation: Relation
    features: GeometricFeatures
    prediction: Tensor
    lost: Tensor | None
    absent: Tensor | None

    def blank(self, values: Tensor) -> Tensor:
        """The values, with nan in the lost rows, and in the absent cells of fields of the shape of the prediction."""
        if self.absent is not None and values.shape == self.absent.shape:
            values = values.masked_fill(self.absent, torch.nan)
        return blank(values, self.lost)


def query_rows(geoq: "GeoQ", x: Any) -> Any:
    """Queries as rows; refused unless they have the columns of ``fit``."""
    check_fitted(geoq, "probes_")
    if geoq.schema_ is not None:
        return geoq.schema_.table(x)
    if is_frame(x):
        raise TypeError(
            "x is a data frame, but GeoQ was fitted on an array; pass x.to_numpy() with the columns in the order of fit."
        )
    return input_rows(x)


def embed(geoq: "GeoQ", x: Rows, coordinates: Tensor) -> Embedding:
    """Phi and nu of the inputs, or their coordinates in the metric (lines 3 and 4)."""
    if geoq.metric_ is not None:
        z = geoq.metric_(coordinates)
        return Embedding(z, normalized=z, inputs=coordinates)
    assert callable(geoq.representation)
    z = answers_of(geoq.representation, x, "representation").to(coordinates)
    return Embedding(z, coordinates)


def coordinates_of(geoq: "GeoQ", x: Rows) -> Tensor:
    """T of the inputs."""
    return geoq.coordinates_(to_tensor(x, "x").to(geoq.coordinates_.mean))


def views(geoq: "GeoQ", x: Rows) -> Iterator[View]:
    """Chunks of queries with their anchors and features (line 14)."""
    check_fitted_callables(geoq)
    shape = geoq.coordinates_.input_shape
    check_rows(x, "x", shape, "GeoQ was fitted on rows", "query")
    row_numbers = max(int(np.prod(shape)), geoq.error_[:1].numel())
    for rows in chunks(len(x), row_numbers):
        yield _view(geoq, x[rows])


def _view(geoq: "GeoQ", x: Rows) -> View:
    coordinates = coordinates_of(geoq, x)
    inputs = to_tensor(x, "x")
    if isinstance(geoq.coordinates_, ColumnCoordinates):
        missing = geoq.coordinates_.newly_missing(inputs)
        unusable = missing.any(dim=1) if missing.any() else None
    else:
        unusable = unusable_rows(coordinates, inputs)
    if unusable is not None:
        x = with_stand_in(x, unusable, geoq.probes_[:1])
        coordinates = coordinates_of(geoq, x)
    queries = embed(geoq, x, coordinates)
    prediction, absent = _prediction(geoq, x, queries.z)
    failed = rows_not_finite(prediction)
    finite = prediction if failed is None else prediction.nan_to_num(0.0, 0.0, 0.0)
    if geoq.metric_ is None and (bad := rows_not_finite(queries.z)) is not None:
        failed = either(failed, bad)
        z = queries.z.nan_to_num(0.0, 0.0, 0.0)
        queries = Embedding(z, queries.normalized, queries.inputs)
    relation = geoq.geometry_.relate(queries)
    features = GeometricFeatures(
        relation.displacement,
        relation.support_distance,
        anchor_error(relation.anchors, geoq.error_),
        finite,
        inputs=queries.coordinates,
        neighborhood=relation.neighborhood,
    )
    lost = either(unusable, failed)
    if absent is not None:
        prediction = prediction.masked_fill(absent, torch.nan)
    return View(relation, features, blank(prediction, unusable), lost, absent)


def _prediction(geoq: "GeoQ", x: Rows, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The predictions, and which cells are absent from them; a prediction without any cell stays nan."""
    mask = geoq.mask_
    if mask is None or mask.fill is None:
        return answers_of(geoq.surrogate_, x, "surrogate").to(like), None
    deployed: Any = geoq.surrogate_
    prediction = answers_of(deployed.with_gaps, x, "surrogate").to(like)
    cells, fill = (torch.as_tensor(part) for part in (mask.cells, mask.fill))
    absent = prediction.isnan()
    absent &= ~(absent | cells).flatten(1).all(dim=1).reshape(-1, *(1,) * cells.ndim)
    return torch.where(absent, fill.to(prediction), prediction), absent


def flags(geoq: "GeoQ", x: Rows) -> Iterator[tuple[View, Tensor, Tensor]]:
    """Chunks of queries with their support scores (line 15) and safe flags (line 16)."""
    for view in views(geoq, x):
        score, safe = flags_of(geoq.safe_region_, view.features)
        score = blank(score, view.lost)
        changed = geoq.coordinates_.changed_rows(view.features.inputs)
        if changed is not None:
            # An input that never varied has an unknown effect, whatever the region measures.
            score, safe = score.masked_fill(changed, torch.inf), safe & ~changed
        yield view, score, blank(safe, view.lost)


def answers(geoq: "GeoQ", x: Rows) -> Iterator[dict[str, Tensor]]:
    """Answers to chunks of queries, as tensors by the names of ``Assessment`` and of psi."""
    explains = explainer(geoq)
    for view, score, safe in flags(geoq, x):
        relation, features, prediction, lost, _ = view
        # Line 16: the bound.
        increment = increment_of(geoq, geoq.increment_model_, features, safe)
        parts = {
            "error_hat": features.anchor_error + increment,
            "safe": safe,
            "support_score": score,
            "anchor_error": features.anchor_error,
            "increment": increment,
            "anchors": relation.anchors,
            "anchor_distance": relation.anchor_distance,
            "observed_error": geoq.error_size_[relation.anchors],
            "displacement": relation.displacement,
            "support_distance": relation.support_distance,
        }
        parts |= {} if explains is None else {"inputs": features.inputs}
        parts = {name: view.blank(part) for name, part in parts.items()}
        none = torch.zeros_like(safe)
        yield parts | {"prediction": prediction, "lost": none if lost is None else lost}


def increment_of(
    geoq: "GeoQ", model: IncrementModel, features: GeometricFeatures, safe: Tensor
) -> Tensor:
    """The increments with the conformal factors, and 0 in exact coordinates."""
    increment = geoq.conformal_factors_.increment(model, features, safe)
    return zero_if_exact(geoq, increment)


def zero_if_exact(geoq: "GeoQ", values: Tensor) -> Tensor:
    """The values, with 0 in the coordinates in which all errors of the data are zero."""
    return values if geoq.exact_ is None else values.masked_fill(geoq.exact_, 0)


def restored(geoq: "GeoQ", parts: Sequence[Tensor], like: Rows) -> Array:
    """Chunks of fields as one array of the user's kind, with the mask of y."""
    return hidden(geoq.mask_, restore(torch.cat([*parts]), like))


def explainer(geoq: "GeoQ") -> Explains | None:
    """What explains the flags: the safe region, or the coordinates if an input is constant."""
    if isinstance(geoq.safe_region_, Explains):
        return geoq.safe_region_
    return geoq.coordinates_ if geoq.coordinates_.constant.any() else None


def explained(geoq: "GeoQ", x: Rows, answers: dict[str, Tensor]) -> Explanations | None:
    """What explains the flags of these queries; takes their coordinates out of the answers."""
    explains = explainer(geoq)
    if explains is None:
        return None
    inputs, prediction = answers.pop("inputs"), answers["prediction"]
    return Explanations(explains, geoq.coordinates_, inputs, x, prediction)


def level_bounds(
    geoq: "GeoQ", x: Rows, levels: Sequence[float]
) -> dict[float, list[Tensor]]:
    """The bounds of chunks of queries by quantile level."""
    model = geoq.increment_model_
    # One search and one prediction serve all levels.
    if isinstance(model, HasLevels):
        models: list[IncrementModel] = [model.at_level(level) for level in levels]
        factors = [ConformalFactors()] * len(levels)
    else:
        models = [model] * len(levels)
        factors = factors_of(
            geoq.calibration_, geoq.safe_region_, model, levels, geoq.exact_
        )
    parts: dict[float, list[Tensor]] = {level: [] for level in levels}
    for view, _, safe in flags(geoq, x):
        for level, m, factor in zip(levels, models, factors, strict=True):
            increment = increment_of(geoq, m, view.features, safe)
            bound = factor(view.features.anchor_error + increment, safe)
            parts[level].append(view.blank(bound))
    return parts
