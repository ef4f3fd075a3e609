"""Tables and the picture of the third-party cases.

python -m benchmarks.tables third_party --into docs/third_party.md
python -m benchmarks.third_party.table docs/third_party.png      # the picture
"""

import json
import statistics
import sys

from benchmarks.record import RESULTS

OURS = "GeoQ"
# Simple bounds, with which GeoQ is compared.
SIMPLE = ("per-cell conformal", "regression-scaled conformal", "per-step quantiles")


def summary(rows):
    """Three tables: bounds, horizons and shifted queries; means over the seeds."""
    return "\n\n".join(
        [
            "**Bounds of new queries.** Quantile level 0.95.",
            bounds(rows),
            "**Horizons of rollouts.** Number of steps, and fraction of the rollouts that exceed the tolerance within it.",
            horizons(rows),
            "**Shifted queries.**",
            shifted(rows),
        ]
    )


def select(rows, **conditions):
    return [r for r in rows if all(r.get(k) == v for k, v in conditions.items())]


def column(rows, name):
    return [r[name] for r in rows if r.get(name) is not None]


def mean(rows, name):
    values = column(rows, name)
    return statistics.fmean(values) if values else None


def text(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def best_simple(rows, setting):
    """The smallest mean pinball loss of the simple bounds of a case."""
    losses = [
        mean(own, "pinball")
        for name in SIMPLE
        if (own := [r for r in bound_rows(rows) if (r["method"], r["setting"]) == (name, setting)])
    ]  # fmt: skip
    return min(losses)


def bound_rows(rows):
    return [r for r in rows if r["kind"] in ("field", "rollout", "vector")]


def in_order(rows, name):
    return list(dict.fromkeys(r[name] for r in rows))


def bounds(rows):
    lines = [
        "| case | bound | pinball / best simple bound | coverage | lowest seed | least coordinate | whole samples | safe | coverage of safe | fit / training |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    own = bound_rows(rows)
    for setting in in_order(own, "setting"):
        best = best_simple(rows, setting)
        for number, method in enumerate(
            in_order(select(own, setting=setting), "method")
        ):
            here = select(own, setting=setting, method=method)
            cells = [
                setting if number == 0 else "",
                f"**{method}**" if method == OURS else method,
                text(mean(here, "pinball") / best),
                text(mean(here, "coverage"), 3),
                text(min(column(here, "coverage")), 3),
                text(mean(here, "least_coverage")),
                text(mean(here, "whole")),
                text(mean(here, "safe_fraction")),
                text(mean(here, "safe_coverage"), 3),
                cost(here),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(rows):
    """Calibration relative to one training; simple bounds of rollouts use GeoQ's calibration."""
    if rows[0]["method"] in SIMPLE and rows[0]["kind"] != "field":
        return "-"
    return f"{mean(rows, 'cost'):.2g}"


def horizons(rows):
    lines = [
        "| case | tolerance | kept for | GeoQ: trusted | broken | worst seed | per-step quantiles: steps | per step: broken | exceedance quantile: steps | exceedance: broken |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    own = select(rows, kind="horizon")
    for setting in in_order(own, "setting"):
        case = select(own, setting=setting)
        for tolerance in in_order(case, "tolerance"):
            here = select(case, tolerance=tolerance)
            ours, *simple = (select(here, method=m) for m in in_order(here, "method"))
            cells = [
                setting,
                f"{tolerance:g}",
                text(mean(ours, "kept"), 1),
                text(mean(ours, "trusted"), 1),
                text(mean(ours, "broken"), 3),
                text(max(column(ours, "broken")), 3),
            ]
            for rule in simple:
                cells += [text(mean(rule, "trusted"), 1), text(mean(rule, "broken"), 3)]
            lines.append("| " + " | ".join(cells) + " |")
    if own:
        lines.append(average(own))
    return "\n".join(lines)


def average(rows):
    """The last line: the fraction broken over all cases, tolerances and seeds."""
    ours, *simple = (select(rows, method=m) for m in in_order(rows, "method"))
    cells = ["mean of all", "", "", "", text(mean(ours, "broken"), 3)]
    cells.append(text(max(column(ours, "broken")), 3))
    for rule in simple:
        cells += ["", text(mean(rule, "broken"), 3)]
    return "| " + " | ".join(cells) + " |"


def shifted(rows):
    lines = [
        "| case | shift | error / error without shift | coverage | safe | coverage of safe | trusted steps | broken |",
        "|---|---|---|---|---|---|---|---|",
    ]
    own = select(rows, kind="shift")
    for setting in in_order(own, "setting"):
        case = select(own, setting=setting)
        usual = mean(select(case, shift="none"), "error")
        for number, shift in enumerate(in_order(case, "shift")):
            here = select(case, shift=shift, method=OURS)
            cells = [
                setting if number == 0 else "",
                shift,
                f"{mean(here, 'error') / usual:.2g}",
                text(mean(here, "coverage")),
                text(mean(here, "safe_fraction")),
                text(mean(here, "safe_coverage")),
                text(mean(here, "trusted"), 0),
                text(mean(here, "broken")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows, path):
    """Pinball losses relative to the best simple bound, coverage, horizons, and safe fractions of shifted queries."""
    from matplotlib.figure import Figure

    from benchmarks.pictures import save

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    (losses, covered), (trust, flags) = figure.subplots(2, 2)
    settings = in_order(bound_rows(rows), "setting")
    ours = [select(bound_rows(rows), setting=s, method=OURS) for s in settings]
    place = range(len(settings))
    ratios = [
        [r["pinball"] / best_simple(select(rows, seed=r["seed"]), s) for r in own]
        for s, own in zip(settings, ours, strict=True)
    ]
    for axes, values, title in (
        (losses, ratios, "pinball loss of GeoQ / best simple bound"),
        (covered, [column(own, "coverage") for own in ours], "coverage of GeoQ"),
    ):
        for n, found in enumerate(values):
            axes.plot(found, [n] * len(found), "o", color="#3a7ca5", alpha=0.7)
        axes.set_yticks(place, settings if axes is losses else [])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
    losses.axvline(1, color="black", lw=0.8)
    losses.axvline(0.9, color="black", lw=0.8, ls=":")
    losses.set_xlim(0, None)
    covered.axvspan(0.93, 0.97, color="#3a7ca5", alpha=0.15, lw=0)
    covered.axvline(0.95, color="black", lw=0.8)
    _horizon_points(trust, select(rows, kind="horizon"))
    _shift_points(flags, select(rows, kind="shift"))
    save(figure, path, rows, dpi=130)


COLOURS = {OURS: "#c1440e", "per-step quantiles": "#b0b0b0", "exceedance quantile": "#3a7ca5"}  # fmt: skip


def _horizon_points(axes, rows):
    for method, color in COLOURS.items():
        own = select(rows, method=method)
        axes.scatter(
            [r["trusted"] / max(r["kept"], 1e-9) for r in own],
            [r["broken"] for r in own],
            c=color,
            s=22,
            alpha=0.8,
            label=method,
        )
    axes.axhline(0.05, color="black", lw=0.8, ls=":")
    axes.set_xlabel("trusted steps / steps within the tolerance")
    axes.set_ylabel("fraction broken")
    axes.legend(fontsize=8)


def _shift_points(axes, rows):
    rollouts = [r for r in rows if "trusted" in r]
    kinds = {
        "fields": ([r for r in rows if "trusted" not in r], "o", "#3a7ca5"),
        "rollouts": (select(rollouts, method=OURS), "X", "#c1440e"),
    }
    for label, (own, marker, color) in kinds.items():
        axes.scatter(
            [r["coverage"] for r in own],
            [r["safe_fraction"] for r in own],
            marker=marker,
            c=color,
            s=26,
            alpha=0.8,
            label=label,
        )
    axes.axvline(0.9, color="black", lw=0.8, ls=":")
    axes.set_xlabel("coverage of the bound in a set of shifted queries")
    axes.set_ylabel("fraction called safe")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "third_party.json").read_text())["rows"], sys.argv[1])
