"""Checks of the settings and the data of ``GeoQ.fit``, before any training."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from geoq.arrays import flat, native, permutation, restore, to_numbers
from geoq.bounds.protocol import check_bound_model
from geoq.checks import (
    add_note_on_error,
    check_finite,
    check_function,
    check_integer,
    check_object,
    check_unit,
    warn,
)
from geoq.data.coordinates import Coordinates
from geoq.data.domain import Domain, Layout, Shapes
from geoq.data.masks import Mask, outputs_with_nan
from geoq.data.metric import Metric, StandardizedMetric
from geoq.data.probes import N_PROBES, Probes
from geoq.data.table import Table, first_few, input_rows
from geoq.quantiles import n_required
from geoq.regions.region import SafeRegion
from geoq.surrogate import (
    absolute_error,
    answers_of,
    check_callable,
    evaluate,
    log_error,
    one_row_each,
    relative_norm_error,
)
from geoq.training.sources import check_sources

if TYPE_CHECKING:
    from geoq.core.estimator import GeoQ

# Outputs over more decades than this, without the lowest and the highest 1 %, raise a warning if their mean is this many medians.
MANY_DECADES, MEDIANS = 3.0, 5.0
REMOVE = "remove or impute these samples first"
# More features of the user are refused: a field is no feature.
MOST_FEATURES = 20
# Of more planned queries a random subset of this size stands for all.
MOST_PLANNED = 5_000


def check_settings(how: "GeoQ") -> None:
    """Raise for settings that are no objects of their kind."""
    check_integer(how.n_anchors, "n_anchors", 1)
    if how.n_support is not None:
        check_integer(how.n_support, "n_support", 1)
    if how.domain is not None and not isinstance(how.domain, Domain):
        raise TypeError(
            f"domain={how.domain!r} is not a domain; pass Grid(n_axes), Mesh(coordinates) or Table() (from geoq import Grid, Mesh, Table)."
        )
    if how.bound_model is not None:
        check_bound_model(how.bound_model)
    check_object(how.safe_region, SafeRegion, "safe_region", "Region(quantile=0.95)")
    check_sources(how.surrogate, how.train_surrogate, "x, y")
    if isinstance(how.representation, Metric):
        check_object(how.representation, Metric, "representation", "StandardizedMetric()")
    else:
        check_callable(how.representation, "representation")
    check_callable(how.error_functional, "error_functional")
    if how.features is not None:
        check_function(how.features, "features", "features(x, prediction)")


def features_of_user(how: "GeoQ", x: Any, prediction: Any, probed: Any = None) -> Any:
    """The features of the user for rows with these predictions; raises unless they are finite, and depend on the row alone if ``probed``.

    The surrogate ``probed`` made the predictions; None for a function that was probed before.
    """
    if how.features is None:
        return None
    found = flat(answers_of(how.features, x, "features", prediction)).astype(float)
    if found.shape[1] > MOST_FEATURES:
        raise ValueError(
            f"features returned {found.shape[1]} numbers per row; return one, or at most {MOST_FEATURES}, such as the norm of a field."
        )
    check_finite(found, "features(x, prediction)", "features must return finite numbers")
    if probed is not None:
        ask = partial(answers_of, probed, name="surrogate")
        Probes.of(lambda q: features_of_user(how, q, ask(q)), x, found, "features", "", prediction)
    return found


def check_pairs(x: Any, y: Any, mask: Mask | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and reference outputs as numbers; raises unless they are finite and equally many."""
    inputs = to_numbers(x, "x")
    outputs = to_numbers(y, "y") if mask is None else outputs_with_nan(y)
    for name, array in (("x", inputs), ("y", outputs)):
        if array.ndim == 0 or not array.size:
            raise ValueError(
                f"{name} has shape {array.shape} and holds no samples; pass one sample per row."
            )
    if not isinstance(x, Table):
        framed = ", or pass a data frame, where values can be missing if the model accepts that"
        land = ", or fill cells that never have a value, such as land, with 0"
        check_finite(inputs, "x", REMOVE + (framed if inputs.ndim == 2 else land))
    fields = outputs.ndim > 1
    way_out = f"{REMOVE}, or mask cells that have no value, numpy.ma.masked_invalid(y)"
    shown = outputs if mask is None else np.where(np.isnan(outputs), 0, outputs)
    check_finite(shown, "y", way_out if fields else REMOVE)
    if len(inputs) != len(outputs):
        raise ValueError(
            f"x has {len(inputs)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    if not isinstance(x, Table):
        check_unit(inputs, "x", by_column=True)
    check_unit(shown, "y", by_column=False)
    return inputs, outputs


def check_models(how: "GeoQ", x: Any, outputs: np.ndarray) -> None:
    """Raise for missing values that the surrogate does not accept, and for a division by zero."""
    if how.error_functional is relative_norm_error:
        zero = np.flatnonzero((flat(outputs) == 0).all(axis=1))
        if len(zero):
            raise ValueError(
                f"error_functional=relative_norm_error divides by the norm of y, but y[{zero[0]}] is zero ({len(zero)} of "
                f"{len(outputs)} rows are); remove these rows, or use norm_error."
            )
    if how.error_functional is log_error and not (outputs > 0).all():
        place = np.argwhere(~(outputs > 0))[0].tolist()
        raise ValueError(
            f"error_functional=log_error needs positive outputs, but y[{', '.join(map(str, place))}] is {outputs[tuple(place)]:.4g}; use "
            "relative_norm_error, or remove these rows and masked cells."
        )
    if not isinstance(x, Table) or how.surrogate is None:
        return
    missing = np.isnan(x.array)
    if not missing.any():
        return
    assert x.schema is not None
    names = [repr(x.schema[j]) for j in np.flatnonzero(missing.any(axis=0)).tolist()]
    way_out = "remove or impute these rows, or use a model that accepts missing values"
    note = f"x has missing values in {first_few(names)}, and surrogate failed on them; {way_out}"
    with add_note_on_error(note):
        evaluate(how.surrogate, x[np.flatnonzero(missing.any(axis=1))[:N_PROBES]], "surrogate")


def coordinates_of(representation: Any, inputs: np.ndarray, x: Any) -> Coordinates:
    """T of the inputs: by the metric, or without logarithms for a representation of the user."""
    # Small rows in double precision; fields stay in the precision of the user.
    if math.prod(inputs.shape[1:]) <= 2**10:
        inputs = inputs.astype(float)
    schema = x.schema if isinstance(x, Table) else None
    metric = representation if isinstance(representation, Metric) else StandardizedMetric()
    coordinates: object = metric.coordinates(inputs, schema)
    if not isinstance(coordinates, Coordinates):
        raise TypeError(
            f"{type(representation).__name__}.coordinates returned {type(coordinates).__name__}; return the Coordinates of the "
            "points, for example Coordinates.fit(points, logarithms=False)."
        )
    return coordinates


def planned_coordinates(planned: Any, x: Any, known: Coordinates) -> np.ndarray | None:
    """T of the planned queries, or of some of them; raises unless they have the columns or the shape of ``x``."""
    if planned is None:
        return None
    schema = x.schema if isinstance(x, Table) else None
    rows = input_rows(planned) if schema is None else schema.table(planned, "planned")
    numbers = to_numbers(rows, "planned")
    if not numbers.size or numbers.shape[1:] != known.input_shape:
        raise ValueError(
            f"planned has shape {numbers.shape}, but a row of x has shape {known.input_shape}; pass at least one query of that shape."
        )
    unusable = known.unusable(numbers).any(axis=1)
    if unusable.any():
        raise ValueError(
            f"planned has {int(unusable.sum())} of {len(numbers)} rows with missing or infinite values, the first one is row "
            f"{int(unusable.argmax())}; leave them out."
        )
    return known(numbers[np.sort(permutation(len(numbers))[:MOST_PLANNED])])


def beyond_text(fraction: float) -> str:
    """What it means that a fraction of the planned queries is beyond all held-out points."""
    return (
        f"{100 * fraction:.3g} % of the planned queries are farther from the data than any held-out point was from the points that its "
        f"fold left in{'; their bound is a guess' if fraction else ''}."
    )


def shapes_of(how: "GeoQ", x: Any, y: Any, outputs: np.ndarray) -> Shapes:
    """The shapes of one row; the error functional is called with ``y`` in place of the predictions."""
    few, rows = np.nan_to_num(outputs[:N_PROBES]), x[:N_PROBES]
    like = None if isinstance(y, Table) else native(y)
    error = how.error_functional(*(restore(few.copy(), like) for _ in range(2)))
    found, inputs = one_row_each(error, len(few), "error_functional"), to_numbers(rows, "x")
    z = inputs
    if not isinstance(how.representation, Metric):
        phi = partial(evaluate, how.representation, name="representation")
        z = phi(rows)
        Probes.of(phi, rows, z, "representation")
    return Shapes(*(part.shape[1:] for part in (z, found, inputs, few)))


def warn_of_decades(how: "GeoQ", outputs: np.ndarray, layout: Layout) -> None:
    """Warn if the outputs of a table range over many decades: the largest of them determine a bound of absolute errors."""
    if how.error_functional is not absolute_error or not layout.is_table:
        return
    columns = flat(outputs)
    for j in np.flatnonzero((columns > 0).all(axis=0)).tolist():
        low, median, high = np.quantile(columns[:, j], (0.01, 0.5, 0.99))
        if columns[:, j].mean() > MEDIANS * median and high > low * 10**MANY_DECADES:
            name = "y" if columns.shape[1] == 1 else f"y[:, {j}]"
            warn(
                f"{name} ranges over {math.log10(high / low):.1f} decades, from {low:.2g} to {high:.2g}, and the bound of its absolute error is fitted "
                "best to the largest values. If relative errors matter, pass error_functional=log_error (from geoq import "
                "log_error): a bound is then a factor, and intervals keep the unit of y. A model of log(y) is often better, too."
            )
            return


def warn_if_few(quantile: float, n_groups: int) -> None:
    """Warn if there are fewer independent points than the quantile level requires."""
    needed = n_required(quantile)
    if n_groups < needed:
        warn(
            f"n={n_groups} independent points (or groups, or stretches of time), but quantile={quantile} needs at least "
            f"{needed} to be estimated; treat the bounds as guesses, give more data, or choose a lower quantile."
        )
