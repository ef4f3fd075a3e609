"""Which features that are available at forecast time predict the error of the day?

Held-out errors and features are divided by their mean at the lead, channel and cell over the windows of their fold. The
rank correlation of the ratios measures what a feature adds to a static map. The mean is taken within a fold because the
climatology of a fold does not contain the fold's own states.
"""

import statistics

import torch

from benchmarks.weather.activity import neighbourhood_mean, neighbourhood_spread
from benchmarks.weather.data import HOURS
from benchmarks.weather.methods import dropout, ensemble

LEAD_HOURS = (6, 12, 24, 48, 120, 240)
# The ranks use at most this many values; more values do not change the second digit.
MOST_VALUES = 400_000
TOGETHER = "all of them, fitted on the other folds"


def features_of(case, kind, lead):
    """Features at one lead, by name: a field per held-out window and channel."""
    tuples = case.tuples(kind)
    calibration = tuples.calibration
    past = case.data.x[calibration.point]
    last, prediction = past[:, -1], calibration.features.prediction[:, lead]
    mean = tuples.seen.mean
    tendency, anomaly = (last - past[:, -2]).abs(), (last - mean).abs()
    distance = calibration.features.support_distance.view(-1, 1, 1, 1)
    known = {
        "anomaly of the last state": anomaly,
        "anomaly, mean of 7 x 7": neighbourhood_mean(anomaly, 7),
        "tendency over 6 h": tendency,
        "tendency over 12 h": (last - past[:, -3]).abs(),
        "tendency over 6 h, mean of 7 x 7": neighbourhood_mean(tendency, 7),
        "spread of the last state, 3 x 3": neighbourhood_spread(last, 3),
        "spread of the last state, 7 x 7": neighbourhood_spread(last, 7),
        "anomaly of the prediction": (prediction - mean).abs(),
        "prediction - last state": (prediction - last).abs(),
        "spread of the prediction, 3 x 3": neighbourhood_spread(prediction, 3),
        "spread of the prediction, 7 x 7": neighbourhood_spread(prediction, 7),
        "anchor error": calibration.features.anchor_error[:, lead],
        "climatology around the prediction": tuples.seen.climatology[:, lead],
        "support distance": distance.expand_as(last),
    }
    for name, deviation in deviations(case, kind).items():
        known[name] = deviation[:, lead]
        known[f"{name}, mean of 7 x 7"] = neighbourhood_mean(deviation[:, lead], 7)
    return known


def deviations(case, kind):
    """Spread of dropout passes and of an ensemble at the held-out windows."""

    def make():
        known, surrogates = case.folds(kind)
        x, y, found = case.data.x, case.data.y, {}
        for name, method in (
            ("dropout spread", dropout),
            ("ensemble spread", ensemble),
        ):
            parts = [
                method(case, surrogate, case.task.seed)
                .fit(x[seen], y[seen])
                .predict(x[unseen])
                .error_hat
                for (seen, unseen), surrogate in zip(
                    known.splits, surrogates, strict=True
                )
            ]
            found[name] = torch.cat(parts)
        return found

    return case.shared(("deviations", kind), make)


def ranks(values):
    """Ranks from 0 to 1."""
    flat = values.flatten()
    place = torch.empty(len(flat), dtype=torch.float64, device=flat.device)
    steps = torch.arange(len(flat), dtype=torch.float64, device=flat.device)
    place[flat.argsort()] = steps / max(1, len(flat) - 1)
    return place - 0.5


def some(n_values, device):
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(n_values, generator=generator)[:MOST_VALUES].to(device)


def correlation(first, second):
    first, second = first - first.mean(), second - second.mean()
    return float(first @ second / (first.norm() * second.norm()))


def together(columns, target, fold):
    """Mean rank correlation of a linear fit of the ranks; each fold is predicted from the others."""
    table = torch.stack(columns, dim=1)
    found = []
    for number in fold.unique():
        mine = fold == number
        weights = torch.linalg.lstsq(table[~mine], target[~mine, None]).solution[:, 0]
        found.append(correlation(table[mine] @ weights, target[mine]))
    return statistics.fmean(found)


def relative(values, fold):
    """Values divided by their mean over the windows of the same fold, separately for each cell."""
    result = values.double()
    for number in fold.unique():
        mine = fold == number
        result[mine] /= result[mine].mean(dim=0).clamp(min=1e-12)
    return result


def study(case, kind="blocks"):
    """Rank correlation of relative error and relative feature, by feature, lead and channel."""
    calibration, lines = case.tuples(kind).calibration, []
    error, fold = calibration.error, calibration.fold
    leads = [h // HOURS - 1 for h in LEAD_HOURS if h // HOURS <= error.shape[1]]
    chosen = some(error[:, 0, 0].numel(), error.device)
    fold_of_value = fold.view(-1, 1, 1).expand_as(error[:, 0, 0]).flatten()[chosen]
    for lead in leads:
        known = features_of(case, kind, lead)
        for channel in range(error.shape[2]):
            target, *columns = (
                ranks(relative(values, fold).flatten()[chosen])
                for values in (
                    error[:, lead, channel],
                    *(field[:, channel] for field in known.values()),
                )
            )
            found = {
                name: correlation(column, target)
                for name, column in zip(known, columns, strict=True)
            }
            found[TOGETHER] = together(columns, target, fold_of_value)
            lines += [
                {
                    **case.task._asdict(),
                    "folds": kind,
                    "feature": name,
                    "channel": channel,
                    "lead_hours": HOURS * (lead + 1),
                    "rank_correlation": value,
                }
                for name, value in found.items()
            ]
    return lines


def table(lines):
    """Markdown table of features by lead; means over channels and tasks."""
    hours = sorted({line["lead_hours"] for line in lines})
    shown = ["| known at forecast time | " + " | ".join(f"{h} h" for h in hours) + " |"]
    shown.append("|---" * (len(hours) + 1) + "|")
    for name in dict.fromkeys(line["feature"] for line in lines):
        cells = [
            statistics.fmean(
                line["rank_correlation"]
                for line in lines
                if (line["feature"], line["lead_hours"]) == (name, h)
            )
            for h in hours
        ]
        shown.append(f"| {name} | " + " | ".join(f"{c:+.3f}" for c in cells) + " |")
    return "\n".join(shown)
