"""Pictures of assessments: all queries, one field, some rollouts, and arrays of errors and bounds."""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoq.answer_table import N_OUTPUTS_SHOWN, outputs_named
from geoq.plots.checks import (
    channels_of,
    check_figure,
    grid_of,
    numbers_of,
    row_index,
    true_errors,
    true_outputs,
)
from geoq.plots.errors import estimate_against_error
from geoq.plots.labelled import (
    channel_name,
    label_grid,
    place_grid,
    plain_answer,
    plain_values,
    row_name,
)
from geoq.plots.style import (
    ESTIMATE,
    OPAQUE,
    REFERENCE,
    SHADE,
    TRUE,
    floor_of,
    label_logarithms,
    legend_below,
    scatter_by_flag,
    set_layout,
    wrapped,
)
from geoq.rollout import RolloutAssessment

STYLES: dict[str, dict[str, Any]] = {
    "bound": {"color": ESTIMATE, "ls": "--"},
    "expected": {"color": REFERENCE, "ls": "-."},
    "error": {"color": TRUE, "ls": "-"},
    "true error": {"color": TRUE, "ls": "-"},
    "prediction": {"color": ESTIMATE, "ls": "--"},
    "truth": {"color": TRUE, "ls": "-"},
}
# Of more values than this a random subset is drawn, because more markers cover each other and take long to draw.
MOST_POINTS = 20_000


def summary(
    figure: Figure, assessment: Any, *, error: Any = None, output: SupportsIndex = 0
) -> list[Axes]:
    """Draw all queries: bounds over support scores and, if true errors are given, bounds against true errors.

    The left panel shows one point per query, the mean of its bounds if they are a field. The right panel shows one point per
    bound. Of more than 20,000 bounds it shows a random subset; the coverage in the title refers to all bounds.

    Args:
        figure: an empty figure; 10 x 4.5 inches are suitable.
        assessment: the answer of ``GeoQ.assess`` or ``XarrayGeoQ.assess``.
        error: true errors in the shape of the bounds: ``abs(y - assessment.prediction)``.
        output: the number of the output, if there are up to ten; outputs can have different units.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> geoq = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> (axes,) = plots.summary(Figure(), geoq.assess(x))
        >>> axes.get_ylabel()
        'error bound'
    """
    check_figure(figure)
    error, assessment = plain_values(error, assessment), plain_answer(assessment)
    bound, safe = numbers_of(assessment.error_hat), numbers_of(assessment.safe) > 0
    true = None if error is None else true_errors(error, "error", assessment.error_hat)
    name = ""
    if bound.ndim == 2 and 1 < bound.shape[1] <= N_OUTPUTS_SHOWN:
        which = row_index(output, bound.shape[1], "output", "the outputs")
        name = f" of {outputs_named(assessment, assessment.error_hat)[which][0]}"
        bound = bound[:, [which]]
        true = None if true is None else true[:, [which]]
    set_layout(figure)
    panels = figure.subplots(1, 1 if true is None else 2, squeeze=False)
    left, *right = panels[0]
    score, threshold = numbers_of(assessment.support_score), assessment.threshold
    _bound_over_score(left, score, bound.reshape(len(bound), -1), safe, threshold)
    if true is not None:
        answered = np.isfinite(bound).reshape(len(bound), -1).all(axis=1)
        true, bound, safe = true[answered], bound[answered], safe[answered]
        each = np.broadcast_to(safe.reshape(-1, *[1] * (bound.ndim - 1)), bound.shape)
        rng, n_drawn = np.random.default_rng(0), min(MOST_POINTS, bound.size)
        drawn = rng.choice(bound.size, n_drawn, replace=False, shuffle=False)
        values = [part.reshape(-1)[drawn] for part in (true, bound, each)]
        estimate_against_error(right[0], *values)
        covered = [
            f"{(true <= bound)[mask].mean():.1%} of {name}"
            for name, mask in (("safe", safe), ("not safe", ~safe))
            if mask.any()
        ]
        level = assessment.quantile
        at = "" if level is None else f"; level {level:.4g}"
        right[0].set_title(f"covered: {', '.join(covered)}{at}", fontsize=10)
    if name:
        left.set_ylabel(f"error bound{name}")
        for axes in right:
            axes.set(xlabel=f"true error{name}", ylabel=f"error bound{name}")
    return [left, *right]


def fields(
    figure: Figure,
    assessment: Any,
    row: SupportsIndex,
    *,
    channel: SupportsIndex = 0,
    extent: Sequence[float] | None = None,
    expected: Any = None,
    error: Any = None,
    truth: Any = None,
) -> list[Axes]:
    """Draw the prediction of one query and the bound of its error; the title states whether the query is safe.

    Fields in the plane are drawn as maps, fields on a line as lines. All errors are drawn with the same range of values. The
    range is 0 to 1 if the bounds are 0 or 1, as bounds of wrong cells are.

    Args:
        figure: an empty figure; 13 x 3.6 inches are suitable for four maps, 8 x 5 inches for lines.
        assessment: the answer of ``GeoQ.assess`` or ``XarrayGeoQ.assess``.
        row: the number of the query.
        channel: the number of the field if there are several. The grid is last, and all dimensions before it are channels.
        extent: the coordinates of the edges of the grid: (left, right) for fields on a line, (left, right, bottom, top) for
            fields in the plane. None means the numbers of the cells, on a grid that is found from the shape of the prediction.
        expected: expected errors of all queries, from ``GeoQ.expected_error``.
        error: true errors of all queries: ``abs(y - assessment.prediction)``.
        truth: reference outputs y of all queries.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> y = x[:, :1] ** 2 * np.linspace(1, 2, 16)
        >>> geoq = GeoQ(lambda x: x[:, :1] * np.linspace(1, 2, 16), None, folds=RandomFolds(5))
        >>> answer = geoq.fit(x, y).assess(x[:3])
        >>> upper, lower = plots.fields(Figure(), answer, 0, extent=(0, 1))
    """
    check_figure(figure)
    asked, assessment = assessment, plain_answer(assessment)
    row = row_index(row, len(assessment), "row", "the queries of the assessment")
    n_spatial = grid_of(assessment.prediction, extent)
    expected, error = plain_values(expected, asked), plain_values(error, asked)
    truth = plain_values(truth, asked)
    if assessment.gaps is not None and row in assessment.gaps:
        raise ValueError(
            f"row={row} has no answer to draw: {assessment.gaps.explain(row)}; choose another row."
        )
    one = slice(row, row + 1)
    prediction = channels_of(assessment.prediction[one], "prediction", n_spatial)
    whole = "the channels of prediction"
    channel = row_index(channel, len(prediction), "channel", whole)
    given = {"bound": assessment.error_hat, "expected": expected, "error": error}
    errors = {}
    for name, values in given.items():
        if values is not None:
            true_errors(values, name, assessment.error_hat)
            channels = channels_of(values[one], "error_hat", n_spatial)
            # An error with a single channel belongs to all channels of the prediction.
            errors[name] = channels[channel if len(channels) > 1 else 0]
    outputs = {"prediction": prediction[channel]}
    if truth is not None:
        true_outputs(truth, assessment.prediction)
        outputs["truth"] = channels_of(truth[one], "truth", n_spatial)[channel]
    bound = numbers_of(assessment.error_hat)
    is_wrong_or_right = bool(np.isin(bound[~np.isnan(bound)], (0, 1)).all())
    draw = _maps if n_spatial == 2 else _lines
    axes = draw(figure, outputs, errors, 1.0 if is_wrong_or_right else None)
    if extent is not None:
        place_grid(axes, extent)
    label_grid(axes, asked, n_spatial)
    several = assessment.prediction[row].ndim > n_spatial
    of_channel = f", {channel_name(asked, channel, n_spatial)}" if several else ""
    title = (
        f"{row_name(asked, row, 'query')}{of_channel}: "
        f"{'safe' if bool(assessment.safe[row]) else 'NOT safe'} "
        f"(support score {float(assessment.support_score[row]):.3g}, threshold {assessment.threshold:.3g})"
    )
    figure.suptitle(wrapped(figure, title), fontsize=10)
    return axes


def rollouts(
    figure: Figure, assessment: Any, rows: Iterable[SupportsIndex], *, error: Any = None
) -> list[Axes]:
    """Draw the largest bound at each step of some rollouts, one panel per rollout.

    The shaded steps are within the trusted horizon, and the title states why it ends. A bound that reaches the limit of trust
    ends the trusted horizon. If the tolerance was given per coordinate, bounds and errors are divided by it.

    Args:
        figure: an empty figure; 8 inches of width and 2 inches of height per rollout are suitable.
        assessment: the answer of ``RolloutGeoQ.assess`` or ``XarrayRolloutGeoQ.assess``.
        rows: the numbers of the rollouts.
        error: true errors of all rollouts: ``abs(truth - assessment.prediction)``.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import RolloutGeoQ, plots
        >>> angle = 0.2 * np.arange(400)
        >>> states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> def step(x):  # a rotation by 0.2 that is slightly wrong
        ...     return x @ np.array([[0.98, 0.2], [-0.2, 0.98]])
        >>> geoq = RolloutGeoQ(step, None, n_calibration=20).fit(states[:300])
        >>> answer = geoq.assess(states[300:302], n_steps=10, tolerance=0.5)
        >>> upper, lower = plots.rollouts(Figure(figsize=(8, 4)), answer, [0, 1])
    """
    check_figure(figure)
    asked, assessment = assessment, plain_answer(assessment)
    error = plain_values(error, asked)
    n, n_steps = assessment.safe.shape
    whole = "the rollouts of the assessment"
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"rows={rows!r} is a single number; pass a list, rows=[{rows!r}]."
        )
    chosen = [row_index(row, n, "rows", whole) for row in rows]
    if not chosen:
        raise ValueError(
            f"rows is empty, so there is nothing to draw; choose some of 0 to {n - 1}."
        )
    curves = {"bound": assessment.error_hat}
    if error is not None:
        true_errors(error, "error", assessment.error_hat)
        curves["true error"] = error
    tolerance = None
    if assessment.tolerance is not None:
        tolerance = torch.as_tensor(assessment.tolerance).cpu().numpy()
    divided = tolerance is not None and tolerance.ndim > 0
    set_layout(figure)
    grid = figure.subplots(len(chosen), 1, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = grid[:, 0].tolist()
    for axes, row in zip(panels, chosen, strict=True):
        largest = {
            name: (numbers_of(values[row]) / (tolerance if divided else 1.0))
            .reshape(n_steps, -1)
            .max(axis=1)
            for name, values in curves.items()
        }
        _rollout(axes, assessment, row, largest)
        if tolerance is not None:
            height = 1.0 if divided else float(tolerance)
            axes.axhline(height, color=REFERENCE, lw=1.2, ls="-.", label="tolerance")
            if assessment.trust is not None:
                limit = height * np.array(assessment.trust.largest_ratio[:n_steps])
                step = np.arange(1, len(limit) + 1)
                axes.plot(step, limit, color=REFERENCE, lw=1.6, label="limit of trust")
        name = row_name(asked, row, "rollout")
        title = "; ".join(assessment.outcome(row)).replace(f"rollout {row}", name, 1)
        axes.set_title(wrapped(figure, title), fontsize=9)
    name = "largest error / tolerance" if divided else "largest error"
    figure.supylabel(name, fontsize=10)
    panels[-1].set(xlabel="step", xlim=(0.5, n_steps + 0.5), ylim=(0, None))
    legend_below(figure, panels)
    return panels


def _bound_over_score(
    axes: Axes,
    score: Float[np.ndarray, " n"],
    bound: Float[np.ndarray, " n n_values"],
    safe: Bool[np.ndarray, " n"],
    threshold: float,
) -> None:
    """Draw the mean bound of each query over its support score, with the safe scores shaded."""
    title = f"{safe.sum()} of {len(safe)} queries safe"
    # Queries without an answer have no bound, and a constant input that changed has an infinite score.
    drawn = np.isfinite(score) & np.isfinite(bound).all(axis=1)
    if not drawn.all():
        score, bound, safe = score[drawn], bound[drawn], safe[drawn]
        title += f", {(~drawn).sum()} not drawn"
    mean, least = bound.mean(axis=1), floor_of(score, np.array([threshold]))
    score, edge = score.clip(least), max(threshold, least)
    ends = score.min(initial=edge) / 1.2, score.max(initial=edge) * 1.2
    axes.axvspan(ends[0], edge, color=SHADE, lw=0)
    scatter_by_flag(axes, score, mean.clip(floor_of(mean)), safe)
    axes.axvline(edge, color=TRUE, lw=1.2, ls="--", label="threshold")
    name = "error bound" if bound.shape[1] == 1 else "mean error bound"
    axes.set(xlabel="support score", ylabel=name, xscale="log", yscale="log", xlim=ends)
    label_logarithms(axes.xaxis)
    label_logarithms(axes.yaxis)
    axes.set_title(title, fontsize=10)
    axes.legend(**OPAQUE)


def _maps(
    figure: Figure,
    outputs: dict[str, Float[np.ndarray, " height width"]],
    errors: dict[str, Float[np.ndarray, " height width"]],
    largest: float | None,
) -> list[Axes]:
    """Draw maps in the number of columns that makes them largest; the first axis of the grid points upwards.

    The range of the errors ends at ``largest``; None means the largest error.
    """
    set_layout(figure, "compressed")
    n_maps = len(outputs) + len(errors)
    n_columns = _n_columns(figure, n_maps, *errors["bound"].shape)
    grid = figure.subplots(-(-n_maps // n_columns), n_columns, squeeze=False)
    panels = list(grid.flat[:n_maps])
    for empty in grid.flat[n_maps:]:
        empty.remove()
    top = largest or max(float(np.nanmax(values)) for values in errors.values()) or 1.0
    both = np.stack([*outputs.values()])
    ends = float(np.nanmin(both)), float(np.nanmax(both))
    own, others = panels[: len(outputs)], panels[len(outputs) :]
    for maps, parts, cmap, (low, high), label in (
        (own, outputs, "viridis", ends, ""),
        (others, errors, "cividis", (0.0, top), "error"),
    ):
        for axes, (name, values) in zip(maps, parts.items(), strict=True):
            image = axes.imshow(values, origin="lower", cmap=cmap, vmin=low, vmax=high)
            axes.set_title(_label(name, errors), fontsize=10)
        figure.colorbar(image, ax=maps, label=label)
    return panels


def _n_columns(figure: Figure, n_maps: int, height: int, width: int) -> int:
    """The number of columns with the largest maps."""
    across, upwards = figure.get_figwidth() / width, figure.get_figheight() / height
    return max(
        range(1, n_maps + 1), key=lambda n: min(across / n, upwards / -(-n_maps // n))
    )


def _lines(
    figure: Figure,
    outputs: dict[str, Float[np.ndarray, " length"]],
    errors: dict[str, Float[np.ndarray, " length"]],
    largest: float | None,
) -> list[Axes]:
    """Draw the outputs in the upper panel and the errors in the lower one."""
    set_layout(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, values in outputs.items():
        upper.plot(values, lw=1.6, label=name, **STYLES[name])
    upper.set(ylabel="prediction" if len(outputs) == 1 else "output")
    if len(outputs) > 1:
        upper.legend(**OPAQUE)
    for name, values in errors.items():
        lower.plot(values, lw=1.6, label=_label(name, errors), **STYLES[name])
    lower.set(xlabel="coordinate", ylabel="error", xlim=(0, len(errors["bound"]) - 1))
    lower.set_ylim(0, None if largest is None else 1.05 * largest)
    lower.legend(**OPAQUE)
    return [upper, lower]


def _label(name: str, errors: dict[str, np.ndarray]) -> str:
    if name != "error":
        words = {"bound": "bound of the error", "expected": "expected error"}
        return words.get(name, name)
    covered = (errors["error"] <= errors["bound"])[~np.isnan(errors["bound"])]
    return f"true error, {covered.mean():.1%} within the bound"


def _rollout(
    axes: Axes,
    assessment: RolloutAssessment,
    row: int,
    largest: dict[str, Float[np.ndarray, " n_steps"]],
) -> None:
    """Draw the bound and the true error of one rollout, its horizon and its unsafe steps."""
    n_steps = assessment.safe.shape[1]
    step, safe = np.arange(1, n_steps + 1), numbers_of(assessment.safe[row]) > 0
    horizons, name_of_horizon = assessment.horizon
    if horizon := int(horizons[row]):
        axes.axvspan(0.5, horizon + 0.5, color=SHADE, lw=0, label=name_of_horizon)
    for name, values in largest.items():
        finite = np.where(np.isfinite(values), values, np.nan)
        axes.plot(step, finite, lw=1.6, label=name, **STYLES[name])
    if not safe.all():
        # Crosses slightly above the lower edge, at any range of errors.
        at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ms": 4}
        at_edge |= {"color": ESTIMATE, "label": "step not safe"}
        axes.plot(step[~safe], np.full((~safe).sum(), 0.04), "x", **at_edge)
    if (n_calibrated := assessment.n_calibrated) <= n_steps:
        label = "calibration horizon"
        axes.axvline(n_calibrated, color=REFERENCE, lw=1.2, ls=":", label=label)
    if diverged_at := int(assessment.diverged_at[row]):
        axes.axvline(diverged_at, color=TRUE, lw=1.2, label="diverged")
