"""Tables of the weather benchmark."""

from benchmarks.markdown import average, compare, group, page, select, spread, table
from benchmarks.paper import PAPER_SECONDS, flagging, seconds_of_paper, thousandth

WHOLE_FIELD, DEFAULT = "whole field", "GeoQ (default)"
# The origins are the independent tasks: the seeds of an origin have the same test windows.
BY_ORIGIN = {"over": ("origin",), "within": ("seed",)}


def summary(record):
    """The surrogates, the folds, and the bounds with block folds: losses, leads, whole fields, leaks, safe region and cost."""
    surrogates, folds = (select(record["rows"], kind=kind) for kind in ("surrogates", "leaks"))
    rows = [r for r in record["rows"] if "method" in r]
    blocks = [r for r in rows if r["folds"] != "clusters"]
    pointwise = group([r for r in blocks if WHOLE_FIELD not in r["method"]], "method")
    methods = dict(sorted(pointwise.items(), key=lambda of: average(of[1], "pinball")))
    whole = group([r for r in blocks if WHOLE_FIELD in r["method"]], "method")
    stated = {m: own for m, own in methods.items() if m == DEFAULT or any(m in w for w in whole)}
    clusters = group(select(rows, folds="clusters"), "method")
    both = {m: own for m, own in methods.items() if m in clusters}
    costly = {
        m: own for m, own in methods.items() if m in PAPER_SECONDS["weather"] or flagging(own)
    }
    ours = methods[DEFAULT]

    def versus(own):
        return compare(ours, own, **BY_ORIGIN)

    def of_clusters(column):
        return lambda own: column(clusters[own[0]["method"]])

    loss, covered = thousandth("pinball"), spread("coverage", 3)
    first = {"pinball x 1000": loss, f"{DEFAULT} over it": versus}
    kinds = {
        "pinball x 1000, clusters": of_clusters(loss),
        "blocks": loss,
        "coverage, clusters": of_clusters(covered),
        "coverage, blocks": covered,
        f"{DEFAULT}, blocks, over clusters": of_clusters(versus),
    }
    n_origins, n_tasks = len(group(rows, "origin")), len(group(rows, "origin", "seed"))
    note = (
        f"Mean ± standard deviation over {n_tasks} tasks, {n_origins} origins times seeds; test windows overlap, so this deviation is "
        "not a standard error. Ratios are geometric means over the origins of the geometric means over the seeds, with 95 % intervals "
        "by Student's t over the origins."
    )
    tables = {
        "Surrogates": table("form", group(surrogates, "form"), SURROGATE),
        "Folds": table("folds", group(folds, "folds"), LEAKS),
        "Bounds, block folds": table("method", methods, first | POOLED),
        "By lead time": table("method", methods, BY_LEAD),
        "Whole fields": table("method", stated | whole, FIELDS),
        "Clusters and blocks": table("method", both, kinds),
        "Safe region and cost": table("method", costly, COSTS | seconds_of_paper("weather")),
    }
    return page(*(f"**{title}**\n\n{text}" for title, text in tables.items()), note)


SURROGATE = {
    "steps": spread("n_steps", 0),
    "relative L2": spread("relative_l2"),
    "of persistence": spread("relative_l2_persistence"),
    "of climatology": spread("relative_l2_climatology"),
    **{
        f"skill over {reference}, {lead}": spread(f"skill_{reference}_{column}", 2)
        for reference in ("persistence", "climatology")
        for lead, column in {"6 h": "6h", "24 h": "24h", "quarter 4": "q4"}.items()
    },
    "training, s": spread("training_seconds", 1),
}
LEAKS = {
    "held-out targets trained on": spread("shared_targets", 2),
    "error in sample x 1000": thousandth("mae_fold_in_sample", 1),
    "held out x 1000": thousandth("mae_held_out", 1),
    "test x 1000": thousandth("mae_test", 1),
    "error and distance, held out": spread("distance_correlation_held_out", 2),
    "error and distance, test": spread("distance_correlation_test", 2),
}
POOLED = {
    "area-weighted": thousandth("area_pinball"),
    "correlation": spread("correlation", 3),
    "which day": spread("which_day", 3),
    "which day, first quarter": spread("which_day_q1", 3),
    "which day, to 24 h": spread("which_day_24h", 3),
    "coverage": spread("coverage", 3),
}
BY_LEAD = {
    **{f"pinball x 1000, quarter {q}": thousandth(f"pinball_q{q}") for q in range(1, 5)},
    **{f"coverage, quarter {q}": spread(f"coverage_q{q}", 3) for q in range(1, 5)},
}
FIELDS = {
    "fraction of the field covered": spread("coverage", 3),
    "least": spread("field_least", 3),
    "forecasts with 95 %": spread("field_fraction_95", 2),
    "pinball x 1000": thousandth("pinball"),
}
COSTS = {
    "safe fraction": spread("safe_fraction", 2),
    "coverage, safe": spread("safe_coverage", 3),
    "calibration, s": spread("train_seconds", 1),
    "calibration over training": spread("calibration_over_training", 1),
    "inference, s": spread("inference_seconds", 2),
}
