"""What GeoQ does before the first training: refuse unusable arguments, and open the checkpoint."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq import scratch
from geoq.arrays import Rows, chunks, converted, to_tensor
from geoq.checks import (
    check_array_kind,
    check_callable,
    check_count,
    check_finite,
    check_outputs_unit,
    check_pairs,
    warn,
)
from geoq.fold_plan import FoldPlan
from geoq.increments.protocol import (
    ChecksErrors,
    check_increment_model,
    check_shapes,
    warn_if_few,
)
from geoq.increments.two_laws import TwoLawIncrement
from geoq.masks import MaskedSurrogate, without_absent
from geoq.metric import FittedMetric, Metric, predictor
from geoq.probing import N_PROBES, Probes
from geoq.regions.safe_region import NeedsNeighbors, Region
from geoq.settings import check_object
from geoq.surrogate import answers_of, errors_of, evaluate, observe, relative_norm_error
from geoq.table import Table, check_same_order, listed, values
from geoq.training.checkpoint import Checkpoint, FinishedFolds, folds_id
from geoq.training.fold_surrogates import check_models, is_pretrained
from geoq.training.loop import Training
from geoq.training.recipe_id import array_id

if TYPE_CHECKING:
    from geoq.estimator import GeoQ

# The paper's k, used for n_support=None if the folds leave enough points.
USUAL_COUNT = 20
# The memory that ``TwoLawIncrement`` needs at most, relative to the data.
IN_MEMORY_FACTOR = 16
# A root mean squared error below this fraction of the standard deviation of y is as small as at training points.
IMPLAUSIBLE = 1e-5


def no_recipe() -> Any:
    """Refuse a missing recipe: ``train_surrogate=None`` is a statement about the data."""
    raise TypeError(
        "GeoQ needs train_surrogate, the recipe for the fold surrogates; pass a function train_surrogate(x, y) that returns a "
        "trained model, or None if the surrogate has never seen the data that fit will receive."
    )


def check_arguments(geoq: "GeoQ", x: Rows, y: Rows) -> Tensor:
    """Refuse unusable settings and data before anything is computed; returns the inputs."""
    check_count(geoq.n_anchors, "n_anchors")
    if geoq.n_support is not None:
        check_count(geoq.n_support, "n_support")
    if geoq.representation is None:
        raise TypeError(
            "representation=None: representation must be a metric or a function; leave it out for SensitivityMetric(), or pass "
            "StandardizedMetric() or a function phi(x)."
        )
    if isinstance(geoq.representation, type) and isinstance(
        geoq.representation, Metric
    ):
        name = geoq.representation.__name__
        raise TypeError(
            f"representation is the class {name}, but an object is needed; pass {name}()."
        )
    check_increment_model(geoq.increment_model)
    _check_memory(geoq, x, y)
    check_object(
        geoq.safe_region, Region, "safe_region", "DistanceRegion(quantile=0.95)"
    )
    check_models(
        geoq.surrogate,
        geoq.train_surrogate,
        None if isinstance(geoq.representation, Metric) else geoq.representation,
        geoq.error_functional,
    )
    inputs, outputs = check_pairs(x, y)
    if isinstance(getattr(geoq.increment_model, "training", None), Training):
        # Networks work in single precision, on errors and on displacements of a representation.
        check_outputs_unit(outputs, "y", torch.float32)
        if not isinstance(geoq.representation, Metric):
            check_outputs_unit(inputs, "x", torch.float32)
    check_same_order(x, y)
    if isinstance(x, Table):
        check_missing(geoq, x)
    elif isinstance(geoq.surrogate, nn.Module):
        assert not isinstance(y, Table)
        check_array_kind(geoq.surrogate, x, "surrogate", "x")
        check_array_kind(geoq.surrogate, y, "surrogate", "y")
    if geoq.error_functional is relative_norm_error:
        zero = (outputs == 0).reshape(len(outputs), -1).all(dim=1).nonzero()[:, 0]
        if len(zero):
            raise ValueError(
                f"error_functional=relative_norm_error divides by the norm of y, but y[{int(zero[0])}] is zero ({len(zero)} of "
                f"{len(outputs)} rows are); remove these rows, or use norm_error."
            )
    dtype = torch.promote_types(inputs.dtype, outputs.dtype)
    return converted(inputs, inputs[:1].to(dtype))


def _check_memory(geoq: "GeoQ", x: Rows, y: Rows) -> None:
    """Refuse the default increment model for data that are larger than the memory that it needs."""
    if not scratch.in_use() or not isinstance(geoq.increment_model, TwoLawIncrement):
        return
    needed = IN_MEMORY_FACTOR * scratch.n_bytes(values(x), values(y))
    available = scratch.physical_memory()
    if needed > available:
        raise ValueError(
            f"TwoLawIncrement needs all inputs and outputs in memory, about {needed / 2**30:.3g} GiB, but the machine has "
            f"{available / 2**30:.3g} GiB; pass increment_model=FieldScaleIncrement(), or fewer rows."
        )


def check_missing(geoq: "GeoQ", x: Table) -> None:
    """Refuse missing values that the surrogate does not accept. A surrogate that is still to be trained is not called."""
    missing = x.missing()
    if not missing or geoq.surrogate is None:
        return
    rows = np.flatnonzero(np.isnan(x.array).any(axis=1))[:N_PROBES]
    try:
        evaluate(geoq.surrogate, x[rows], "surrogate")
    except (ValueError, TypeError) as exc:
        raise ValueError(
            f"x has missing values in {listed(missing)}, and surrogate failed on them ({exc}); remove or impute these rows, or "
            "use a model that accepts missing values."
        ) from exc


def check_problem(geoq: "GeoQ", x: Rows, y: Rows, plan: FoldPlan) -> int:
    """Refuse folds that leave too few points, and shapes and surrogates that do not fit; returns k, the ``n_support``."""
    usual = max(1, min(USUAL_COUNT, plan.fewest_left_in))
    n_support = usual if geoq.n_support is None else geoq.n_support
    plan.check(n_anchors=geoq.n_anchors, n_support=n_support)
    if isinstance(geoq.safe_region, NeedsNeighbors):
        geoq.safe_region.check_neighbors(plan.n_independent)
    warn_if_few(geoq.increment_model.quantile, plan.n_groups)
    few: Any = x[:N_PROBES]
    if isinstance(geoq.representation, Metric):
        z = few
    else:
        phi = partial(evaluate, geoq.representation, name="representation")
        z = phi(few)
        Probes.of(phi, few, z, "representation")
    check_shapes(
        geoq.increment_model,
        geoq.error_functional,
        values(z),
        values(few),
        values(y[:N_PROBES]),
    )
    return n_support


def fit_metric(
    geoq: "GeoQ", inputs: Tensor, x: Rows, y: Rows, checkpoint: FinishedFolds | None
) -> FittedMetric | None:
    """The fitted metric; None for a representation of the user. A resumed run uses the metric of the first run."""
    if not isinstance(geoq.representation, Metric):
        return None
    predict = predictor(geoq.surrogate_, x)
    metric = geoq.representation.fit(
        geoq.coordinates_, inputs, to_tensor(y, "y"), predict
    )
    if not isinstance(metric, FittedMetric):
        raise TypeError(
            f"{type(geoq.representation).__name__}.fit returned {type(metric).__name__}; return a FittedMetric."
        )
    if checkpoint is None:
        return metric
    stored = checkpoint.first("metric", metric.state())
    return FittedMetric.from_state(stored).to(inputs)


def observed(
    geoq: "GeoQ", x: Rows, y: Rows, absent: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Predictions of the deployed surrogate and their errors, without errors in absent cells.

    Predictions that are absent where y is not, and increment models that need the same mask in all samples, are refused.
    """
    if absent is None:
        return observe(geoq.surrogate_, geoq.error_functional, x, y)
    if isinstance(geoq.increment_model, ChecksErrors):
        name = type(geoq.increment_model).__name__
        raise TypeError(
            f"y is masked in some samples only, in {int(absent.sum())} of {absent.numel()} values, but increment_model={name}() "
            "needs the same mask in all samples; mask these cells in all samples, or use FieldScaleIncrement()."
        )
    deployed: Any = geoq.surrogate_
    raw = answers_of(deployed.with_gaps, x, "surrogate")
    if raw.shape == absent.shape:
        way_out = "mask y there, or let the surrogate return a number"
        check_finite(raw.masked_fill(absent, 0), "surrogate(x)", way_out)
    prediction = evaluate(geoq.surrogate_, x, "surrogate")
    exact = without_absent(prediction, to_tensor(y, "y"), absent)
    return prediction, errors_of(exact, geoq.error_functional, y)


def check_deployed(geoq: "GeoQ", x: Rows, y: Rows, prediction: Tensor) -> Probes:
    """Refuse predictions that depend on anything but their input; returns probes, to compare them after the trainings."""
    if geoq.train_surrogate is None:
        warn_if_trained_on(prediction, to_tensor(y, "y"))
    return Probes.of(
        partial(evaluate, geoq.surrogate_, name="surrogate"), x, prediction
    )


def warn_if_trained_on(
    prediction: Float[Tensor, " n *output"], y: Float[Tensor, " n *output"]
) -> None:
    """Warn if the errors are as small as only the errors at training points are."""
    deviation, varies = y.std(dim=0, correction=0), y.amax(dim=0) > y.amin(dim=0)
    squares = torch.zeros_like(deviation)
    for rows in chunks(len(y), deviation.numel()):
        squares += (prediction[rows].to(y) - y[rows]).square().sum(dim=0)
    ratio = ((squares / len(y)).sqrt() / deviation)[varies]
    if varies.any() and float(ratio.max()) < IMPLAUSIBLE:
        warn(
            f"the errors of the surrogate are {float(ratio.max()):.1g} of the standard deviation of y, as small as at points "
            "that a surrogate was trained on. With train_surrogate=None it must never have seen x and y; otherwise the bounds are "
            "far too small. Pass points that it was not trained on, or a function train_surrogate(x, y). If the surrogate is new "
            "to these points and so accurate, ignore this warning."
        )


def check_fitted_callables(geoq: "GeoQ") -> None:
    """Refuse a surrogate or representation that was switched to training mode since ``fit``."""
    deployed: object = geoq.surrogate_
    if isinstance(deployed, MaskedSurrogate):
        deployed = deployed.surrogate
    check_callable(deployed, "surrogate")
    if not isinstance(geoq.representation, Metric):
        check_callable(geoq.representation, "representation")


def open_checkpoint(
    geoq: "GeoQ",
    place: str | Path | Checkpoint | None,
    x: Rows,
    y: Rows,
    plan: FoldPlan,
) -> FinishedFolds | None:
    """The checkpoint in the folder, refused unless it belongs to these data, folds and settings."""
    if place is None or is_pretrained(geoq.train_surrogate):
        return None
    facts = {
        "x": array_id(x),
        "y": array_id(y),
        "folds": folds_id(plan),
        "n_anchors": str(geoq.n_anchors),
    }
    callables = {
        "representation": geoq.representation,
        "train_surrogate": geoq.train_surrogate,
    }
    return Checkpoint.of(place).open(facts, callables)
