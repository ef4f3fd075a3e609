"""Tables and the picture of the field benchmarks."""

from benchmarks.markdown import compare, group, joined, least, mean, only, page, select, table
from benchmarks.paper import SEEDWISE


def summary(record):
    """All sets of queries together, and set by set."""
    rows = record["rows"]
    labels, safe = {True: "of the design", False: "new"}, mean("safe_fraction")
    kinds = group([r | {"kind": kind_of(r)} for r in rows], "design", "n", "method")
    columns = {
        "inside: safe": only(safe, kind="inside"),
        "least": only(least("safe_fraction"), kind="inside"),
        "hazards: safe": only(safe, kind="hazard"),
        "hazards missed": only(_missed, kind="hazard"),
        "harmless: safe": only(safe, kind="harmless"),
        "harmless sets": only(lambda own: str(len(own)), kind="harmless"),
    }
    together = {f"{labels[design]} | {n} | {m}": own for (design, n, m), own in kinds.items()}
    n = max(r["n"] for r in rows)
    sets = group(select(rows, n=n), "setting", "shift", "seed")
    each = {
        "error / error inside": mean("error_ratio"),
        "coverage": mean("coverage"),
        "kind": lambda own: kind_of(own[0]),
    }
    for method in group(rows, "method"):
        each[f"safe, {method}"] = only(safe, method=method)
        each[f"coverage of safe, {method}"] = only(mean("safe_coverage"), method=method)
    return page(
        table("problems | fields | region", together, columns),
        f"Set by set, {n} calibration fields: the fraction that is safe, and the coverage of the safe ones.",
        table("problem | set", {f"{p} | {s}": own for (p, s, _), own in sets.items()}, each),
    )


OURS = "GeoQ"
# A set of queries is a hazard if the bound covers fewer of its values; harmless sets have small errors that are covered.
HAZARD, HARMLESS, MISSED = 0.90, 0.95, 0.2


def kind_of(row):
    if row["shift"] == "inside":
        return "inside"
    if row["coverage"] < HAZARD:
        return "hazard"
    return "harmless" if row["coverage"] >= HARMLESS and row["error_ratio"] <= 1 else "other"


def _missed(rows):
    """Hazards of which more than a fifth is safe, and the safe ones are not covered either."""
    missed = [r["safe_fraction"] > MISSED and (r["safe_coverage"] or 0) < HAZARD for r in rows]
    return f"{sum(missed)} of {len(rows)}"


def bounds(record):
    """Pinball losses relative to the simple methods, and to GeoQ without a companion."""
    cases = group(record["rows"], "setting", "n", "form")

    def over(other):
        return lambda own: compare(select(own, method=OURS), select(own, method=other), **SEEDWISE)

    columns = {
        "loss / per cell": over("per cell"),
        "loss / regression": over("regression"),
        "coverage": only(mean("coverage", 3), method=OURS),
        "coverage, per cell": only(mean("coverage", 3), method="per cell"),
        "loss / loss without a companion": over("GeoQ (no companion)"),
        "coverage without it": only(mean("coverage", 3), method="GeoQ (no companion)"),
    }
    named = {f"{setting} | {n}, {form}": own for (setting, n, form), own in cases.items()}
    return table("problem | pairs", named, columns)


def features(record):
    """Pinball losses with the features of the user relative to the losses without."""
    ours, without = both = {"method": "with"}, {"method": "without"}
    columns = {
        "used": only(mean("used", 1), **ours),
        "loss / loss without": lambda r: compare(*(select(r, **m) for m in both), **SEEDWISE),
        "coverage": only(mean("coverage", 3), **ours),
        "coverage without": only(mean("coverage", 3), **without),
    }
    return table("problem | queries", joined(group(record["rows"], "problem", "shift")), columns)
