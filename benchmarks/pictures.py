"""Pictures of the paper and diagnostics of a calibration.

Each function draws arrays into axes and returns the axes. Lines differ in shade and in dash, so that the pictures can be
read in grey. ``save`` writes a picture of results with a digest of the rows that it shows, and a test compares the digest with the
results file.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from benchmarks.record import as_text
from geoq.metrics import CoverageBin
from geoq.plots.style import ESTIMATE, REFERENCE, SHADE, TRUE

# The name of the digest in the metadata of a PNG file.
DIGEST = "Rows"


def digest(rows: list[dict[str, Any]]) -> str:
    """A hash of rows, as a results file contains them."""
    return hashlib.sha256(as_text({"rows of": "a picture"}, rows).encode()).hexdigest()


def save(
    figure: Figure, path: Path | str, rows: list[dict[str, Any]], dpi: int = 110
) -> None:
    """Write a picture of rows of a results file, with their digest."""
    figure.savefig(path, dpi=dpi, metadata={DIGEST: digest(rows)})


def stored_digest(path: Path | str) -> str | None:
    """The digest of the rows that a picture shows; None for pictures that were not written by ``save``."""
    with Image.open(path) as picture:
        return picture.info.get(DIGEST)


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
    """Histogram of the queries' support scores, and the threshold: scores up to it are safe."""
    # A logarithmic axis cannot show zero.
    positive = score.clip(max(1e-12, float(score[score > 0].min(initial=threshold))))
    ends = min(positive.min(), threshold) / 1.1, max(positive.max(), threshold) * 1.1
    axes.hist(
        positive,
        bins=np.geomspace(*ends, 40).tolist(),
        color=SHADE,
        edgecolor=REFERENCE,
        lw=0.7,
    )
    fraction = float((score <= threshold).mean())
    label = f"threshold: {fraction:.0%} safe"
    axes.axvline(threshold, color=ESTIMATE, lw=1.6, ls="--", label=label)
    axes.set(xlabel="support score", ylabel="queries", xscale="log")
    axes.legend(frameon=False)
    return axes


def coverage_by_score(axes: Axes, bins: list[CoverageBin], quantile: float) -> Axes:
    """Coverage in bins of the support score; the first bin has the smallest scores."""
    axes.bar(
        range(1, len(bins) + 1),
        [b.coverage for b in bins],
        color=SHADE,
        edgecolor=REFERENCE,
        lw=0.9,
        label="observed",
    )
    axes.axhline(
        quantile, color=ESTIMATE, lw=1.6, ls="--", label=f"quantile level {quantile:g}"
    )
    axes.set(
        xlabel="bin of the support score (1: best supported)",
        ylabel="coverage",
        ylim=(0, 1.02),
    )
    axes.set_xticks(range(1, len(bins) + 1))
    axes.legend(facecolor="white", framealpha=1, loc="lower left")
    return axes


def error_over_time(
    axes: Axes,
    error: Float[np.ndarray, " n n_steps *state"],
    error_hat: Float[np.ndarray, " n n_steps *state"],
    n_calibrated: int,
) -> Axes:
    """True errors and bounds averaged over the state, for each rollout and for the mean of the rollouts.

    A line marks the calibration horizon if it is at most the number of steps.
    """
    step = np.arange(1, error.shape[1] + 1)
    for values, color, dashes, name in (
        (error, TRUE, "-", "true error"),
        (error_hat, ESTIMATE, "--", "estimate"),
    ):
        each = values.reshape(*values.shape[:2], -1).mean(axis=2)
        axes.plot(step, each.T, color=color, lw=0.5, ls=dashes, alpha=0.25)
        axes.plot(step, each.mean(axis=0), color=color, lw=1.8, ls=dashes, label=name)
    if n_calibrated <= len(step):
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
    """A field on a line over time, with the first step at the bottom; values above ``most`` have one colour."""
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
    """The trusted horizon of each rollout, and the number of steps for which its error stayed within the tolerance."""
    place = np.arange(len(trusted))
    axes.bar(
        place, trusted, color=SHADE, edgecolor=REFERENCE, lw=0.9, label="trusted for"
    )
    axes.hlines(
        held,
        place - 0.4,
        place + 0.4,
        color=TRUE,
        lw=2.2,
        label="error within the tolerance for",
    )
    axes.set(xlabel="rollout", ylabel="steps", xlim=(-0.6, len(place) - 0.4))
    # Room above for the legend, which would hide rollouts.
    axes.set_ylim(0, 1.3 * max(1, trusted.max(), held.max()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.legend(frameon=False, loc="upper left")
    return axes
