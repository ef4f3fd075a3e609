"""Pictures of what geoq answers.

``summary``, ``fields`` and ``rollouts`` draw an assessment into a figure; the others draw arrays into axes. Lines differ in
shade and in dash, so that the pictures read in grey as well.
"""

from collections.abc import Iterable
from operator import index
from textwrap import fill
from typing import Literal, SupportsIndex

import numpy as np
import torch
from jaxtyping import Bool, Float

from geoq.arrays import Array, to_tensor
from geoq.assessment import Assessment
from geoq.increments.shapes import check_spatial
from geoq.rollout import RolloutAssessment

try:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as exc:
    raise ImportError(
        'geoq.plots draws with Matplotlib; install it by pip install "geoq[plots]".'
    ) from exc

TRUE, ESTIMATE, REFERENCE = "#1b1b1b", "#c1440e", "#4c78a8"
SHADE = "#cfdbe8"
# Of more values than this some are drawn: a million crosses are one blot, and take a while.
MOST_POINTS = 20_000


def summary(
    figure: Figure, assessment: Assessment, *, error: Array | None = None
) -> list[Axes]:
    """All queries at a glance: bounds over support scores and, where true errors are given, bounds against errors.

    On the left each query has one point, the mean of its bounds if there are several. On the right each bound has one, up to
    20,000 drawn by lot; the title counts them all.

    Args:
        figure: empty; 10 x 4.5 inches suit it.
        assessment: what ``GeoQ.assess`` answered.
        error: true errors, of the bounds' shape: ``abs(y - assessment.prediction)``.
    """
    bound, safe = _numbers(assessment.error_hat), _numbers(assessment.safe) > 0
    true = None if error is None else _errors(error, "error", assessment.error_hat)
    _arrange(figure)
    panels = figure.subplots(1, 1 if true is None else 2, squeeze=False)
    left, *right = panels[0]
    score = _numbers(assessment.support_score)
    _bound_over_score(
        left, score, bound.reshape(len(bound), -1), safe, assessment.threshold
    )
    if true is not None:
        each = np.broadcast_to(safe.reshape(-1, *[1] * (bound.ndim - 1)), bound.shape)
        n_drawn = min(MOST_POINTS, bound.size)
        lot = np.random.default_rng(0).choice(
            bound.size, n_drawn, replace=False, shuffle=False
        )
        values = [part.reshape(-1)[lot] for part in (true, bound, each)]
        estimate_against_error(right[0], *values)
        covered = [
            f"{(true <= bound)[mask].mean():.1%} of {name}"
            for name, mask in (("safe", safe), ("not safe", ~safe))
            if mask.any()
        ]
        right[0].set_title("covered: " + ", ".join(covered), fontsize=10)
    return [left, *right]


def fields(
    figure: Figure,
    assessment: Assessment,
    row: SupportsIndex,
    *,
    channel: SupportsIndex = 0,
    n_spatial: int = 2,
    expected: Array | None = None,
    error: Array | None = None,
) -> list[Axes]:
    """One query's field: the prediction beside the bound of its error, and whether the bound is safe.

    Fields in the plane are drawn as maps, fields on a line as lines. All errors share one scale.

    Args:
        figure: empty; 13 x 3.6 inches suit four maps, 8 x 5 lines.
        assessment: what ``GeoQ.assess`` answered.
        row: which of its queries.
        channel: which field of several; the grid is last, all dimensions before it are channels.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        expected: expected errors of all queries, from ``GeoQ.expected_error``.
        error: true errors of all queries: ``abs(y - assessment.prediction)``.
    """
    check_spatial(n_spatial)
    row = _index(row, len(assessment), "row", "the assessment", "queries")
    one = slice(row, row + 1)
    prediction = _channel(assessment.prediction[one], "prediction", channel, n_spatial)
    given = {"bound": assessment.error_hat}
    for name, values in (("expected", expected), ("error", error)):
        if values is not None:
            _errors(values, name, assessment.error_hat)
            given[name] = values
    shown = {
        name: _channel(values[one], "error_hat", channel, n_spatial, alone=True)
        for name, values in given.items()
    }
    axes = (_maps if n_spatial == 2 else _lines)(figure, prediction, shown)
    several = assessment.prediction[row].ndim > n_spatial
    title = (
        f"query {row}{f', channel {index(channel)}' if several else ''}: {assessment.safety(row)} "
        f"(support score {float(assessment.support_score[row]):.3g}, threshold {assessment.threshold:.3g})"
    )
    figure.suptitle(_wrapped(figure, title), fontsize=10)
    return axes


def rollouts(
    figure: Figure,
    assessment: RolloutAssessment,
    rows: Iterable[SupportsIndex],
    *,
    error: Array | None = None,
) -> list[Axes]:
    """Chosen rollouts, one below the other: the largest bound at each step, and until when the rollout is trusted and why.

    Where the tolerance was given per coordinate, bounds and errors are drawn in units of it.

    Args:
        figure: empty; 8 inches wide and 2 high for each rollout suit it.
        assessment: what ``RolloutGeoQ.assess`` answered.
        rows: which of its rollouts.
        error: true errors of all rollouts: ``abs(truth - assessment.prediction)``.
    """
    n, n_steps = assessment.safe.shape
    chosen = [_index(row, n, "rows", "the assessment", "rollouts") for row in rows]
    if not chosen:
        raise ValueError(
            f"rows is empty, so there is nothing to draw; choose some of 0 to {n - 1}."
        )
    if error is not None:
        _errors(error, "error", assessment.error_hat)
    tolerance = (
        None
        if assessment.tolerance is None
        else torch.as_tensor(assessment.tolerance).cpu().numpy()
    )
    unit = 1.0 if tolerance is None or not tolerance.ndim else tolerance
    _arrange(figure)
    grid = figure.subplots(len(chosen), 1, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = grid[:, 0].tolist()
    for axes, row in zip(panels, chosen, strict=True):
        curves = {"bound": assessment.error_hat[row]}
        if error is not None:
            curves["true error"] = error[row]
        largest = {
            name: (_numbers(values) / unit).reshape(n_steps, -1).max(axis=1)
            for name, values in curves.items()
        }
        _trust(axes, assessment, row, largest)
        if tolerance is not None:
            axes.axhline(
                1.0 if tolerance.ndim else float(tolerance),
                color=REFERENCE,
                lw=1.2,
                ls="-.",
                label="tolerance",
            )
        title = "; ".join(assessment.outcome(row))
        axes.set_title(_wrapped(figure, title), fontsize=9)
    name = "largest error" + (" / tolerance" if isinstance(unit, np.ndarray) else "")
    figure.supylabel(name, fontsize=10)
    panels[-1].set(xlabel="step", xlim=(0.5, n_steps + 0.5), ylim=(0, None))
    _legend_below(figure, panels)
    return panels


def error_over_input(
    axes: Axes,
    x: Float[np.ndarray, " n"],
    error: Float[np.ndarray, " n"],
    error_hat: Float[np.ndarray, " n"],
    safe: Bool[np.ndarray, " n"],
    training_interval: tuple[float, float],
) -> Axes:
    """True and estimated error over a scalar input, the safe region shaded and the training interval marked."""
    order = np.argsort(x)
    x, error, error_hat, safe = x[order], error[order], error_hat[order], safe[order]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], safe.astype(int), [0]])))
    for number, (start, stop) in enumerate(edges.reshape(-1, 2)):
        label = "safe region" if number == 0 else None
        axes.axvspan(x[start], x[stop - 1], color=SHADE, lw=0, label=label)
    axes.plot(x, error, color=TRUE, lw=1.6, label="true error")
    axes.plot(x, error_hat, color=ESTIMATE, lw=1.6, ls="--", label="estimate")
    for number, end in enumerate(training_interval):
        axes.axvline(
            end,
            color=REFERENCE,
            lw=1.2,
            ls=":",
            label="training interval" if number == 0 else None,
        )
    axes.set(xlabel="x", ylabel="error", xlim=(x[0], x[-1]), ylim=(0, None))
    axes.legend(facecolor="white", framealpha=1, edgecolor="none")
    return axes


def estimate_against_error(
    axes: Axes,
    error: Float[np.ndarray, " *shape"],
    error_hat: Float[np.ndarray, " *shape"],
    safe: Bool[np.ndarray, " *shape"],
) -> Axes:
    """Each estimate against its true error; points above the line are covered."""
    floor = _floor(error, error_hat)
    top = max(float(error.max()), float(error_hat.max()), 10 * floor)
    _by_flag(axes, error.clip(floor), error_hat.clip(floor), safe)
    axes.plot([floor, top], [floor, top], color=TRUE, lw=1.2, label="covered above")
    axes.set(xlabel="true error", ylabel="estimate", xscale="log", yscale="log")
    axes.set(xlim=(floor / 1.5, 1.5 * top), ylim=(floor / 1.5, 1.5 * top))
    axes.legend(frameon=False)
    return axes


def _bound_over_score(
    axes: Axes,
    score: Float[np.ndarray, " n"],
    bound: Float[np.ndarray, " n n_values"],
    safe: Bool[np.ndarray, " n"],
    threshold: float,
) -> None:
    """The mean bound of each query over its support score, the scores that count as safe shaded."""
    mean, least = bound.mean(axis=1), _floor(score, np.array([threshold]))
    score, edge = score.clip(least), max(threshold, least)
    ends = min(score.min(), edge) / 1.2, max(score.max(), edge) * 1.2
    axes.axvspan(ends[0], edge, color=SHADE, lw=0)
    _by_flag(axes, score, mean.clip(_floor(mean)), safe)
    axes.axvline(edge, color=TRUE, lw=1.2, ls="--", label="threshold")
    name = "error bound" if bound.shape[1] == 1 else "mean error bound"
    axes.set(xlabel="support score", ylabel=name, xscale="log", yscale="log", xlim=ends)
    axes.set_title(f"{safe.sum()} of {len(safe)} queries safe", fontsize=10)
    axes.legend(facecolor="white", framealpha=1, edgecolor="none")


def _by_flag(
    axes: Axes,
    x: Float[np.ndarray, " *shape"],
    y: Float[np.ndarray, " *shape"],
    safe: Bool[np.ndarray, " *shape"],
) -> None:
    """Points of safe queries and of the others, told apart by colour and by shape."""
    for mask, color, marker, name in (
        (safe, REFERENCE, "o", "safe"),
        (~safe, ESTIMATE, "x", "not safe"),
    ):
        if mask.any():
            axes.scatter(
                x[mask],
                y[mask],
                s=9,
                c=color,
                marker=marker,
                lw=0.7,
                alpha=0.5,
                label=name,
            )


def _maps(
    figure: Figure,
    prediction: Float[np.ndarray, " height width"],
    errors: dict[str, Float[np.ndarray, " height width"]],
) -> list[Axes]:
    """Maps in as many columns as make them largest; the first axis of the grid points upwards."""
    _arrange(figure, "compressed")
    n_maps = 1 + len(errors)
    n_columns = _columns(figure, n_maps, *prediction.shape)
    grid = figure.subplots(-(-n_maps // n_columns), n_columns, squeeze=False)
    first, *others = grid.flat[:n_maps]
    for empty in grid.flat[n_maps:]:
        empty.remove()
    shown = first.imshow(prediction, origin="lower", cmap="viridis")
    figure.colorbar(shown, ax=first)
    first.set_title("prediction", fontsize=10)
    most = max(float(values.max()) for values in errors.values()) or 1.0
    for axes, (name, values) in zip(others, errors.items(), strict=True):
        shown = axes.imshow(values, origin="lower", cmap="cividis", vmin=0, vmax=most)
        axes.set_title(_name(name, errors), fontsize=10)
    figure.colorbar(shown, ax=others, label="error")
    return [first, *others]


def _lines(
    figure: Figure,
    prediction: Float[np.ndarray, " length"],
    errors: dict[str, Float[np.ndarray, " length"]],
) -> list[Axes]:
    """The prediction above, the errors below."""
    _arrange(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(prediction, color=TRUE, lw=1.6)
    upper.set(ylabel="prediction")
    styles = {
        "bound": (ESTIMATE, "--"),
        "expected": (REFERENCE, "-."),
        "error": (TRUE, "-"),
    }
    for name, values in errors.items():
        color, dashes = styles[name]
        lower.plot(values, color=color, lw=1.6, ls=dashes, label=_name(name, errors))
    lower.set(xlabel="coordinate", ylabel="error", xlim=(0, len(prediction) - 1))
    lower.set_ylim(0, None)
    lower.legend(facecolor="white", framealpha=1, edgecolor="none")
    return [upper, lower]


def _name(key: str, errors: dict[str, np.ndarray]) -> str:
    if key != "error":
        return {"bound": "bound of the error", "expected": "expected error"}[key]
    return f"true error, {(errors['error'] <= errors['bound']).mean():.1%} within the bound"


def _trust(
    axes: Axes,
    assessment: RolloutAssessment,
    row: int,
    largest: dict[str, Float[np.ndarray, " n_steps"]],
) -> None:
    """One rollout: its bound and, if given, its true error; the trusted steps shaded, unsafe ones crossed."""
    n_steps = assessment.safe.shape[1]
    step, safe = np.arange(1, n_steps + 1), _numbers(assessment.safe[row]) > 0
    horizons, what = assessment.horizon
    if horizon := int(horizons[row]):
        axes.axvspan(0.5, horizon + 0.5, color=SHADE, lw=0, label=what)
    styles = {"bound": (ESTIMATE, "--"), "true error": (TRUE, "-")}
    for name, values in largest.items():
        color, dashes = styles[name]
        finite = np.where(np.isfinite(values), values, np.nan)
        axes.plot(step, finite, color=color, lw=1.6, ls=dashes, label=name)
    if not safe.all():
        axes.plot(
            step[~safe],
            np.full((~safe).sum(), 0.04),
            transform=axes.get_xaxis_transform(),
            color=ESTIMATE,
            ls="none",
            marker="x",
            ms=4,
            label="step not safe",
        )
    _calibration_horizon(axes, assessment.n_calibrated, n_steps)
    diverged = int(assessment.diverged_at[row])
    if diverged:
        axes.axvline(diverged, color=TRUE, lw=1.2, label="diverged")


def _calibration_horizon(axes: Axes, n_calibrated: int, n_steps: int) -> None:
    if n_calibrated <= n_steps:
        axes.axvline(
            n_calibrated, color=REFERENCE, lw=1.2, ls=":", label="calibration horizon"
        )


def _columns(figure: Figure, n_maps: int, height: int, width: int) -> int:
    """Into how many columns the maps go so that each is as large as it can be."""

    def size(n_columns: int) -> float:
        n_rows = -(-n_maps // n_columns)
        return min(
            figure.get_figwidth() / n_columns / width,
            figure.get_figheight() / n_rows / height,
        )

    return max(range(1, n_maps + 1), key=size)


def _arrange(
    figure: Figure, engine: Literal["constrained", "compressed"] = "constrained"
) -> None:
    """Room for titles and colour bars, unless the caller has seen to that."""
    if figure.get_layout_engine() is None:
        figure.set_layout_engine(engine)


def _wrapped(figure: Figure, text: str) -> str:
    """Broken into lines that fit the figure: at size 10 an inch holds about 13 letters."""
    return fill(text, max(20, int(13 * figure.get_figwidth())))


def _legend_below(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels; what several of them show is named once."""
    named: dict[str, Artist] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=max(1, min(len(named), int(figure.get_figwidth() / 1.6))),
        frameon=False,
        fontsize=9,
    )


def _floor(*arrays: np.ndarray) -> float:
    """The least positive value, at which a logarithmic axis shows zeros."""
    values = np.concatenate([array.reshape(-1) for array in arrays])
    least = float(values[values > 0].min(initial=np.inf))
    return max(least, 1e-12) if np.isfinite(least) else 1e-12


def _numbers(values: Array, name: str = "values") -> np.ndarray:
    numbers: np.ndarray = to_tensor(values, name).cpu().numpy()
    return numbers


def _errors(values: Array, name: str, error_hat: Array) -> np.ndarray:
    """Errors of all queries, refused unless they are of the bounds' shape, known and not negative.

    Where a rollout has diverged its bound is infinite, and its error need not be known.
    """
    numbers = _numbers(values, name)
    if numbers.shape != tuple(error_hat.shape):
        raise ValueError(
            f"{name} has shape {numbers.shape}, but the bounds have {tuple(error_hat.shape)}; pass the errors of all "
            "queries, one for each bound."
        )
    unknown = ~np.isfinite(numbers) & np.isfinite(_numbers(error_hat))
    if unknown.any():
        raise ValueError(
            f"{name} is not finite in {unknown.sum()} of {numbers.size} places where the bound is; assess the queries "
            "alone whose errors are known."
        )
    if (numbers < 0).any():
        raise ValueError(
            f"{name} holds {np.nanmin(numbers):.3g}, but an error is never negative; pass errors, not outputs: "
            "abs(y - assessment.prediction)."
        )
    return numbers


def _index(value: SupportsIndex, n: int, name: str, whole: str, members: str) -> int:
    number = index(value)
    if not 0 <= number < n:
        raise ValueError(
            f"{name}={number}, but the {members} of {whole} are 0 to {n - 1}; choose one of them."
        )
    return number


def _channel(
    values: Float[Array, " 1 *field"],
    name: str,
    channel: SupportsIndex,
    n_spatial: int,
    *,
    alone: bool = False,
) -> np.ndarray:
    """One channel of one query's field; a field that is ``alone`` may stand for all channels."""
    numbers, shape = _numbers(values, name), tuple(values.shape[1:])
    if len(shape) < n_spatial:
        way_out = "look at all queries with plots.summary"
        raise ValueError(
            f"n_spatial={n_spatial}, but {name} of a query has shape {shape}; "
            f"{'pass n_spatial=1' if shape else way_out}."
        )
    channels = numbers.reshape(-1, *shape[len(shape) - n_spatial :])
    alone = alone and len(channels) == 1
    chosen = 0 if alone else _index(channel, len(channels), "channel", name, "channels")
    one: np.ndarray = channels[chosen]
    return one
