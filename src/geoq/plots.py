"""The paper's pictures and the calibration diagnostics: axes in, axes out.

Lines differ in shade and in dash, so that the pictures read in grey as well.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from geoq.metrics import CoverageBin

try:
    from matplotlib.axes import Axes
except ImportError as exc:
    raise ImportError(
        'geoq.plots draws with Matplotlib; install it by pip install "geoq[plots]".'
    ) from exc

TRUE, ESTIMATE, REFERENCE = "#1b1b1b", "#c1440e", "#4c78a8"
SHADE = "#cfdbe8"


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
    floor = max(
        float(
            np.concatenate([error[error > 0], error_hat[error_hat > 0]]).min(
                initial=np.inf
            )
        ),
        1e-12,
    )
    top = max(float(error.max()), float(error_hat.max()), 10 * floor)
    for mask, color, marker, name in (
        (safe, REFERENCE, "o", "safe"),
        (~safe, ESTIMATE, "x", "not safe"),
    ):
        if mask.any():
            shown = error[mask].clip(floor), error_hat[mask].clip(floor)
            axes.scatter(
                *shown, s=9, c=color, marker=marker, lw=0.7, alpha=0.5, label=name
            )
    axes.plot([floor, top], [floor, top], color=TRUE, lw=1.2, label="covered above")
    axes.set(xlabel="true error", ylabel="estimate", xscale="log", yscale="log")
    axes.set(xlim=(floor / 1.5, 1.5 * top), ylim=(floor / 1.5, 1.5 * top))
    axes.legend(frameon=False)
    return axes


def calibration_curve(
    axes: Axes,
    nominal: Float[np.ndarray, " n_levels"],
    observed: Float[np.ndarray, " n_levels"],
    observed_safe: Float[np.ndarray, " n_levels"],
) -> Axes:
    """Observed against nominal coverage over quantile levels, everywhere and inside the safe region."""
    axes.plot([0, 1], [0, 1], color=TRUE, lw=1, ls=":", label="ideal")
    axes.plot(
        nominal,
        observed,
        color=ESTIMATE,
        lw=1.6,
        ls="--",
        marker="o",
        ms=4,
        label="all queries",
    )
    axes.plot(
        nominal,
        observed_safe,
        color=REFERENCE,
        lw=1.6,
        marker="s",
        ms=4,
        label="safe queries",
    )
    axes.set(
        xlabel="nominal coverage",
        ylabel="observed coverage",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.legend(frameon=False, loc="lower right")
    return axes


def support_scores(
    axes: Axes, score: Float[np.ndarray, " n"], threshold: float
) -> Axes:
    """Support scores of the queries with the threshold up to which they count as safe."""
    positive = score.clip(
        max(float(score[score > 0].min(initial=np.inf)), 1e-12)
        if score.any()
        else 1e-12
    )
    ends = min(positive.min(), threshold) / 1.1, max(positive.max(), threshold) * 1.1
    axes.hist(
        positive,
        bins=np.geomspace(*ends, 40).tolist(),
        color=SHADE,
        edgecolor=REFERENCE,
        lw=0.7,
    )
    share = float((score <= threshold).mean())
    axes.axvline(
        threshold, color=ESTIMATE, lw=1.6, ls="--", label=f"threshold: {share:.0%} safe"
    )
    axes.set(xlabel="support score", ylabel="queries", xscale="log")
    axes.legend(frameon=False)
    return axes


def coverage_by_score(axes: Axes, bins: list[CoverageBin], quantile: float) -> Axes:
    """Coverage in bins of the support score, the best supported queries first."""
    axes.bar(
        range(1, len(bins) + 1),
        [b.coverage for b in bins],
        color=SHADE,
        edgecolor=REFERENCE,
        lw=0.9,
        label="observed",
    )
    axes.axhline(
        quantile, color=ESTIMATE, lw=1.6, ls="--", label=f"asked for: {quantile:g}"
    )
    axes.set(
        xlabel="bin of the support score (1: best supported)",
        ylabel="coverage",
        ylim=(0, 1.02),
    )
    axes.set_xticks(range(1, len(bins) + 1))
    axes.legend(facecolor="white", framealpha=1, loc="lower left")
    return axes


def error_over_distance(
    axes: Axes,
    distance: Float[np.ndarray, " n"],
    error: Float[np.ndarray, " n"],
    interpolating: Bool[np.ndarray, " n"],
    law: tuple[Float[np.ndarray, " n_curve"], Float[np.ndarray, " n_curve"]],
    edge: float,
) -> Axes:
    """Held-out errors over the distance to the data, the law fitted to them, and the edge of interpolation."""
    for mask, color, marker, name in (
        (interpolating, REFERENCE, "o", "held out at random"),
        (~interpolating, ESTIMATE, "x", "held out to extrapolate"),
    ):
        shown = mask & (error > 0) & (distance > 0)
        axes.scatter(
            distance[shown],
            error[shown],
            s=7,
            c=color,
            marker=marker,
            lw=0.6,
            alpha=0.35,
            label=name,
        )
    axes.plot(*law, color=TRUE, lw=2, label="the law")
    axes.axvline(edge, color=TRUE, lw=1.2, ls=":", label="safe up to here")
    axes.set(xlabel="support distance", ylabel="error", xscale="log", yscale="log")
    axes.legend(frameon=False)
    return axes


def error_over_time(
    axes: Axes,
    error: Float[np.ndarray, " n n_steps *state"],
    error_hat: Float[np.ndarray, " n n_steps *state"],
    n_calibrated: int,
) -> Axes:
    """Errors and estimates averaged over the state, for each rollout and for their mean; the calibration horizon marked."""
    step = np.arange(1, error.shape[1] + 1)
    for values, color, dashes, name in (
        (error, TRUE, "-", "true error"),
        (error_hat, ESTIMATE, "--", "estimate"),
    ):
        each = values.reshape(*values.shape[:2], -1).mean(axis=2)
        axes.plot(step, each.T, color=color, lw=0.5, ls=dashes, alpha=0.25)
        axes.plot(step, each.mean(axis=0), color=color, lw=1.8, ls=dashes, label=name)
    axes.axvline(
        n_calibrated, color=REFERENCE, lw=1.2, ls=":", label="calibration horizon"
    )
    axes.set(xlabel="step", ylabel="mean over the state", xlim=(1, step[-1]))
    axes.set_ylim(0, None)
    axes.legend(facecolor="white", framealpha=1, edgecolor="none")
    return axes


def space_time(
    axes: Axes,
    values: Float[np.ndarray, " n_steps n_points"],
    most: float,
    name: str,
) -> Axes:
    """A field on a line over time: steps upwards, darker is less; beyond ``most`` all is alike."""
    shown = axes.imshow(
        values,
        origin="lower",
        aspect="auto",
        cmap="cividis",
        vmin=0,
        vmax=most,
        extent=(0, values.shape[1], 0.5, len(values) + 0.5),
    )
    axes.figure.colorbar(shown, ax=axes, shrink=0.8)
    axes.set(xlabel="coordinate", ylabel="step", title=name)
    return axes


def trusted_horizons(
    axes: Axes,
    trusted: Int[np.ndarray, " n"],
    held: Int[np.ndarray, " n"],
) -> Axes:
    """Steps that each rollout was trusted for, beside those for which its error did stay within the tolerance."""
    place = np.arange(1, len(trusted) + 1)
    axes.bar(
        place, trusted, color=SHADE, edgecolor=REFERENCE, lw=0.9, label="trusted for"
    )
    axes.plot(place, held, color=TRUE, ls="none", marker="_", ms=14, mew=2.2)
    axes.plot([], [], color=TRUE, lw=2.2, label="true error within the tolerance for")
    axes.set(xlabel="initial state", ylabel="steps", ylim=(0, None))
    axes.set_xticks(place[:: max(1, len(place) // 20)])
    axes.legend(facecolor="white", framealpha=1, edgecolor="none")
    return axes
