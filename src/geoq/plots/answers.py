"""Pictures of answers: all queries, one field, some rollouts, and arrays of errors and bounds."""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoq.checks import check_index
from geoq.core.assessment import N_OUTPUTS_SHOWN, Assessment, numbers_of
from geoq.data.domain import Layout, Mesh
from geoq.plots import style
from geoq.plots.style import Numbers
from geoq.rollout.fitted import RolloutAssessment
from geoq.rollout.horizon import EveryValue

Flags: TypeAlias = Bool[np.ndarray, " *shape"]
Ends: TypeAlias = tuple[float, float]
# Arrays by the names of the curves or maps.
Drawn: TypeAlias = dict[str, np.ndarray]
# The outputs and the errors of one field, and the upper end of the errors; None for the largest of them.
Field: TypeAlias = tuple[Drawn, Drawn, float | None]
LINES: dict[str, dict[str, Any]] = {
    "bound": {"color": style.ESTIMATE, "ls": "--", "lw": 1.6},
    "expected": {"color": style.REFERENCE, "ls": "-.", "lw": 1.6},
    "error": {"color": style.TRUE, "ls": "-", "lw": 1.6},
}
LINES |= {"prediction": LINES["bound"], "truth": LINES["error"]}
# Of more values than this a random subset is drawn, because more markers cover each other and take long to draw.
MOST_POINTS = 20_000


def summary(
    figure: Figure, assessment: Assessment, *, error: Any = None, output: int = 0
) -> list[Axes]:
    """Draw all queries: bounds over support scores and, if true errors are given, bounds against true errors.

    The left panel shows one point per query, the mean of its bounds if they are a field. The right panel shows one point per
    bound. Of more than 20,000 bounds it shows a random subset; the coverage in the title refers to all bounds.

    Args:
        figure: an empty figure; 10 x 4.5 inches are suitable.
        assessment: the answer of ``assess``.
        error: true errors in the shape of the bounds: ``abs(y - assessment.prediction)``.
        output: the number of the output, if there are up to ten; outputs can have different units.

    Returns:
        The axes, one for each panel.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> (axes,) = plots.summary(Figure(), estimator.assess(x))
        >>> axes.get_ylabel()
        'error bound'
    """
    style.prepare(figure)
    bound, safe = numbers_of(assessment.error_hat), numbers_of(assessment.safe) > 0
    true = None if error is None else style.true_errors(error, "error", assessment.error_hat)
    named = assessment.outputs_of(assessment.error_hat)
    output = check_index(output, "output", len(named))
    name, mean = named[output]
    if bound.ndim == 2 and 1 < bound.shape[1] <= N_OUTPUTS_SHOWN:
        column = np.flatnonzero(~np.isnan(bound).all(axis=0))[output]
        bound, true = mean, None if true is None else true[:, column]
    left, *right = style.panels_of(figure, 1 if true is None else 2, 1 if true is None else 2)
    _bound_over_score(left, numbers_of(assessment.support_score), mean, safe)
    of = f" of {name}" if name not in ("", "mean") else ""
    left.set_ylabel(f"{'mean ' * (name == 'mean')}error bound{of}")
    if true is not None:
        _bound_over_error(right[0], true, bound, safe, assessment.quantile)
        right[0].set(xlabel=f"true error{of}", ylabel=f"error bound{of}")
    return [left, *right]


def _bound_over_score(axes: Axes, score: Numbers, bound: Numbers, safe: np.ndarray) -> None:
    """Draw the bound of each query over its support score, with the safe scores shaded."""
    title = f"{safe.sum()} of {len(safe)} queries safe"
    # Queries without an answer have no bound, and a constant input that changed has an infinite score.
    drawn = np.isfinite(score) & np.isfinite(bound)
    if not drawn.all():
        score, bound, safe = score[drawn], bound[drawn], safe[drawn]
        title += f", {(~drawn).sum()} not drawn"
    score = score.clip(style.floor_of(score, np.ones(1)))
    ends = score.min(initial=1) / 1.2, score.max(initial=1) * 1.2
    axes.axvspan(ends[0], 1, color=style.SHADE, lw=0)
    style.scatter_by_flag(axes, score, bound.clip(style.floor_of(bound)), safe)
    axes.axvline(1, color=style.TRUE, lw=1.2, ls="--", label="threshold")
    axes.set(xlabel="support score", xscale="log", yscale="log", xlim=ends)
    style.label_logarithms(axes.xaxis, axes.yaxis)
    axes.set_title(title, fontsize=10)
    axes.legend(**style.OPAQUE)


def _bound_over_error(
    axes: Axes, error: np.ndarray, bound: np.ndarray, safe: np.ndarray, level: float
) -> None:
    """Draw each bound against its error, with the coverage as the title."""
    each = np.broadcast_to(safe.reshape(-1, *[1] * (bound.ndim - 1)), bound.shape)
    counts = np.isfinite(bound) & np.isfinite(error)
    error, bound, each = error[counts], bound[counts], each[counts]
    n_drawn = min(MOST_POINTS, len(bound))
    drawn = np.random.default_rng(0).choice(len(bound), n_drawn, replace=False, shuffle=False)
    estimate_against_error(axes, error[drawn], bound[drawn], each[drawn])
    flags = (("safe", each), ("not safe", ~each))
    within = error <= bound
    covered = [f"{within[mask].mean():.1%} of {flag}" for flag, mask in flags if mask.any()]
    axes.set_title(f"covered: {', '.join(covered)}; level {level:.4g}", fontsize=10)


def fields(
    figure: Figure,
    assessment: Assessment,
    row: SupportsIndex,
    *,
    channel: int = 0,
    extent: Sequence[float] | None = None,
    expected: Any = None,
    error: Any = None,
    truth: Any = None,
) -> list[Axes]:
    """Draw the prediction of one query and the bound of its error; the title states whether the query is safe.

    Fields in the plane, on a grid or on a mesh, are drawn as maps, and fields on a line as lines. All errors are drawn with the
    same range of values. The range is 0 to 1 if the bounds are 0 or 1, as bounds of wrong cells are. Returns the axes.

    Args:
        figure: an empty figure; 13 x 3.6 inches are suitable for four maps, 8 x 5 inches for lines.
        assessment: the answer of ``GeoQ.assess``.
        row: the number of the query.
        channel: the number of the field if there are several. The grid is last, and all dimensions before it are channels.
        extent: the coordinates of the edges of a grid: (left, right) for fields on a line, (left, right, bottom, top) for fields
            in the plane. None means the numbers of the cells.
        expected: expected errors of all queries, from ``GeoQ.expected_error``.
        error: true errors of all queries: ``abs(y - assessment.prediction)``.
        truth: reference outputs y of all queries.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, Grid, RandomFolds, plots
        >>> from geoq.parts import FieldBound, NoFactor
        >>> x = np.random.default_rng(0).uniform(size=(60, 1)) * np.linspace(1, 2, 16)
        >>> settings = {"domain": Grid(1), "bound_model": FieldBound(factor=NoFactor())}
        >>> estimator = GeoQ(np.abs, None, folds=RandomFolds(5), **settings).fit(x, x**2)
        >>> upper, lower = plots.fields(Figure(), estimator.assess(x[:3]), 0, extent=(0, 1))
    """
    row, layout = check_index(row, "row", len(assessment)), assessment.fitted.layout
    is_map = _is_map(layout, tuple(assessment.prediction.shape[1:]))
    style.prepare(figure, "compressed" if is_map else "constrained")
    given = {"expected": expected, "error": error, "truth": truth}
    drawn = _one_field(assessment, row, channel, given)
    axes = (_maps if is_map else _lines)(figure, layout, drawn, extent)
    several = assessment.prediction[row].ndim > layout.n_axes
    title = (
        f"query {row}{f', channel {channel}' if several else ''}: {'safe' if assessment.safe[row] else 'NOT safe'} "
        f"(support score {float(assessment.support_score[row]):.3g}, safe up to 1)"
    )
    figure.suptitle(style.wrapped(figure, title), fontsize=10)
    return axes


def _one_field(assessment: Assessment, row: int, channel: int, given: dict[str, Any]) -> Field:
    """One channel of one query of each output and of each error."""
    if assessment.lost[row]:
        raise ValueError(f"row={row} is {assessment.safety(row)}; choose another row.")
    if given["truth"] is not None:
        style.check_shape(given["truth"], "truth", assessment.prediction, "predictions")

    def drawn(values: Any) -> Float[np.ndarray, " *cells"]:
        cells = assessment.fitted.layout.cells
        parts = numbers_of(values)[row].astype(float).reshape(-1, *cells)
        # An error with a single channel belongs to all channels of the prediction.
        which = check_index(channel, "channel", len(parts)) if len(parts) > 1 else 0
        return np.asarray(parts[which])

    bound = assessment.error_hat
    outputs = {"prediction": assessment.prediction, "truth": given["truth"]}
    errors = {"bound": bound, "expected": given["expected"], "error": given["error"]}
    errors = {n: style.true_errors(e, n, bound) for n, e in errors.items() if e is not None}
    largest = 1.0 if np.isin(np.nan_to_num(errors["bound"]), (0, 1)).all() else None
    shown = {n: drawn(part) for n, part in outputs.items() if part is not None}
    return shown, {n: drawn(part) for n, part in errors.items()}, largest


def _is_map(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a field is drawn as a map, and not as a line; raises if it can be neither."""
    on_mesh = isinstance(layout.domain, Mesh)
    n_axes = layout.domain.coordinates.shape[1] if on_mesh else len(layout.cells)  # type: ignore[union-attr]
    if not layout.on_cells or not layout.holds(shape) or n_axes > 2:
        raise ValueError(
            f"the prediction of a query has shape {shape}, and its error lies on {n_axes or 'no'} axes of space, but a picture "
            "shows a field on one or two; use plots.summary, or draw a layer: axes.imshow(assessment.error_hat[row, 0])."
        )
    return n_axes == 2


def _maps(figure: Figure, layout: Layout, drawn: Field, extent: Any) -> list[Axes]:
    """Draw maps in the number of columns that makes them largest; the first axis of a grid points upwards."""
    outputs, errors, largest = drawn
    n_maps, nodes = len(outputs) + len(errors), getattr(layout.domain, "coordinates", None)
    edges: Any = extent or [end for n in layout.cells[::-1] for end in (-0.5, n - 0.5)]
    width, height = np.ptp(np.reshape(edges, (2, 2)), 1) if nodes is None else np.ptp(nodes, axis=0)
    across, upwards = figure.get_figwidth() / width, figure.get_figheight() / height
    n_columns = max(range(1, n_maps + 1), key=lambda n: min(across / n, upwards / -(-n_maps // n)))
    panels = style.panels_of(figure, n_maps, n_columns)
    top = largest or max(float(np.nanmax(values)) for values in errors.values()) or 1.0
    both = np.stack([*outputs.values()])
    ends = float(np.nanmin(both)), float(np.nanmax(both))
    own, others = panels[: len(outputs)], panels[len(outputs) :]
    for maps, parts, cmap, (low, high), label in (
        (own, outputs, "viridis", ends, ""),
        (others, errors, "cividis", (0.0, top), "error"),
    ):
        colours: dict[str, Any] = {"cmap": cmap, "vmin": low, "vmax": high}
        for axes, (name, values) in zip(maps, parts.items(), strict=True):
            if nodes is None:
                image: Any = axes.imshow(values, origin="lower", extent=edges, **colours)
            else:
                image = axes.tripcolor(nodes[:, 0], nodes[:, 1], values, **colours)
                axes.set_aspect("equal")
            axes.set_title(_label(name, errors), fontsize=10)
        figure.colorbar(image, ax=maps, label=label)
    return panels


def _lines(figure: Figure, layout: Layout, drawn: Field, extent: Any) -> list[Axes]:
    """Draw the outputs in the upper panel and the errors in the lower one."""
    outputs, errors, largest = drawn
    upper, lower = style.panels_of(figure, 2, 1, sharex=True)
    (n_cells,) = layout.cells
    edges = extent or (-0.5, n_cells - 0.5)
    at = edges[0] + (np.arange(n_cells) + 0.5) * (edges[1] - edges[0]) / n_cells
    if isinstance(layout.domain, Mesh):
        at = layout.domain.coordinates[:, 0]
    order = np.argsort(at)
    for axes, parts in ((upper, outputs), (lower, errors)):
        for name, values in parts.items():
            axes.plot(at[order], values[order], label=_label(name, errors), **LINES[name])
    upper.set_ylabel("prediction" if len(outputs) == 1 else "output")
    if len(outputs) > 1:
        upper.legend(**style.OPAQUE)
    lower.set(xlabel="coordinate", ylabel="error", xlim=extent or (at.min(), at.max()))
    lower.set_ylim(0, None if largest is None else 1.05 * largest)
    lower.legend(**style.OPAQUE)
    return [upper, lower]


def _label(name: str, errors: Drawn) -> str:
    if name != "error":
        return {"bound": "bound of the error", "expected": "expected error"}.get(name, name)
    true, bound = errors["error"], errors["bound"]
    covered = (true <= bound)[~np.isnan(bound) & ~np.isnan(true)]
    return f"true error, {covered.mean():.1%} within the bound"


def rollouts(
    figure: Figure, assessment: RolloutAssessment, rows: Iterable[int], *, error: Any = None
) -> list[Axes]:
    """Draw the largest bound at each step of some rollouts, or the bound of the norm of the tolerance, one panel per rollout.

    The shaded steps are within the trusted horizon, and the title states why it ends. A bound that reaches the limit of trust
    ends the trusted horizon. If the tolerance was given per coordinate, bounds and errors are divided by it. Returns the axes.

    Args:
        figure: an empty figure; 8 inches of width and 2 inches of height per rollout are suitable.
        assessment: the answer of ``RolloutGeoQ.assess``.
        rows: the numbers of the rollouts.
        error: true errors of all rollouts: ``abs(truth - assessment.prediction)``.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import RolloutGeoQ, plots
        >>> angle = 0.2 * np.arange(400)
        >>> states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> def step(x):  # a rotation by 0.2 that is slightly wrong
        ...     return x @ np.array([[0.98, 0.2], [-0.2, 0.98]])
        >>> estimator = RolloutGeoQ(step, None, n_calibration=20).fit(states[:300])
        >>> answer = estimator.assess(states[300:302], n_steps=10, tolerance=0.5)
        >>> upper, lower = plots.rollouts(Figure(figsize=(8, 4)), answer, [0, 1])
    """
    style.prepare(figure)
    n, n_steps = assessment.safe.shape
    chosen = [check_index(row, "rows", n) for row in rows]
    trust, bound = assessment.trust, assessment.error_hat
    tolerance = EveryValue(1.0) if trust is None else trust.tolerance
    divided = np.ndim(tolerance.tolerance) > 0
    height = 1.0 if divided else float(tolerance.tolerance)
    curves = {"bound": height * (trust.ratio if trust else tolerance.over)(numbers_of(bound))}
    if error is not None:
        curves["true error"] = height * tolerance.over(style.true_errors(error, "error", bound))
    panels = style.panels_of(figure, len(chosen), 1, sharex=True, sharey=True)
    for axes, row in zip(panels, chosen, strict=True):
        _rollout(axes, assessment, row, {name: own[row] for name, own in curves.items()})
        if trust is not None:
            axes.axhline(height, color=style.REFERENCE, lw=1.2, ls="-.", label="tolerance")
            limit = height * np.array(trust.largest_ratio[:n_steps])
            step = np.arange(1, len(limit) + 1)
            axes.plot(step, limit, color=style.REFERENCE, lw=1.6, label="limit of trust")
        axes.set_title(style.wrapped(figure, "; ".join(assessment.outcome(row))), fontsize=9)
    figure.supylabel((tolerance.norm or "largest error") + " / tolerance" * divided, fontsize=10)
    panels[-1].set(xlabel="step", xlim=(0.5, n_steps + 0.5), ylim=(0, None))
    panels[-1].locator_params("x", integer=True)
    style.legend_below(figure, panels)
    return panels


def _rollout(axes: Axes, assessment: RolloutAssessment, row: int, largest: Drawn) -> None:
    """Draw the bound and the true error of one rollout, its horizon and its unsafe steps."""
    safe = numbers_of(assessment.safe[row]) > 0
    step = np.arange(1, len(safe) + 1)
    horizons, name_of_horizon = assessment.horizon
    if horizon := int(horizons[row]):
        axes.axvspan(0.5, horizon + 0.5, color=style.SHADE, lw=0, label=name_of_horizon)
    for name, values in largest.items():
        color, dash = (style.ESTIMATE, "--") if name == "bound" else (style.TRUE, "-")
        finite = np.where(np.isfinite(values), values, np.nan)
        axes.plot(step, finite, lw=1.6, ls=dash, color=color, label=name)
    if not safe.all():
        # Crosses slightly above the lower edge, at any range of errors.
        at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ms": 4}
        at_edge |= {"color": style.ESTIMATE, "label": "step not safe"}
        axes.plot(step[~safe], np.full((~safe).sum(), 0.04), "x", **at_edge)
    if (n_calibrated := assessment.n_calibrated) <= len(safe):
        label = "calibration horizon"
        axes.axvline(n_calibrated, color=style.REFERENCE, lw=1.2, ls=":", label=label)
    if diverged_at := int(assessment.diverged_at[row]):
        axes.axvline(diverged_at, color=style.TRUE, lw=1.2, label="diverged")


def error_over_input(
    axes: Axes, x: Numbers, error: Numbers, error_hat: Numbers, safe: Flags, training_interval: Ends
) -> Axes:
    """Draw true errors and bounds over a scalar input, with the safe region shaded and the ends of the training interval dotted.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import plots
        >>> x = np.linspace(0, 1, 50)
        >>> axes = Figure().subplots()
        >>> axes = plots.error_over_input(axes, x, x**2, x, x < 0.5, (0.0, 0.5))
    """
    order = np.argsort(x)
    x, error, error_hat, safe = x[order], error[order], error_hat[order], safe[order]
    style.shade(axes, x, safe, "safe region")
    axes.plot(x, error, color=style.TRUE, lw=1.6, label="true error")
    axes.plot(x, error_hat, color=style.ESTIMATE, lw=1.6, ls="--", label="error bound")
    for end, label in zip(training_interval, ("training interval", None), strict=True):
        axes.axvline(end, color=style.REFERENCE, lw=1.2, ls=":", label=label)
    axes.set(xlabel="x", ylabel="error", xlim=(x[0], x[-1]), ylim=(0, None))
    axes.legend(**style.OPAQUE)
    return axes


def estimate_against_error(axes: Axes, error: Numbers, error_hat: Numbers, safe: Flags) -> Axes:
    """Draw each bound against its true error, with the safe flag of each; points above the diagonal are covered.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import plots
        >>> x = np.linspace(0, 1, 50)
        >>> axes = plots.estimate_against_error(Figure().subplots(), x**2, x, x < 0.5)
    """
    floor = style.floor_of(error, error_hat)
    top = max(float(error.max()), float(error_hat.max()), 10 * floor)
    style.scatter_by_flag(axes, error.clip(floor), error_hat.clip(floor), safe)
    axes.plot([floor, top], [floor, top], color=style.TRUE, lw=1.2, label="error = bound")
    ends = floor / 1.5, 1.5 * top
    axes.set(
        xlabel="true error", ylabel="error bound", xscale="log", yscale="log", xlim=ends, ylim=ends
    )
    style.label_logarithms(axes.xaxis, axes.yaxis)
    axes.legend(frameon=False)
    return axes
