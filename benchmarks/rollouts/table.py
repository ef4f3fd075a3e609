"""Tables of the rollouts."""

import statistics
from functools import partial

from benchmarks.markdown import (
    average,
    compare,
    group,
    joined,
    least,
    mean,
    number,
    select,
    spread,
    table,
    values,
)
from benchmarks.paper import (
    ALL,
    PAPER,
    SEEDWISE,
    everywhere_and_safe,
    methods_table,
    numbers_of_paper,
    seconds_of_paper,
)

# Beginnings of the names of methods that bound the deployed network of rollouts; the others train networks of their own.
OF_DEPLOYED = ("GeoQ", "One number per horizon", "Horizon x climatology")


def kuramoto_sivashinsky(record):
    parts = []
    for setting, rows in group(record["rows"], "setting").items():
        title, ours = f" ({setting})", select(rows, method="GeoQ")
        horizon = {
            "pinball, calibration horizon": spread("pinball_calibrated"),
            "first 50 steps": spread("pinball_first50"),
            "coverage, first 50": spread("coverage_first50"),
            **{f"quarter {q}": spread(f"coverage_q{q}") for q in range(1, 5)},
            "fit / training": mean("fit_over_training", 1),
            "answer / rollout": mean("answer_over_rollout", 1),
        }
        spans = {"first 50 steps": "pinball_first50", "calibration horizon": "pinball_calibrated"}
        versus = {
            span: partial(compare, ours, column=column, **SEEDWISE)
            for span, column in (spans | {"all steps": "pinball"}).items()
        }
        others = {m: own for m, own in group(rows, "method").items() if m != "GeoQ"}
        times = {"training, s": _training, "inference, s": mean("inference_seconds", 1)}
        parts += everywhere_and_safe("kuramoto_sivashinsky", rows, title)
        parts += [
            f"**Time{title}**",
            methods_table(rows, times | seconds_of_paper("kuramoto_sivashinsky")),
        ]
        parts += [f"**Along the horizon{title}**", table("method", group(rows, "method"), horizon)]
        parts += [f"**Pinball loss of GeoQ over each method, paired over the seeds{title}**"]
        parts += [table("method", others, versus), *_trainings_of_sum(rows, title)]
    return "\n\n".join(parts)


def _training(rows):
    deployed = [r["train_seconds"] / r["fit_over_training"] for r in rows]
    own = rows[0]["method"].startswith(OF_DEPLOYED)
    return number(average(rows, "train_seconds") + own * statistics.fmean(deployed), 0)


def _trainings_of_sum(rows, title):
    """Steps of the trainings of the paper's sum, and the fall of the loss of each held-out fold."""
    known = [r for r in select(rows, method="GeoQ (paper)") if "trainings" in r]

    def falls(own):
        return [1 - t["best_loss"] / t["first_loss"] for r in own for t in r["trainings"]]

    def steps(own):
        return [t["best_step"] for r in own for t in r["trainings"]]

    columns = {
        "steps, each fold": lambda own: ", ".join(map(str, steps(own))),
        "steps of the final training": lambda own: number(statistics.fmean(steps(own)), 0),
        "least fall": lambda own: number(min(falls(own)), 3),
        "mean fall": lambda own: number(statistics.fmean(falls(own)), 3),
        "largest fall": lambda own: number(max(falls(own)), 3),
    }
    title = f"**Training of the sum{title}**"
    return [title, table("seed", group(known, "seed"), columns)] if known else []


def ablation(record):
    columns = {k: v for k, v in ALL.items() if k != "relative L2"}
    columns |= {"pinball, calibration horizon": spread("pinball_calibrated")}
    columns |= {"training steps": spread("n_steps", 0)}
    columns |= numbers_of_paper("kuramoto_sivashinsky_ablation")
    order, parts = list(PAPER["kuramoto_sivashinsky_ablation"]), []
    for setting, rows in group(record["rows"], "setting").items():
        known = sorted(rows, key=lambda r: order.index(r["method"]) if r["method"] in order else 99)
        parts += [f"**The {setting}**", table("choice", group(known, "method"), columns)]
    return "\n\n".join(parts)


def trusted_horizon(record):
    rows = record["rows"]
    horizons = group([r for r in rows if "tolerance" in r], "setting", "tolerance", "method")
    of_horizons = {
        "kept for": mean("mean_held", 1),
        "horizon": mean("mean_horizon", 1),
        "broken": mean("broken", 3),
        "worst seed": least("broken", 3, largest=True),
    }
    changed = select(rows, method="initial states")
    usual = group(select(changed, origin="none"), "setting")
    of_changes = {
        "error / error of the data": lambda own: number(
            average(own, "error") / average(usual[own[0]["setting"]], "error"), 1
        ),
        "coverage": mean("coverage"),
        "safe": mean("safe_fraction"),
        "coverage of safe": lambda own: number(
            sum(values(own, "covered_safe")) / n if (n := sum(values(own, "n_safe"))) else None
        ),
    }
    return "\n\n".join(
        [
            table("system | tolerance | rule", joined(horizons), of_horizons),
            "Changed initial states:",
            table("system | change", joined(group(changed, "setting", "origin")), of_changes),
        ]
    )


def forced(record):
    columns = {
        "least covered coordinate": mean("least", 3),
        "most": mean("most", 3),
        "safe steps": mean("safe", 3),
        "coverage in safe steps": mean("safe_coverage", 3),
        "trusted steps": mean("trusted", 1),
        "steps within the tolerance": mean("kept", 1),
        "broken": mean("broken", 3),
    }
    return table("system | forcing", joined(group(record["rows"], "setting", "forcing")), columns)


def small_states(record):
    columns = {f"step {n}": mean(f"newest_{n}", 3) for n in (1, 2, 3, 5, 10)}
    columns |= {"last": mean("newest_last", 3), "all": mean("coverage", 3)}
    columns |= {"least of all steps and coordinates": least("least", 3)}
    groups = group(record["rows"], "setting", "n_rollouts")
    return table("state | calibration rollouts", joined(groups), columns)
