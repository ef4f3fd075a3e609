"""Tables of the Richtmyer-Meshkov benchmark."""

import statistics

from benchmarks import paper
from benchmarks.markdown import compare, group, mean, number, select, spread, table

# Beginnings of the names of the operators that the paper's baselines need; GeoQ needs the deployed operator and the folds.
OPERATORS = {
    "Split conformal": ("split",),
    "MC dropout": ("deployed",),
    "Deep ensemble": ("deployed", "member"),
}
TIMES_SHOWN = (1, 3, 6, 9, 12)


def summary(record):
    surrogates = select(record["rows"], kind="surrogates")
    times = {one["seed"]: one["training_seconds"] for one in surrogates}
    measured = [row for row in record["rows"] if "method" in row]
    parts = []

    def operators(rows):
        needed = OPERATORS.get(rows[0]["method"], ("deployed", "fold"))
        sums = [sum(t for n, t in times[r["seed"]].items() if n.startswith(needed)) for r in rows]
        return number(statistics.fmean(sums), 0)

    name = "richtmyer_meshkov"
    of_time = {"training of operators, s": operators, "fit and answer, s": mean("seconds", 1)}
    near = {
        "coverage near the interface": spread("band_coverage"),
        "correlation near it": spread("band_correlation"),
        "wrong cells found": spread("recall"),
        "area flagged": spread("flagged"),
        "mean bound": spread("mean_bound"),
        "correlation of case means": spread("case_correlation"),
    }

    def at(t):
        return lambda own: number(1000 * statistics.fmean(r["pinball_by_time"][t - 1] for r in own))

    by_time = {f"t = {t}": at(t) for t in TIMES_SHOWN}
    for setting, rows in group(measured, "setting").items():
        title, of_method = f" ({setting})", group(rows, "method")
        bounds = {m: own for m, own in of_method.items() if paper.is_bound(m)}
        parts += paper.everywhere_and_safe(name, rows, title, "pinball x 1000")
        if setting == "binary":
            known = (*paper.PAPER_SECONDS[name], "GeoQ (default)")
            timed = {m: own for m, own in of_method.items() if m in known}
            parts += ["**Time**", table("method", timed, of_time | paper.seconds_of_paper(name))]
        parts += [f"**Near the interface{title}**", table("method", of_method, near)]
        parts += [f"**Pinball x 1000 by time{title}**", table("method", bounds, by_time)]
        parts += [by_case(rows, title)]
    note = (
        "The paper's simulations are not public; its numbers belong to other data and to an error that it does not define, and its "
        'pinball loss is not multiplied by 1000. "(background penalty)" uses the paper\'s loss and is not a bound of level 0.95; '
        '"expected error" is a map and not a bound. Neither is ranked by its pinball loss.'
    )
    return "\n\n".join([*parts, note])


def by_case(rows, title="", reference="GeoQ (default)"):
    """Losses, and their ratios to the reference, paired by test case: the seeds have different test cases."""
    cases = [
        r | {"case": case, "loss": max(loss, 1e-12)}
        for r in rows
        if paper.is_bound(r["method"])
        for case, loss in enumerate(r["pinball_by_case"])
    ]
    ours = select(cases, method=reference)
    paired = {"over": ("seed", "case"), "within": ()}
    columns = {
        "pinball x 1000": paper.thousandth("loss"),
        f"{reference} over it": lambda own: compare(ours, own, "loss", **paired),
        "coverage": mean("coverage", 3),
    }
    return f"**Paired by test case{title}**\n\n{table('method', group(cases, 'method'), columns)}"


def coarse(record):
    measured = [row for row in record["rows"] if "method" in row]
    parts = group(measured, "setting").items()
    return "\n\n".join(by_case(rows, f" ({setting})") for setting, rows in parts)
