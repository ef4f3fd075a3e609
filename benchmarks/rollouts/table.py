"""Tables of the rollouts."""

import statistics
from functools import partial

from benchmarks import markdown as md
from benchmarks import paper

# Beginnings of the names of methods that bound the deployed network of rollouts; the others train networks of their own.
OF_DEPLOYED = ("GeoQ", "One number per horizon", "Horizon x climatology")
# For how long rollouts keep the tolerance, for how long they are trusted, and the fraction that exceeds it within that time.
HORIZONS = {"kept for": md.mean("kept", 1), "trusted": md.mean("trusted", 1)}
HORIZONS |= {"broken": md.mean("broken", 3), "worst seed": md.least("broken", 3, largest=True)}


def kuramoto_sivashinsky(record):
    parts = []
    for setting, rows in md.group(record["rows"], "setting").items():
        title, ours = f" ({setting})", md.select(rows, method="GeoQ")
        horizon = {
            "pinball, calibration horizon": md.spread("pinball_calibrated"),
            "first 50 steps": md.spread("pinball_first50"),
            "coverage, first 50": md.spread("coverage_first50"),
            **{f"quarter {q}": md.spread(f"coverage_q{q}") for q in range(1, 5)},
            "fit / training": md.mean("fit_over_training", 1),
            "answer / rollout": md.mean("answer_over_rollout", 1),
        }
        spans = {"first 50 steps": "pinball_first50", "calibration horizon": "pinball_calibrated"}
        versus = {
            span: partial(md.compare, ours, column=column, **paper.SEEDWISE)
            for span, column in (spans | {"all steps": "pinball"}).items()
        }
        others = {m: own for m, own in md.group(rows, "method").items() if m != "GeoQ"}
        times = {"training, s": _training, "inference, s": md.mean("inference_seconds", 1)}
        parts += paper.everywhere_and_safe("kuramoto_sivashinsky", rows, title)
        parts += [
            f"**Time{title}**",
            paper.methods_table(rows, times | paper.seconds_of_paper("kuramoto_sivashinsky")),
        ]
        parts += [
            f"**Along the horizon{title}**",
            md.table("method", md.group(rows, "method"), horizon),
        ]
        parts += [f"**Pinball loss of GeoQ over each method, paired over the seeds{title}**"]
        parts += [md.table("method", others, versus), *_trainings_of_sum(rows, title)]
    return "\n\n".join(parts)


def _training(rows):
    deployed = [r["train_seconds"] / r["fit_over_training"] for r in rows]
    own = rows[0]["method"].startswith(OF_DEPLOYED)
    return md.number(md.average(rows, "train_seconds") + own * statistics.fmean(deployed), 0)


def _trainings_of_sum(rows, title):
    """Steps of the trainings of the paper's sum, and the fall of the loss of each held-out fold."""
    known = [r for r in md.select(rows, method="GeoQ (paper)") if "trainings" in r]

    def falls(own):
        return [1 - t["best_loss"] / t["first_loss"] for r in own for t in r["trainings"]]

    def steps(own):
        return [t["best_step"] for r in own for t in r["trainings"]]

    columns = {
        "steps, each fold": lambda own: ", ".join(map(str, steps(own))),
        "steps of the final training": lambda own: md.number(statistics.fmean(steps(own)), 0),
        "least fall": lambda own: md.number(min(falls(own)), 3),
        "mean fall": lambda own: md.number(statistics.fmean(falls(own)), 3),
        "largest fall": lambda own: md.number(max(falls(own)), 3),
    }
    title = f"**Training of the sum{title}**"
    return [title, md.table("seed", md.group(known, "seed"), columns)] if known else []


def ablation(record):
    columns = {k: v for k, v in paper.ALL.items() if k != "relative L2"}
    columns |= {"pinball, calibration horizon": md.spread("pinball_calibrated")}
    columns |= {"training steps": md.spread("n_steps", 0)}
    columns |= paper.numbers_of_paper("kuramoto_sivashinsky_ablation")
    order, parts = list(paper.PAPER["kuramoto_sivashinsky_ablation"]), []
    for setting, rows in md.group(record["rows"], "setting").items():
        known = sorted(rows, key=lambda r: order.index(r["method"]) if r["method"] in order else 99)
        parts += [f"**The {setting}**", md.table("choice", md.group(known, "method"), columns)]
    return "\n\n".join(parts)


def trusted_horizon(record):
    rows = record["rows"]
    horizons = md.group([r for r in rows if "tolerance" in r], "setting", "tolerance", "method")
    of_horizons = {"kept for": md.mean("mean_held", 1), "horizon": md.mean("mean_horizon", 1)}
    of_horizons |= {"broken": md.mean("broken", 3)}
    of_horizons |= {"worst seed": md.least("broken", 3, largest=True)}
    changed = md.select(rows, method="initial states")
    usual = md.group(md.select(changed, origin="none"), "setting")

    def against_usual(own):
        of_data = md.average(usual[own[0]["setting"]], "error")
        return md.number(md.average(own, "error") / of_data, 1)

    def of_safe(own):
        n = sum(md.values(own, "n_safe"))
        return md.number(sum(md.values(own, "covered_safe")) / n if n else None)

    of_changes = {"error / error of the data": against_usual, "coverage": md.mean("coverage")}
    of_changes |= {"safe": md.mean("safe_fraction"), "coverage of safe": of_safe}
    changes = md.joined(md.group(changed, "setting", "origin"))
    return md.page(
        md.table("system | tolerance | rule", md.joined(horizons), of_horizons),
        "Changed initial states:",
        md.table("system | change", changes, of_changes),
    )


def forced(record):
    columns = {
        "least covered coordinate": md.mean("least", 3),
        "most": md.mean("most", 3),
        "safe steps": md.mean("safe", 3),
        "coverage in safe steps": md.mean("safe_coverage", 3),
        "trusted steps": md.mean("trusted", 1),
        "steps within the tolerance": md.mean("kept", 1),
        "broken": md.mean("broken", 3),
    }
    groups = md.joined(md.group(record["rows"], "setting", "forcing"))
    return md.table("system | forcing", groups, columns)


def small_states(record):
    columns = {f"step {n}": md.mean(f"newest_{n}", 3) for n in (1, 2, 3, 5, 10)}
    columns |= {"last": md.mean("newest_last", 3), "all": md.mean("coverage", 3)}
    columns |= {"least of all steps and coordinates": md.least("least", 3)}
    groups = md.group(record["rows"], "setting", "n_rollouts")
    return md.table("state | calibration rollouts", md.joined(groups), columns)


def transients(record):
    loss = {"loss / quantile per step": md.mean("loss"), "largest": md.least("loss", largest=True)}
    columns = loss | HORIZONS | {"coverage": md.mean("coverage", 3)}
    groups = md.group(record["rows"], "setting", "tolerance", "method")
    return md.table("system | tolerance | bound", md.joined(groups), columns)
