"""The paper's third problem: error fields for ten-day forecasts of the whole globe, on reanalysis data.

    python -m benchmarks.weather.weatherbench --data DIR --jobs 9              # 2 forms, 3 origins, 3 seeds, all methods
    python -m benchmarks.weather.weatherbench --data DIR --information         # which features predict the error
    python -m benchmarks.weather.weatherbench --data DIR --small               # short trainings: within a minute

A U-Net learns windows of 3 past and 40 future states, 6 hours apart, and forecasts the days after an origin; three
origins, one horizon apart. The paper scores one window. The forecast is the paper's (``direct``) or a correction of
damped persistence (``anomalies``).

Neighbouring windows have nearly all targets in common. The folds ``clusters`` are the paper's: their training windows
contain targets of the held-out windows. The folds ``blocks`` are five periods with a gap on either side: their training
windows contain no held-out target.

The rows of each task (form, origin, seed) are stored in a file when they are ready; a rerun measures what is missing.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.weather import information as weather_information
from benchmarks.weather.case import KINDS, SMALL, Settings, Task, make_case
from benchmarks.weather.data import DAYS, STAND_IN, load, origins
from benchmarks.weather.forecast import FORMS
from benchmarks.weather.methods import METHODS, SHOWN
from benchmarks.weather.scores import scores, skill, window_correlation
from geoq.metrics import relative_l2
from geoq.quantiles import inverse_cdf_quantile

SEEDS = 3


# One task.


def begin(task, plan):
    weather = plan.weather()
    case = make_case(task, weather, plan.settings)
    print(
        f"{task.name}: {case.recipe.n_steps} steps, chosen in {case.choosing_seconds:.1f} s, trained in "
        f"{case.training_seconds:.2f} s",
        flush=True,
    )
    return case, weather


def run(task, plan):
    """Measure the methods that the file of a task lacks; the file is written after each method."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with threadpool_limits(1):
        case, weather = begin(task, plan)
        missing, rows, shown = plan.missing(task), plan.rows(task), {}
        head = {"surrogate": describe(case), "leaks": leaks(case)}
        print(
            f"{task.name}: folds by {time.perf_counter() - started:.0f} s", flush=True
        )
        for kind, method in missing:
            line, answer = measure(case, kind, method)
            rows.append(line)
            plan.write(task, head, rows)
            if kind == "blocks" and method in SHOWN:
                shown[method] = answer
        if set(SHOWN) <= shown.keys():
            file = plan.part(task).with_suffix(".npz")
            np.savez_compressed(file, **to_draw(case, weather, shown))
    print(f"{task.name}: {time.perf_counter() - started:.0f} s in all", flush=True)


def inform(task, plan):
    """Rows of the information study of a task."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return weather_information.study(begin(task, plan)[0])


def measure(case, kind, name):
    """Row and answer of one method."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    task, y = case.task, case.data.y_test
    fit = METHODS[kind][name].fit
    answer, fit_seconds = case.shared.timed(lambda: fit(case, kind))
    result, asking = case.shared.timed(answer)
    inside = (
        torch.ones(len(y), dtype=torch.bool) if result.safe is None else result.safe
    )
    line = record.row(
        name,
        setting=f"{task.form}, {kind}",
        seed=task.seed,
        y=y,
        prediction=result.prediction,
        error_hat=result.error_hat,
        safe=inside.cpu().numpy(),
        train_seconds=fit_seconds,
        inference_seconds=asking,
    )
    if result.safe is None:
        line |= {key: None for key in line if key.startswith("safe_")}
    error = (y - result.prediction).abs()
    line |= scores(error, result.error_hat, case.latitude, QUANTILE)
    line |= getattr(answer, "trainings", {})
    line |= {
        "form": task.form,
        "folds": kind,
        "origin": task.origin,
        "calibration_over_training": fit_seconds / case.training_seconds,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30
        if torch.cuda.is_available()
        else None,
    }
    by_quarter = " ".join(f"{line[f'coverage_q{q}']:.3f}" for q in range(1, 5))
    print(
        f"{task.name} {kind:8s} {name:66s} pinball {1000 * line['pinball']:7.3f}e-3  correlation "
        f"{line['correlation']:.3f}  daily correlation {line['which_day']:+.3f}  coverage {line['coverage']:.3f} ({by_quarter})  "
        f"{fit_seconds:.1f} s, {asking:.1f} s; at {time.perf_counter() - case.started:.0f} s",
        flush=True,
    )
    return line, result


def describe(case):
    """Accuracy of the surrogate, beside persistence and climatology."""
    data = case.data
    prediction = case.surrogate(data.x_test)
    cell_mean = data.states.mean(dim=0).expand_as(prediction)
    references = {
        "persistence": data.x_test[:, -1:].expand_as(prediction),
        "climatology": cell_mean,
    }
    line = {
        **case.task._asdict(),
        "n_steps": case.recipe.n_steps,
        "n_train": len(data.x),
        "n_test": len(data.x_test),
        "training_seconds": case.training_seconds,
        "choosing_seconds": case.choosing_seconds,
        "relative_l2": relative_l2(data.y_test, prediction),
        "mae_in_sample": float((case.surrogate(data.x) - data.y).abs().mean()),
        "mae_test": float((prediction - data.y_test).abs().mean()),
    }
    for name, reference in references.items():
        gained = skill(data.y_test, prediction, reference)
        line |= {f"skill_{name}_{lead}": value for lead, value in gained.items()}
        line[f"relative_l2_{name}"] = relative_l2(data.y_test, reference)
    return line


def leaks(case):
    """For each kind of folds: held-out targets that the fold surrogates were trained on, and the resulting errors."""
    lines = []
    for kind in KINDS:
        calibration = case.tuples(kind).calibration
        features = case.queries(kind).features
        known, surrogates = case.folds(kind)
        x, y = case.data.x, case.data.y
        in_sample = [
            float((surrogate(x[seen]) - y[seen]).abs().mean())
            for (seen, _), surrogate in zip(known.splits, surrogates, strict=True)
        ]
        test_error = (features.prediction - case.data.y_test).abs()
        lines.append(
            {
                **case.task._asdict(),
                "folds": kind,
                "shared_targets": shared_targets(known.splits, case.settings.n_leads),
                "fewest_left_in": min(len(seen) for seen, _ in known.splits),
                "mae_fold_in_sample": float(np.mean(in_sample)),
                "mae_held_out": float(calibration.error.mean()),
                "mae_test": float(test_error.mean()),
                "distance_correlation_held_out": window_correlation(
                    calibration.error.flatten(1).mean(dim=1),
                    calibration.features.support_distance,
                ),
                "distance_correlation_test": window_correlation(
                    test_error.flatten(1).mean(dim=1), features.support_distance
                ),
            }
        )
    return lines


def shared_targets(splits, n_leads):
    """Fraction of the held-out target states that are also training targets of the fold."""
    shared = total = 0
    for seen, held_out in splits:
        trained, held = (
            np.unique(rows[:, None] + np.arange(n_leads)) for rows in (seen, held_out)
        )
        shared += np.isin(held, trained).sum()
        total += len(held)
    return float(shared / total)


def to_draw(case, weather, shown):
    """Arrays for the pictures: maps of the first test window at the last lead, and curves over leads and windows."""
    y = case.data.y_test
    prediction = case.surrogate(case.data.x_test)
    error = (y - prediction).abs()
    pooled = error.permute(1, 0, 2, 3, 4).flatten(1)
    arrays = {
        "names": weather.names,
        "lat": weather.lat,
        "lon": weather.lon,
        "methods": list(shown),
        "truth": y[0, -1],
        "prediction": prediction[0, -1],
        "error": error[0, -1],
        "mean_error": pooled.mean(dim=1),
        "high_error": inverse_cdf_quantile(pooled.T, QUANTILE),
        "mean_bound": torch.stack(
            [a.error_hat.mean(dim=(0, 2, 3, 4)) for a in shown.values()]
        ),
        "bound": torch.stack([a.error_hat[0, -1] for a in shown.values()]),
    }
    for number, answer in enumerate(shown.values()):
        if answer.safe is not None:
            arrays[f"score_{number}"] = answer.score
            covered = (case.data.y_test - answer.prediction).abs() <= answer.error_hat
            arrays[f"covered_{number}"] = covered.flatten(1).float().mean(dim=1)
    return {
        name: part.cpu().numpy() if isinstance(part, torch.Tensor) else np.array(part)
        for name, part in arrays.items()
    }


# All tasks.


@dataclass(frozen=True)
class Plan:
    """Data, settings and methods of a run, and the folder of the tasks' files."""

    folder: Path | None
    settings: Settings
    parts: Path
    conditions: dict
    only: str = ""
    skip: tuple[str, ...] = ()
    start: str | None = None
    days: int = DAYS
    keep: bool = False

    def weather(self):
        return load(self.folder, start=self.start, days=self.days)

    def part(self, task):
        return self.parts / f"{task.name}.json"

    def read(self, task):
        """Content of the task's file; no rows if it was measured under other conditions."""
        if not self.part(task).is_file():
            return {"rows": []}
        part = json.loads(self.part(task).read_text())
        ignored = {"source"} if self.keep else set()
        same = all(part[k] == v for k, v in self.conditions.items() if k not in ignored)
        return part if same else {"rows": []}

    def write(self, task, head, rows):
        self.parts.mkdir(parents=True, exist_ok=True)
        rows = [{"commit": record.COMMIT} | row for row in rows]
        text = record.as_text({**self.conditions, **head}, rows)
        # An interrupted run leaves no incomplete file.
        whole = self.part(task).with_suffix(".tmp")
        whole.write_text(text)
        whole.replace(self.part(task))

    def rows(self, task):
        return self.read(task)["rows"]

    def missing(self, task):
        done = {(row["folds"], row["method"]) for row in self.rows(task)}
        wanted = [(kind, name) for kind in METHODS for name in METHODS[kind]]
        return [
            (kind, name)
            for kind, name in wanted
            if (kind, name) not in done
            and self.only in name
            and not any(part in name for part in self.skip)
        ]


def merge(plan, tasks, path, weather):
    """Write one results file from the files of all tasks."""
    parts = [part for task in tasks if "surrogate" in (part := plan.read(task))]
    rows = [row for part in parts for row in part["rows"]]
    rows.sort(key=lambda r: (r["form"], [*METHODS].index(r["folds"])))
    record.write(
        path.stem,
        rows,
        path,
        **plan.conditions,
        variables=[*weather.names],
        first_time=str(weather.time[0]),
        last_time=str(weather.time[-1]),
        surrogates=[part["surrogate"] for part in parts],
        leaks=[line for part in parts for line in part["leaks"]],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of netCDF files")
    parser.add_argument("--small", action="store_true", help="short trainings")
    parser.add_argument("--start", help="first day of the data to use")
    parser.add_argument("--days", type=int, default=DAYS, help="days of data to use")
    parser.add_argument(
        "--form", action="append", choices=FORMS, help="may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--origins", type=int, nargs="+", help="numbers of states before the origins"
    )
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        help="leave out methods whose name contains this",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--keep", action="store_true", help="keep rows that older code measured"
    )
    parser.add_argument(
        "--information", action="store_true", help="run the information study instead"
    )
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else Settings()
    try:
        weather = load(arguments.data, start=arguments.start, days=arguments.days)
    except ValueError as refusal:
        raise SystemExit(str(refusal)) from None
    problem = "weather_era5" if weather.names == STAND_IN else "weatherbench"
    ending = "_information" if arguments.information else ""
    ending += "-small" if arguments.small else ""
    path = arguments.out or record.RESULTS / f"{problem}{ending}.json"
    plan = Plan(
        arguments.data,
        settings,
        path.with_name(f"{path.stem}-parts"),
        {
            "source": record.source("benchmarks.weather.weatherbench"),
            "small": arguments.small,
            "settings": json.loads(json.dumps(asdict(settings))),
        },
        arguments.only,
        tuple(arguments.skip),
        arguments.start,
        arguments.days,
        arguments.keep,
    )
    chosen = origins(len(weather.values), settings.n_leads)
    least = settings.n_past + settings.n_leads
    most = len(weather.values) - settings.n_leads
    for origin in arguments.origins or ():
        if not least <= origin <= most:
            raise SystemExit(
                f"--origins {origin} leaves no window before or after the origin; choose numbers from {least} to {most}."
            )
    first = arguments.first_seed
    tasks = [
        Task(form, origin, seed)
        for seed in range(first, first + (1 if arguments.small else arguments.seeds))
        for origin in arguments.origins or chosen[-settings.n_origins :]
        for form in arguments.form or FORMS
    ]
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    started = time.perf_counter()
    if arguments.information:
        lines = [
            line
            for part in parallel(delayed(inform)(t, plan) for t in tasks)
            for line in part
        ]
        record.write(f"{problem}_information", lines, path, **plan.conditions)
        print(weather_information.table(lines))
    else:
        missing = [task for task in tasks if plan.missing(task)]
        for n_done, _ in enumerate(parallel(delayed(run)(t, plan) for t in missing), 1):
            seconds = time.perf_counter() - started
            print(f"{n_done} of {len(missing)} tasks, {seconds:.0f} s", flush=True)
            merge(plan, tasks, path, weather)
    if arguments.pictures:
        from benchmarks.weather import (
            pictures as weather_pictures,  # needs Matplotlib
        )

        weather_pictures.draw(path, plan.parts, arguments.pictures)
    print(path)


if __name__ == "__main__":
    main()
