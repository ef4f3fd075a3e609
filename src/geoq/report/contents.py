"""What a report states: sections of sentences, tables and pictures, the same for all formats."""

import hashlib
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import numpy as np

from geoq.arrays import flat, to_numbers
from geoq.core.agreement import mean_of_each
from geoq.core.assessment import N_OUTPUTS_SHOWN, numbers_of
from geoq.core.opinion import CLEARLY, compared
from geoq.data.domain import Mesh
from geoq.report import evidence, svg
from geoq.report.evidence import Rows, covered

# A sentence, a table and a picture, each of which can be missing; the parts of each section by its title.
Part: TypeAlias = dict[str, Any]
Report: TypeAlias = dict[str, list[Part]]
N_WORST, MOST_POINTS, MOST_CELLS, MOST_NODES, MOST_INPUTS = 10, 1200, 40, 1500, 12
TEST, HELD_OUT, PLANNED = "test pairs", "held-out points", "planned queries"
FORECASTS = "held-out forecasts"
LIMITS = (
    "A query that is not safe: its bound is a guess.",
    "A parameter that is not an input: no flag can notice that it changed.",
    "Each single query: a quantile level is a statement about many queries together.",
    "The error of the reference itself: errors are differences to the reference outputs.",
    "Queries from another distribution than the points that this report counts.",
)


def _part(text: str, columns: str = "", rows: Sequence[Any] = (), chart: str = "") -> Part:
    """A sentence, the names of the columns of a table with commas between them, its rows, and a picture."""
    return {"text": text, "columns": columns.split(", "), "rows": rows, "chart": chart}


def _drawn(text: str, columns: str, rows: Sequence[Any], level: float, *, log: bool) -> list[Part]:
    """A table whose rows are drawn as intervals; nothing without rows."""
    return [_part(text, columns, rows, svg.intervals(rows, text, level, log=log))] if rows else []


def _identity(core: Any, data: Sequence[np.ndarray]) -> list[list[Any]]:
    digest, names = hashlib.sha256(), ("geoq", "numpy", "scipy", "scikit-learn")
    for array in data:
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return [
        [
            "settings that differ from the defaults",
            re.sub(r" at 0x[0-9a-f]+|(train_)?surrogate=[^,)]*,? ?", "", repr(core)),
        ],
        ["SHA-256 of inputs and observed errors", digest.hexdigest()],
        ["versions", ", ".join(f"{name} {version(name)}" for name in names)],
        ["Python", platform.python_version()],
    ]


def _guarantee(fitted: Any) -> str:
    if not hasattr(fitted, "conformal"):
        return "joint_band guarantees a bound of whole forecasts that are exchangeable with the held-out ones. Single steps have none."
    if fitted.n_verified:
        return f"Nothing is guaranteed since update received {fitted.n_verified} verified queries; the coverage below is measured."
    if not fitted.conformal.n_pairs:
        return "Nothing is guaranteed, because conformalize was not called; the coverage below is measured."
    single, level = fitted.error[:1].size == 1, f"{fitted.quantile:g}"
    what = "the error is" if single else f"the fraction {level} of the errors is expected"
    chance = f" with a probability of {level} or more" if single else ""
    query = f"a safe query that is exchangeable with the {fitted.conformal.n_pairs} pairs set aside"
    return f"For {query}, {what} within the bound{chance}, unless conformalize received another guarantee."


def _numbers(n: int, scale: Any, found: dict[str, Rows], rows: Rows, of: str) -> list[list[Any]]:
    """Five numbers: the data, the error, the coverage, the bound, and how many queries are safe."""
    of_n = "rows, fields or states that fit received"
    numbers: list[list[Any]] = [["points of the data", n, of_n]]
    if rows:
        first = rows["first"]
        error = float(np.nanmean(np.nanmean(rows["error"][first], axis=0) / scale))
        p, low, high, _, known = covered(rows, first)
        text = f"{p:.3f} ({low:.3f} to {high:.3f})" if known else "unknown"
        numbers += [["mean error over the deviation of the outputs", error, of]]
        numbers += [["coverage", text, of]]
        numbers += [["median bound", float(np.nanmedian(rows["bound"][first])), of]]
    name = next((name for name in (PLANNED, TEST) if name in found), "")
    safe = f"{found[name]['first'].mean():.3f}" if name else "unknown"
    return [*numbers, ["fraction safe", safe, name or "pass planned or x_test to count them"]]


def _ranges(columns: dict[str, Any], answers: dict[str, Any]) -> list[Part]:
    """The range of each input in the data and among the queries."""
    rows = []
    asked = {label: flat(to_numbers(answer.asked, label)) for label, answer in answers.items()}
    for own, (number, data, column) in [*columns.items()][:MOST_INPUTS]:
        rounding = 1e-9 * abs(data).max()
        points = {"data": data} | {label: values[:, number] for label, values in asked.items()}
        for label, values in points.items():
            if column.kind != "level" and not np.isnan(values).all():
                outside = (values < data.min() - rounding) | (values > data.max() + rounding)
                ends = map(column.text, np.nanquantile(values, (0, 0.05, 0.5, 0.95, 1)))
                rows.append([own, label, *ends, float(outside[~np.isnan(values)].mean())])
    head = "input, points, least, 5 %, median, 95 %, most, fraction outside the data"
    return [_part("Range of each input", head, rows)] if rows else []


def _distances(found: dict[str, Rows]) -> list[Part]:
    """The distances to the data of all kinds of points."""
    rows = []
    for label, own in found.items():
        distance = own.get("distance", np.zeros(0))
        families = own.get("family", np.full(len(distance), label))
        for name in dict.fromkeys(families[np.isfinite(distance)].tolist()):
            values = distance[(families == name) & np.isfinite(distance)]
            low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
            rows.append([name, middle, low, high, len(values)])
    text = "Distances to the data, in medians of the calibration: 5 %, 50 % and 95 % of the points"
    return _drawn(text, "points, median, 5 %, 95 %, number", rows, 1.0, log=True)


def _scatter(rows: Rows, kinds: tuple[str, str], text: str) -> Part:
    """Bounds over errors of a random choice of values."""
    counts = ~np.isnan(rows["error"])
    n, each = int(counts.sum()), np.broadcast_to(rows["first"][:, None], counts.shape)[counts]
    some = np.random.default_rng(0).choice(n, min(n, MOST_POINTS), replace=False)
    both = svg.exponents(np.stack([rows[name][counts][some] for name in ("error", "bound")]))
    looks = (("cross", kinds[1], ~each[some]), ("dot", kinds[0], each[some]))
    series = {(look, name): both[:, own] for look, name, own in looks if own.any()}
    text += f" Drawn: {len(some)} of {n} values; points above the line are within their bounds."
    return _part(text, chart=svg.scatter(series, ("true error", "error bound"), text))


def _coverage(rows: Rows, level: float, outputs: Sequence[str]) -> list[Part]:
    """Coverage by distance, family of folds, output and lead time, as far as the rows have them, with intervals."""
    every, steps, family = slice(None), rows.get("step", ()), rows.get("family", np.zeros(0))
    leads = [part for part in np.array_split(np.unique(steps), evidence.N_BINS) if len(part)]
    columns = np.array_split(np.arange(rows["error"].shape[1]), max(1, len(outputs)))
    of_each = zip(outputs, columns, strict=True) if len(outputs) > 1 else ()
    parts: dict[str, list[tuple[str, Any, Any]]] = {
        "distance to the data": [(*part, every) for part in evidence.bins_of(rows)],
        "family of folds": [(n, family == n, every) for n in dict.fromkeys(family.tolist())],
        "output": [(name, every, part) for name, part in of_each],
        "lead time": [(f"steps {s[0]} to {s[-1]}", np.isin(steps, s), every) for s in leads],
    }
    found, head = [], "coverage, lower end, upper end, values, independent rows"
    for what, each in parts.items():
        counted = [[name, *covered(rows, *own)] for name, *own in each]
        known = [row for row in counted if row[-1]]
        found += _drawn(f"Coverage by {what}", f"{what}, {head}", known, level, log=False)
    return found


def _maps(rows: Rows, layout: Any) -> list[Part]:
    """Coverage and mean error of each cell of a field, as means over channels and over blocks of cells."""
    parts: list[Part] = []
    inside = np.where(np.isnan(rows["error"]), np.nan, rows["error"] <= rows["bound"])
    for name, values in (
        () if layout is None else (("Coverage", inside), ("Mean error", rows["error"]))
    ):
        places, field = None, np.nanmean(values, axis=0).reshape(-1, *layout.cells).mean(axis=0)
        if isinstance(layout.domain, Mesh):
            few = slice(None, None, 1 + len(field) // MOST_NODES)
            places = np.pad(layout.domain.coordinates, ((0, 0), (0, 1)))[few, :2]
            field = field[few]
        else:
            field = field.reshape(-1, *(1, *field.shape)[-2:]).mean(axis=0)
            for _ in range(2):
                blocks = np.array_split(field, min(MOST_CELLS, len(field)))
                field = np.stack([block.mean(axis=0) for block in blocks], axis=1)
        least, middle, most = np.nanquantile(field, (0, 0.5, 1))
        text = f"{name} of each cell: {least:.3g} to {most:.3g}, median {middle:.3g}"
        parts.append(_part(text, chart=svg.cells(field, places, text)))
    return parts


def _worst(label: str, rows: Rows, answer: Any, names: Any) -> Part:
    """The queries whose errors are largest in units of their bounds, or that are farthest from the data, with reasons."""
    ratio = np.where(rows["error"] == 0, 0.0, rows["error"] / rows["bound"])
    what, numbers = "error over bound", [mean_of_each(rows["bound"]), mean_of_each(rows["error"])]
    if measured := not np.isnan(ratio).all():
        numbers.append(np.nan_to_num(ratio, nan=-1).max(axis=1))
    else:
        what, numbers[1] = "support score", rows["score"]
    order, found = np.argsort(-numbers[-1], kind="stable"), []
    firsts = np.sort(np.unique(rows["group"][order], return_index=True)[1])
    for i in order[firsts[:N_WORST]].tolist():
        if "step" in rows:
            group = int(rows["group"][i])
            name = f"forecast {group}, step {rows['step'][i]}"
            why = "; ".join(["held out"] if answer is None else answer.outcome(group))
            why = why.split(": ", 1)[-1]
        elif answer is None:
            name, far = (
                f"row {rows['point'][i]}",
                f"{rows['distance'][i]:.2g} medians from the data",
            )
            why = f"held out by {rows['family'][i]}, {far}"
        else:
            name, why = str(i), answer.explanation(i, names)
            flag = "" if rows["first"][i] else "NOT safe: "
            why = f"{flag}{why}" if why else answer.safety(i, names)
        found.append([name, why, *(float(values[i]) for values in numbers)])
    head = f"query, reason, bound, {'error, ' * measured}{what}"
    return _part(f"{label.capitalize()} with the largest {what}", head, found)


def _report(core: Any, answers: dict[str, Any], about: Part, all_rows: dict[str, Rows]) -> Report:
    """All sections; the first rows are the test pairs if there are some, and else the held-out ones."""
    found = {n: all_rows[n] for n in (TEST, HELD_OUT, FORECASTS, PLANNED) if n in all_rows}
    label, level, (names, columns) = next(iter(found), ""), core.quantile, about["inputs"]
    rows, kinds = {} if label == PLANNED else found.get(label, {}), about["kinds"]
    how = re.sub(r"\binput (\d+)\b", lambda m: names[int(m[1])] if names else m[0], core.describe())
    what, _, how = how.partition(". ")
    note = f"Errors of the {label}. The bound was fitted to them, so this is no test; pass new pairs as x_test and y_test."
    if label == TEST:
        kinds, note = ("safe", "not safe"), "Errors of the test pairs."
    intervals = f"The quantile level is {level:g}. Intervals have the level {evidence.CONFIDENCE:g}, and a row counts once."
    against, counted = _part("No errors are stored in the file."), [_part(intervals)]
    if rows:
        against = _scatter(rows, kinds, note)
        counted += _coverage(rows, level, about["outputs"]) + _maps(rows, about.get("layout"))
    numbers = _numbers(about["n"], about["scale"], found, rows, f"{label}, {kinds[0]}")
    carry, explained = [], "This is counted for tables with held-out errors."
    if HELD_OUT in found and columns:
        carry = evidence.carriers(found[HELD_OUT], columns)
        explained = "The inputs by how much of the variation of the errors they explain"
    head = "input, fraction of the variation of the errors, errors are largest at, times the mean error there"
    where = [*map(_part, about.get("where", ())), *_ranges(columns, answers), *_distances(found)]
    return {
        "What this is": [_part(f"{what}.", "what, value", _identity(core, about["data"]))],
        "The guarantee": [_part(_guarantee(core.fitted_))],
        "Five numbers": [_part("", "number, value, of", numbers)],
        "Where the data and the queries are": where,
        "Bound against error": [against],
        "Coverage": counted,
        "Worst queries": [_worst(n, rows, answers.get(n), names) for n, rows in found.items()],
        "Which inputs carry the error": [_part(explained, head, carry)],
        "The second opinion": [_part(about["opinion"])],
        "How the bound was calibrated": [_part(how)],
        "What is not guaranteed": [*map(_part, LIMITS)],
    }


def of_pairs(core: Any, cases: dict[str, Any], names: Any, outputs: Any) -> Report:
    """The report on a ``GeoQ``."""
    fitted, rows, answers = core.fitted_, {}, {}
    opinion = "There is none: the bound does not use one, or the file was saved without its held-out errors."
    scale, tuples, outputs = np.ones(1), fitted.tuples, outputs or fitted.output_names
    for label, (x, y) in cases.items():
        answers[label] = fitted.assess(x)
        rows[label] = evidence.of_answer(fitted, answers[label], y)
    if tuples is not None:
        rows[HELD_OUT] = evidence.held_out(fitted)
        scale = np.nanstd(flat(tuples.points.outputs), axis=0)
        if comparison := compared(tuples, outputs):
            better = "" if comparison[1] < CLEARLY else "not clearly "
            opinion = f"{comparison[0]}: the second one is {better}the better model."
    n = fitted.layout.n_outputs(fitted.error.shape[1:])
    about: Part = {
        "n": len(fitted.error),
        "outputs": outputs if len(outputs or ()) == n else [f"output {j}" for j in range(n)],
        "inputs": (names, evidence.columns_of(fitted, names)),
        "data": (fitted.geometry.points.inputs, fitted.error),
        "scale": np.where(scale > 0, scale, np.nan) if scale.size == fitted.error[:1].size else 1.0,
        "kinds": ("held out inside the data", "held out in clusters or shells"),
        "opinion": opinion,
        "layout": fitted.layout if fitted.layout.on_cells else None,
    }
    return _report(core, answers, about, rows)


def of_rollouts(core: Any, cases: dict[str, Any], _: Any, outputs: Any) -> Report:
    """The report on a ``RolloutGeoQ``; forced rollouts have pairs of initial states and forcing."""
    fitted, rows, answers, where = core.fitted_, {}, {}, []
    held, reference, layout = fitted.held_out, fitted.reference, fitted.reference.layout
    for label, (x, y) in cases.items():
        start, forcing = x if isinstance(x, tuple) else (x, None)
        n_steps = held.bound.shape[1] if y is None else y.shape[1]
        answer = answers[label] = core.assess(start, n_steps, forcing=forcing)
        rows[label] = evidence.of_forecasts(answer, y)
        least, middle, most = np.quantile(numbers_of(answer.supported_horizon), (0, 0.5, 1))
        text = f"{label.capitalize()} are supported for {middle:g} of {n_steps} steps (median"
        where.append(f"{text}, from {least:g} to {most:g}).")
    rows[FORECASTS] = evidence.of_steps(held.error, held.bound)
    if fitted.calibration is not None:
        distance = fitted.calibration.features.support_distance.reshape(-1)
        rows[FORECASTS]["distance"] = distance / np.median(distance[np.isfinite(distance)])
    n = held.bound.shape[2]
    scale = reference.coordinates.scale.reshape(-1)[: layout.n_values][layout.places]
    about: Part = {
        "n": len(reference.geometry.points),
        "outputs": [] if n > N_OUTPUTS_SHOWN else outputs or [f"coordinate {j}" for j in range(n)],
        "inputs": (None, {}),
        "data": (reference.geometry.points.inputs, held.error),
        "scale": scale if len(scale) == n else 1.0,
        "kinds": ("first half of the steps", "second half of the steps"),
        "where": where,
        "opinion": "Forecasts have none: members of the surrogate and of a companion are part of the bound.",
    }
    return _report(core, answers, about, rows)
