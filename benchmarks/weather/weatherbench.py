"""The paper's third problem: error fields for ten-day forecasts of the whole globe, on reanalysis data.

    python -m benchmarks.weather.weatherbench --form anomalies --seeds 20 21 22 --jobs 6      # ERA5 names the folder of the data
    python -m benchmarks.weather.weatherbench --methods "blocks: GeoQ*" --problems "anomalies, 220"
    python -m benchmarks.weather.weatherbench --small

A U-Net learns windows of 3 past and 40 future states, 6 hours apart, and forecasts the days after an origin; three
origins, one horizon apart. The paper scores one window. The forecast is the paper's (``direct``) or a correction of
damped persistence (``anomalies``).

Neighbouring windows have nearly all targets in common. The folds ``clusters`` are the paper's: their training windows
contain targets of the held-out windows. The folds ``blocks`` are five periods with a gap on either side: their training
windows contain no held-out target.
"""

import os
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, parser_of, run
from benchmarks.scores import relative_l2, row
from benchmarks.weather.case import KINDS, SMALL, Case, Settings
from benchmarks.weather.data import DAYS, STAND_IN, load, origins
from benchmarks.weather.forecast import FORMS
from benchmarks.weather.methods import METHODS, SHOWN, numbers
from benchmarks.weather.scores import scores, skill, window_correlation

NAMES = [f"{kind}: {name}" for kind, known in METHODS.items() for name in known]


def method_of(line):
    """The name of the method of a row in the options."""
    return f"{line.get('folds')}: {line.get('method')}"


def measure(problem, seed, wanted, *, small=False, read=None, pictures=None):
    """Rows of some methods, of the surrogate and of its folds, for one form, origin and seed."""
    form, origin = problem.split(", ")
    weather = read()
    case = Case.of(form, int(origin), seed, weather, SMALL if small else Settings())
    about = {"problem": problem, "form": form, "origin": int(origin), "seed": seed}
    rows, shown = [{"kind": "surrogates"} | about | describe(case)], {}
    rows += [{"kind": "leaks"} | about | leaks(case, kind) for kind in KINDS]
    for name in wanted:
        kind, method = name.split(": ", 1)
        line, answer = of_method(case, kind, method)
        rows.append(line | about | {"folds": kind})
        if kind == "blocks" and method in SHOWN:
            shown[method] = answer
    if pictures and set(SHOWN) <= shown.keys():
        from benchmarks.weather.pictures import draw

        draw(case, weather, shown, pictures)
    return rows


def of_method(case, kind, name):
    """Row and answer of one method."""
    answer, fit_seconds = case.shared.timed(lambda: METHODS[kind][name].fit(case, kind))
    result, asking = case.shared.timed(answer)
    about = {"method": name, "setting": f"{case.form}, {kind}", "seed": case.seed}
    line = row(about, case.truth, result, result.safe, (fit_seconds, asking))
    error = abs(case.truth - result.prediction)
    line |= scores(error, result.error_hat, case.latitude, QUANTILE)
    line |= getattr(answer, "trainings", {})
    line["calibration_over_training"] = fit_seconds / case.training_seconds
    print(kind, name, f"pinball {1000 * line['pinball']:.3f}e-3, {fit_seconds:.1f} s", flush=True)
    return line, result


def describe(case):
    """Accuracy of the surrogate, beside persistence and climatology."""
    data, prediction = case.data, numbers(case.surrogate(case.data.x_test))
    references = {
        "persistence": numbers(data.x_test[:, -1:]),
        "climatology": numbers(data.states.mean(dim=0)),
    }
    line = {
        "n_steps": case.recipe.n_steps,
        "n_train": len(data.x),
        "n_test": len(data.x_test),
        "training_seconds": case.training_seconds,
        "choosing_seconds": case.choosing_seconds,
        "relative_l2": relative_l2(case.truth, prediction),
        "mae_test": float(abs(prediction - case.truth).mean()),
    }
    for name, field in references.items():
        reference = np.broadcast_to(field, prediction.shape)
        gained = skill(case.truth, prediction, reference)
        line |= {f"skill_{name}_{lead}": value for lead, value in gained.items()}
        line[f"relative_l2_{name}"] = relative_l2(case.truth, reference)
    return line


def leaks(case, kind):
    """Held-out targets that the fold surrogates were trained on, and the resulting errors."""
    held_out, features = case.held_out(kind), case.queries(kind).features
    known, surrogates = case.folds(kind)
    x, y = case.data.x, case.data.y
    pairs = zip((seen for seen, _ in known.splits), surrogates, strict=True)
    in_sample = [float((model(x[seen]) - y[seen]).abs().mean()) for seen, model in pairs]
    test_error = abs(features.prediction - case.truth)

    def with_distance(error, of):
        means = error.reshape(len(error), -1).mean(axis=1)
        return window_correlation(means, of.support_distance)

    return {
        "folds": kind,
        "shared_targets": shared_targets(known.splits, case.settings.n_leads),
        "mae_fold_in_sample": float(np.mean(in_sample)),
        "mae_held_out": float(held_out.error.mean()),
        "mae_test": float(test_error.mean()),
        "distance_correlation_held_out": with_distance(held_out.error, held_out.seen.features),
        "distance_correlation_test": with_distance(test_error, features),
    }


def shared_targets(splits, n_leads):
    """Fraction of the held-out target states that are also training targets of the fold."""
    shared = total = 0
    for seen, held_out in splits:
        trained, held = (np.unique(rows[:, None] + np.arange(n_leads)) for rows in (seen, held_out))
        shared += np.isin(held, trained).sum()
        total += len(held)
    return float(shared / total)


def benchmark(weather, forms, file, *, small=False):
    """The benchmark of some data: a problem is a form of the forecast and an origin."""
    settings = SMALL if small else Settings()
    chosen = origins(len(weather.values), settings.n_leads)[-settings.n_origins :]
    problems = [f"{form}, {origin}" for form in forms for origin in chosen]
    facts = {"variables": [*weather.names], "checksum": record.fingerprint(weather.values)}
    facts |= {"first_time": str(weather.time[0]), "last_time": str(weather.time[-1])}
    how = range(3), problems[:1], lambda: facts, method_of
    return Benchmark(file, problems, measure, lambda _: NAMES, *how)


def main(words=None):
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("ERA5"))
    parser.add_argument("--start", help="first day of the data to use")
    parser.add_argument("--days", type=int, default=DAYS, help="days of data to use")
    parser.add_argument("--form", choices=FORMS, help="one of the two forecasts")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    asked = parser.parse_args(words)
    read = partial(load, asked.data, start=asked.start, days=asked.days)
    try:
        weather = read()
    except ValueError as failure:
        raise SystemExit(str(failure)) from None
    file = "weather_era5" if weather.names == STAND_IN else "weatherbench"
    file += "_direct" * (asked.form == "direct")
    forms = [asked.form] if asked.form else list(FORMS)
    known = benchmark(weather, forms, file, small=asked.small)
    return run(known, asked, read=read, pictures=asked.pictures)


if __name__ == "__main__":
    main()
