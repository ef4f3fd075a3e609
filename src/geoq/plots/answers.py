"""Pictures of answers: all queries, one field, some rollouts, and arrays of errors and bounds."""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation

from geoq.checks import check_index
from geoq.core.assessment import N_OUTPUTS_SHOWN, Assessment, numbers_of
from geoq.data.domain import Layout, Mesh
from geoq.neighbors import Neighbors
from geoq.plots import style
from geoq.plots.style import Numbers
from geoq.rollout.fitted import RolloutAssessment
from geoq.rollout.horizon import EveryValue

Flags: TypeAlias = Bool[np.ndarray, " *shape"]
Ends: TypeAlias = tuple[float, float]
# Arrays by the names of the curves or maps.
Drawn: TypeAlias = dict[str, np.ndarray]
# The outputs, the errors and the support of one field, and the upper end of the errors; None for the largest of them.
Field: TypeAlias = tuple[Drawn, Drawn, Drawn, float | None]
LINES: dict[str, dict[str, Any]] = {
    "bound": {"color": style.ESTIMATE, "ls": "--", "lw": 1.6},
    "expected": {"color": style.REFERENCE, "ls": "-.", "lw": 1.6},
    "error": {"color": style.TRUE, "ls": "-", "lw": 1.6},
}
LINES |= {"prediction": LINES["bound"], "truth": LINES["error"], "support score": LINES["expected"]}
# The largest support score with a colour of its own, and the label of the limit.
MOST_SCORE, LIMIT = 3.0, "safe up to a mean of 1"
# A triangle is left out if it is longer than this many distances of its corners to their neighbour of this rank, the node itself included.
LONG, N_NEAR = 2, 7
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
    layer: int | None = None,
    extent: Sequence[float] | None = None,
    expected: Any = None,
    error: Any = None,
    truth: Any = None,
    support: Any = None,
) -> list[Axes]:
    """Draw the prediction of one query and the bound of its error; the title states whether the query is safe.

    Fields in the plane, on a grid or on a mesh, are drawn as maps, fields on a line as lines, a layer of a grid in space as a map, and
    nodes in space as points. All errors are drawn with the same range of values. The range is 0 to 1 if the bounds are 0 or 1, as
    bounds of wrong cells are. Returns the axes.

    Args:
        figure: an empty figure; 13 x 3.6 inches are suitable for four maps, 8 x 5 inches for lines.
        assessment: the answer of ``GeoQ.assess``.
        row: the number of the query.
        channel: the number of the field if there are several. The grid is last, and all dimensions before it are channels.
        layer: the place on the first of three axes of a grid; None means the layer with the largest bound.
        extent: the edges of a grid: (left, right) of a line, (left, right, bottom, top) of a map; None means numbers of cells.
        expected: expected errors of all queries, from ``GeoQ.expected_error``.
        error: true errors of all queries: ``abs(y - assessment.prediction)``.
        truth: reference outputs y of all queries.
        support: where this query differs from the data, ``assessment.support_map(row)``; the title then has the reason.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, Grid, RandomFolds, plots
        >>> from geoq.parts import FieldBound, NoFactor
        >>> x = np.random.default_rng(0).uniform(size=(60, 1)) * np.linspace(1, 2, 16)
        >>> settings = {"domain": Grid(1), "bound_model": FieldBound(factor=NoFactor())}
        >>> estimator = GeoQ(np.abs, None, folds=RandomFolds(5), **settings).fit(x, x**2)
        >>> answer = estimator.assess(x[:3])
        >>> axes = plots.fields(Figure(), answer, 0, support=answer.support_map(0))
    """
    row, layout = check_index(row, "row", len(assessment)), assessment.fitted.layout
    is_line = _is_line(layout, tuple(assessment.prediction.shape[1:]))
    style.prepare(figure, "constrained" if is_line else "compressed")
    given = {"expected": expected, "error": error, "truth": truth, "support": support}
    drawn, layer = _one_field(assessment, row, channel, layer, given)
    axes = (_lines if is_line else _maps)(figure, layout, drawn, extent)
    title = _title(assessment, row, channel, layer, support)
    figure.suptitle(style.wrapped(figure, title), fontsize=10)
    return axes


def _title(assessment: Assessment, row: int, channel: int, layer: int | None, support: Any) -> str:
    """Which field is drawn, whether it is safe, and with a map of its support score why not."""
    layout, safe = assessment.fitted.layout, bool(assessment.safe[row])
    several = layout.n_outputs(tuple(assessment.prediction.shape[1:])) > 1
    which = f", channel {channel}" if several else ""
    if len(layout.cells) == 3:
        which += f", layer {layer} (of 0 to {layout.cells[0] - 1})"
    score = float(assessment.support_score[row])
    title = f"query {row}{which}: {'safe' if safe else 'NOT safe'} (support score {score:.3g}, safe up to 1)"
    if support is None or safe:
        return title
    why = assessment.explanation(row)
    placed = " around " in why or support.mean() > 1 or np.isinf(score)
    return f"{title}{'' if placed else ', because of the whole field and not of a place'}: {why}"


def _one_field(
    assessment: Assessment, row: int, channel: int, layer: int | None, given: dict[str, Any]
) -> tuple[Field, int | None]:
    """One channel of one query of each output, of each error and of the support, and the layer that they show."""
    if assessment.lost[row]:
        raise ValueError(f"row={row} is {assessment.safety(row)}; choose another row.")
    if given["truth"] is not None:
        style.check_shape(given["truth"], "truth", assessment.prediction, "predictions")
    cells, bound = assessment.fitted.layout.cells, assessment.error_hat

    def field_of(values: Any) -> Float[np.ndarray, " *cells"]:
        parts = numbers_of(values)[row].astype(float).reshape(-1, *cells)
        # An error with a single channel belongs to all channels of the prediction.
        which = check_index(channel, "channel", len(parts)) if len(parts) > 1 else 0
        return np.asarray(parts[which])

    outputs = {"prediction": assessment.prediction, "truth": given["truth"]}
    errors = {"bound": bound, "expected": given["expected"], "error": given["error"]}
    errors = {n: style.true_errors(e, n, bound) for n, e in errors.items() if e is not None}
    largest = 1.0 if np.isin(np.nan_to_num(errors["bound"]), (0, 1)).all() else None
    shown = [{n: field_of(p) for n, p in of.items() if p is not None} for of in (outputs, errors)]
    shown.append({} if given["support"] is None else {"support score": given["support"]})
    if len(cells) == 3:
        highest = np.nan_to_num(shown[1]["bound"]).max(axis=(1, 2)).argmax()
        layer = check_index(highest if layer is None else layer, "layer", cells[0])
        shown = [{n: values[layer] for n, values in of.items()} for of in shown]
    return (shown[0], shown[1], shown[2], largest), layer


def _is_line(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a field is drawn as a line, and not as a map; raises if it can be neither."""
    if not layout.on_cells or not layout.holds(shape):
        raise ValueError(
            f"the prediction of a query has shape {shape}, but a picture shows a field; use plots.summary."
        )
    nodes = getattr(layout.domain, "coordinates", None)
    return (len(layout.cells) if nodes is None else nodes.shape[1]) == 1


def _maps(figure: Figure, layout: Layout, drawn: Field, extent: Any) -> list[Axes]:
    """Draw maps in the number of columns that makes them largest; the first axis of a grid points upwards."""
    outputs, errors, support, largest = drawn
    n_maps, nodes = sum(map(len, drawn[:3])), getattr(layout.domain, "coordinates", None)
    edges: Any = extent or [end for n in layout.cells[:-3:-1] for end in (-0.5, n - 0.5)]
    in_space = nodes is not None and nodes.shape[1] > 2
    width, height = np.ptp(np.reshape(edges, (2, 2)) if nodes is None else nodes.T[:2], axis=1)
    across, upwards = figure.get_figwidth() / width, figure.get_figheight() / height
    n_columns = max(range(1, n_maps + 1), key=lambda n: min(across / n, upwards / -(-n_maps // n)))
    how: dict[str, Any] = {"subplot_kw": {"projection": "3d"}} if in_space else {}
    panels = rest = style.panels_of(figure, n_maps, n_columns, **how)
    triangles = None if nodes is None or in_space else _triangles(nodes)
    top = largest or max(float(np.nanmax(values)) for values in errors.values()) or 1.0
    both = np.stack([*outputs.values()])
    for parts, cmap, (low, high), label, beyond in (
        (outputs, "viridis", (np.nanmin(both), np.nanmax(both)), "", "neither"),
        (errors, "cividis", (0.0, top), "error", "neither"),
        (support, "Reds", (0.0, MOST_SCORE), LIMIT, "max"),
    ):
        maps, rest = rest[: len(parts)], rest[len(parts) :]
        colours: dict[str, Any] = {"cmap": cmap, "vmin": low, "vmax": high}
        for axes, (name, values) in zip(maps, parts.items(), strict=True):
            if nodes is None:
                image: Any = axes.imshow(values, origin="lower", extent=edges, **colours)
            else:
                image = _on_nodes(axes, nodes, triangles, values, colours)
            axes.set_title(_label(name, errors), fontsize=10)
        if maps:
            bar = figure.colorbar(image, ax=maps, label=label, extend=beyond)
    if support:
        bar.ax.axhline(1, color=style.TRUE, lw=1.2, ls="--")
    return panels


def _triangles(nodes: Numbers) -> Triangulation:
    """Triangles between nodes in the plane, without those across a notch or a hole: they are longer than the distances to neighbours."""
    found = Triangulation(*nodes.T)
    corners = nodes[found.triangles]
    longest = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max(axis=1)
    apart = Neighbors(nodes).nearest(nodes, N_NEAR)[0][:, -1]
    found.set_mask(longest > LONG * apart[found.triangles].max(axis=1))
    return found


def _on_nodes(
    axes: Any, nodes: np.ndarray, triangles: Triangulation | None, values: np.ndarray, colours: Any
) -> Any:
    """Draw the values at nodes in the plane as triangles; nodes without a triangle, and nodes in space, are points."""
    axes.set_aspect("equal")
    if triangles is None:
        axes.locator_params(nbins=3)
        return axes.scatter(*nodes.T[:3], c=values, s=9, **colours)
    alone = np.setdiff1d(np.arange(len(nodes)), triangles.get_masked_triangles())
    if len(alone):
        axes.scatter(*nodes[alone].T, c=values[alone], s=9, **colours)
    return axes.tripcolor(triangles, values, **colours)


def _lines(figure: Figure, layout: Layout, drawn: Field, extent: Any) -> list[Axes]:
    """Draw the outputs in the upper panel and the errors in the lower one."""
    outputs, errors, support, largest = drawn
    panels = style.panels_of(figure, 2 + len(support), 1, sharex=True)
    upper, lower = panels[:2]
    (n_cells,) = layout.cells
    edges = extent or (-0.5, n_cells - 0.5)
    at = edges[0] + (np.arange(n_cells) + 0.5) * (edges[1] - edges[0]) / n_cells
    if isinstance(layout.domain, Mesh):
        at = layout.domain.coordinates[:, 0]
    order = np.argsort(at)
    for axes, parts in zip(panels, drawn[:3], strict=False):
        for name, values in parts.items():
            axes.plot(at[order], values[order], label=_label(name, errors), **LINES[name])
    upper.set_ylabel("prediction" if len(outputs) == 1 else "output")
    if len(outputs) > 1:
        upper.legend(**style.OPAQUE)
    lower.set(ylabel="error", xlim=extent or (at.min(), at.max()))
    lower.set_ylim(0, None if largest is None else 1.05 * largest)
    lower.legend(**style.OPAQUE)
    if support:
        panels[2].axhline(1, color=style.TRUE, lw=1.2, ls="--", label=LIMIT)
        panels[2].set(ylabel="support score", ylim=(0, None))
        panels[2].legend(**style.OPAQUE)
    panels[-1].set_xlabel("coordinate")
    return panels


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
