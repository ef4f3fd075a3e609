"""Tables and the picture of the shifted fields.

python -m benchmarks.tables fields --into docs/fields.md
python -m benchmarks.fields.table docs/fields-shifted.png      # the picture
"""

import json
import math
import statistics
import sys
from collections.abc import Callable

from benchmarks.record import RESULTS

METHODS = {"DistanceRegion": "distance", "FieldRegion": "field region"}
# A set of queries is a hazard if the bound covers fewer of its values; harmless sets have small errors that are covered.
HAZARD, HARMLESS = 0.90, 0.95
# A hazard counts as missed if more of its queries are safe, and the safe ones are not covered either.
MISSED = 0.2


def summary(rows):
    """Two tables: all sets together, and set by set."""
    return f"{together(rows)}\n\n{each(rows)}"


def is_hazard(row):
    return row["coverage"] < HAZARD


def is_harmless(row):
    shifted = row["shift"] != "inside"
    return shifted and row["coverage"] >= HARMLESS and row["error_ratio"] <= 1


def is_missed(row):
    covered = row["safe_coverage"]
    return row["safe_fraction"] > MISSED and covered is not None and covered < HAZARD


def safe(rows):
    return f"{statistics.fmean(r['safe_fraction'] for r in rows):.2f}" if rows else "-"


def together(rows):
    head = (
        "| problems | fields | region | inside: safe (least) | hazards: safe | hazards missed | harmless: safe |\n"
        "|---|---|---|---|---|---|---|"
    )
    lines = [head]
    for design in (True, False):
        for n in sorted({r["n"] for r in rows}, reverse=True):
            for method, label in METHODS.items():
                own = [
                    r
                    for r in rows
                    if (r["design"], r["n"], r["method"]) == (design, n, method)
                ]
                if own:
                    lines.append(_line(own, design, n, label))
    return "\n".join(lines)


def _line(rows, design, n, label):
    shifted = [r for r in rows if r["shift"] != "inside"]
    inside = [r for r in rows if r["shift"] == "inside"]
    hazards = [r for r in shifted if is_hazard(r)]
    cells = [
        "of the design" if design else "new",
        str(n),
        label,
        f"{safe(inside)} ({min(r['safe_fraction'] for r in inside):.2f})",
        safe(hazards),
        f"{sum(map(is_missed, hazards))} of {len(hazards)}",
        f"{safe([r for r in shifted if is_harmless(r)])} ({sum(map(is_harmless, shifted))} sets)",
    ]
    return "| " + " | ".join(cells) + " |"


def each(rows):
    n = max(r["n"] for r in rows)
    by_set = {}
    for row in rows:
        if row["n"] == n:
            key = row["setting"], row["shift"], row["seed"]
            by_set.setdefault(key, {})[row["method"]] = row
    head = (
        f"Set by set, {n} calibration fields: the fraction that is safe, and the coverage of the safe ones. Hazards are bold.\n\n"
        "| problem (error of the surrogate) | set | error / error inside | coverage | safe, distance | safe, field region |\n"
        "|---|---|---|---|---|---|"
    )
    lines = [head]
    for (problem, shift, _), of in by_set.items():
        row = of["FieldRegion"]
        name = f"{problem} ({row['relative_error']:.2g})" if shift == "inside" else ""
        shown = f"**{shift}**" if is_hazard(row) else shift
        flags = " | ".join(_flag(of[method]) for method in METHODS)
        lines.append(
            f"| {name} | {shown} | {row['error_ratio']:.2g} | {row['coverage']:.2f} | {flags} |"
        )
    return "\n".join(lines)


def _flag(row):
    covered = row["safe_coverage"]
    if covered is None or math.isnan(covered):
        return f"{row['safe_fraction']:.2f}"
    return f"{row['safe_fraction']:.2f} / {covered:.2f}"


RIVALS, DEFAULT, OTHER = ("per cell", "regression"), "GeoQ (x, p)", "GeoQ (x)"


def bounds(rows):
    """Pinball losses relative to the better simple method, and without the prediction; geometric means over seeds."""
    head = (
        "| problem | pairs | loss / per cell | loss / regression | coverage | coverage, per cell | loss / loss without the prediction |\n"
        "|---|---|---|---|---|---|---|"
    )
    cases = dict.fromkeys((r["setting"], r["form"], r["n"]) for r in rows)
    return "\n".join([head, *(_bounds_line(rows, case) for case in cases)])


def _bounds_line(rows, case):
    own = [r for r in rows if (r["setting"], r["form"], r["n"]) == case]
    of = {(r["method"], r["seed"]): r for r in own}
    seeds = sorted({r["seed"] for r in own})
    setting, form, n = case

    def ratio(other):
        if any((other, seed) not in of for seed in seeds):
            return "-"
        losses = [
            of[DEFAULT, seed]["pinball"] / of[other, seed]["pinball"] for seed in seeds
        ]
        return f"{statistics.geometric_mean(losses):.2f}"

    def covered(method):
        found = [of[method, seed]["coverage"] for seed in seeds if (method, seed) in of]
        return f"{statistics.fmean(found):.3f}" if found else "-"

    cells = [
        setting,
        f"{n}, {form}",
        *(ratio(rival) for rival in RIVALS),
        covered(DEFAULT),
        covered("per cell"),
        ratio(OTHER),
    ]
    return "| " + " | ".join(cells) + " |"


def draw(rows, path):
    """Fraction of safe queries over the coverage of a set, for both regions."""
    from matplotlib.figure import Figure

    from benchmarks.pictures import save

    n = max(r["n"] for r in rows)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    plots = figure.subplots(1, 2, sharey=True)
    kinds: dict[str, tuple[Callable, str, str]] = {
        "inside the data": (lambda r: r["shift"] == "inside", "black", "s"),
        "harmless": (is_harmless, "#3a7ca5", "o"),
        "hazard": (is_hazard, "#c1440e", "X"),
    }
    for axes, (method, label) in zip(plots, METHODS.items(), strict=True):
        own = [r for r in rows if r["n"] == n and r["method"] == method]
        other = [r for r in own if not any(test(r) for test, _, _ in kinds.values())]
        for name, (test, color, marker) in kinds.items():
            points = [(r["coverage"], r["safe_fraction"]) for r in own if test(r)]
            axes.scatter(
                *zip(*points, strict=True),
                c=color,
                marker=marker,
                s=28,
                label=name,
                alpha=0.8,
            )
        if other:
            points = [(r["coverage"], r["safe_fraction"]) for r in other]
            axes.scatter(
                *zip(*points, strict=True), c="#b0b0b0", s=18, label="other", alpha=0.8
            )
        axes.axvline(HAZARD, color="black", lw=0.8, ls=":")
        axes.set(title=label, xlabel="coverage of the bound in a set of queries")
    plots[0].set_ylabel("fraction called safe")
    plots[1].legend(loc="center", fontsize=8)
    save(figure, path, rows, dpi=130)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "fields.json").read_text())["rows"], sys.argv[1])
