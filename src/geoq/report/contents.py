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

# A sentence, with a picture or with a table or with both; and the parts of each section by its title.
Part: TypeAlias = dict[str, Any]
Report: TypeAlias = dict[str, list[Part]]
N_WORST, MOST_POINTS, MOST_CELLS, MOST_NODES, MOST_INPUTS = 10, 1200, 40, 1500, 12
TEST, HELD_OUT, PLANNED = "test pairs", "held-out points", "planned queries"
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


def _identity(text: str, core: Any, *data: np.ndarray) -> Part:
    digest = hashlib.sha256()
    for array in data:
        digest.update(
            f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    names = ("geoq", "numpy", "scipy", "scikit-learn")
    rows = [
        ["settings that differ from the defaults", re.sub(r" at 0x[0-9a-f]+", "", repr(core))],
        ["SHA-256 of inputs and observed errors", digest.hexdigest()],
        ["versions", ", ".join(f"{name} {version(name)}" for name in names)],
        ["Python", platform.python_version()],
    ]
    return _part(text, "what, value", rows)


def _guarantee(fitted: Any) -> str:
    if not hasattr(fitted, "conformal"):
        return (
            "Nothing is guaranteed for the bound of a single step, whose coverage below is measured; joint_band bounds whole forecasts that "
            "are exchangeable with the held-out ones."
        )
    if fitted.n_verified:
        return f"Nothing is guaranteed since update received {fitted.n_verified} verified queries; the coverage below is measured."
    if not fitted.conformal.n_pairs:
        return "Nothing is guaranteed, because conformalize was not called; the coverage below is measured."
    single, level = fitted.error[:1].size == 1, f"{fitted.quantile:g}"
    what = "the error is" if single else f"the fraction {level} of the errors is expected"
    chance = f" with a probability of {level} or more" if single else ""
    return (
        f"For a safe query that is exchangeable with the {fitted.conformal.n_pairs} pairs that were set aside, {what} within the bound"
        f"{chance}, unless conformalize received another guarantee."
    )


def _numbers(about: Part, found: dict[str, Rows], kinds: tuple[str, str]) -> Part:
    """Five numbers: the data, the error, the coverage, the bound, and how many queries are safe."""
    rows = [["points of the data", about["n"], "rows, fields or states that fit received"]]
    for label in [*found][:1]:
        own, first, where = found[label], found[label]["first"], f"{label}, {kinds[0]}"
        error = np.nanmean(own["error"][first], axis=0) / about["scale"]
        p, low, high, _, n = covered(own, first)
        text = f"{p:.3f} ({low:.3f} to {high:.3f})" if n else "unknown"
        rows += [["mean error over the deviation of the outputs", float(np.nanmean(error)), where]]
        rows += [["coverage", text, where]]
        rows += [["median bound", float(np.nanmedian(own["bound"][first])), where]]
    safe = [
        [name, f"{found[name]['first'].mean():.3f}"] for name in (PLANNED, TEST) if name in found
    ]
    name, fraction = safe[0] if safe else ("pass planned or x_test to count them", "unknown")
    return _part("", "number, value, of", [*rows, ["fraction safe", fraction, name]])


def _ranges(columns: dict[str, Any], answers: dict[str, Any]) -> list[Part]:
    """The range of each input in the data and among the queries."""
    rows = []
    for own, (number, data, column) in [*columns.items()][:MOST_INPUTS]:
        points = {"data": data} if column.kind != "level" else {}
        for label, answer in answers.items() if points else ():
            values = flat(to_numbers(answer.asked, label))[:, number]
            points |= {label: values[~np.isnan(values)]} if not np.isnan(values).all() else {}
        rounding = 1e-9 * max(abs(data.min()), abs(data.max()))
        for label, values in points.items():
            outside = (values < data.min() - rounding) | (values > data.max() + rounding)
            ends = np.quantile(values, (0, 0.05, 0.5, 0.95, 1))
            rows.append([own, label, *map(column.text, ends), float(outside.mean())])
    columns_of = "input, points, least, 5 %, median, 95 %, most, fraction outside the data"
    return [_part("Range of each input", columns_of, rows)] if rows else []


def _distances(found: dict[str, Rows]) -> list[Part]:
    """The distances to the data of all kinds of points."""
    rows = []
    for label, own in found.items():
        families = own.get("family", np.full(len(own["group"]), label))
        for name in dict.fromkeys(families.tolist()) if "distance" in own else ():
            values = own["distance"][families == name]
            values = values[np.isfinite(values)]
            if len(values):
                low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
                rows.append([name, middle, low, high, len(values)])
    text = "Distances to the data, in medians of the calibration: 5 %, 50 % and 95 % of the points"
    chart = svg.intervals(rows, text, 1.0, log=True) if rows else ""
    return [_part(text, "points, median, 5 %, 95 %, number", rows, chart)] if rows else []


def _scatter(rows: Rows, kinds: tuple[str, str], text: str) -> Part:
    """Bounds over errors of a random choice of values."""
    counts = ~np.isnan(rows["error"])
    n, each = int(counts.sum()), np.broadcast_to(rows["first"][:, None], counts.shape)[counts]
    some = np.random.default_rng(0).choice(n, min(n, MOST_POINTS), replace=False)
    both = svg.exponents(np.stack([rows[name][counts][some] for name in ("error", "bound")]))
    looks = (("cross", kinds[1], ~each[some]), ("dot", kinds[0], each[some]))
    series = {(look, name): both[:, own] for look, name, own in looks if own.any()}
    text = (
        f"{text} Drawn: {len(some)} of {n} values; points above the line are within their bounds."
    )
    return _part(text, chart=svg.scatter(series, ("true error", "error bound"), text))


def _coverage(rows: Rows, level: float, outputs: Sequence[str]) -> list[Part]:
    """Coverage by distance, family of folds, output and lead time, as far as the rows have them, with intervals."""
    found: dict[str, list[list[Any]]] = {}
    if "distance" in rows:
        found["distance to the data"] = evidence.in_bins(
            rows, "distance", "{:.2g} to {:.2g} medians"
        )
    if "family" in rows:
        own = {name: rows["family"] == name for name in dict.fromkeys(rows["family"].tolist())}
        found["family of folds"] = [[name, *covered(rows, where)] for name, where in own.items()]
    if len(outputs) > 1:
        size = rows["error"].shape[1] // len(outputs)
        of_each = [(name, slice(j * size, (j + 1) * size)) for j, name in enumerate(outputs)]
        found["output"] = [[name, *covered(rows, columns=part)] for name, part in of_each]
    if "step" in rows:
        parts = np.array_split(np.unique(rows["step"]), min(evidence.N_BINS, rows["step"].max()))
        found["lead time"] = [
            [f"steps {s[0]} to {s[-1]}", *covered(rows, np.isin(rows["step"], s))] for s in parts
        ]
    shown = []
    for what, each in found.items():
        known, text = [row for row in each if row[-1]], f"Coverage by {what}"
        chart = svg.intervals(known, text, level, log=False) if known else ""
        head = f"{what}, coverage, lower end, upper end, values, independent rows"
        shown.append(_part(text, head, known, chart))
    return shown


def _maps(rows: Rows, layout: Any) -> list[Part]:
    """Coverage and mean error of each cell of a field, as means over channels and over blocks of cells."""
    counts, parts = ~np.isnan(rows["error"]), []
    total = np.where(counts.any(axis=0), counts.sum(axis=0), np.nan)
    inside = ((rows["error"] <= rows["bound"]) & counts).sum(axis=0) / total
    size = np.nansum(rows["error"], axis=0) / total
    for name, values in (("Coverage", inside), ("Mean error", size)):
        places, field = None, values.reshape(-1, *layout.cells).mean(axis=0)
        if isinstance(layout.domain, Mesh):
            few = slice(None, None, 1 + len(field) // MOST_NODES)
            places = np.pad(layout.domain.coordinates, ((0, 0), (0, 1)))[few, :2]
            field = field[few]
        else:
            field = field.reshape(-1, *(1, *field.shape)[-2:]).mean(axis=0)
            for axis in (0, 1):
                blocks = np.array_split(field, min(MOST_CELLS, field.shape[axis]), axis)
                field = np.stack([block.mean(axis) for block in blocks], axis)
        ends = np.nanquantile(field, (0, 0.5, 1))
        text = f"{name} of each cell: {ends[0]:.3g} to {ends[2]:.3g}, median {ends[1]:.3g}"
        parts.append(_part(text, chart=svg.cells(field, places, text)))
    return parts


def _worst(found: dict[str, Rows], answers: dict[str, Any], names: Any) -> list[Part]:
    """The queries whose errors are largest in units of their bounds, or that are farthest from the data, with reasons."""
    parts = []
    for label, rows in found.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(rows["error"] == 0, 0.0, rows["error"] / rows["bound"])
        measured = not np.isnan(ratio).all()
        size = np.nan_to_num(ratio, nan=-1).max(axis=1) if measured else rows["score"]
        error, bound = mean_of_each(rows["error"]), mean_of_each(rows["bound"])
        worst: dict[int, list[Any]] = {}
        for i in np.argsort(-size, kind="stable").tolist():
            group = int(rows["group"][i])
            if len(worst) < N_WORST and group not in worst:
                numbers = [bound[i], error[i], size[i]] if measured else [bound[i], size[i]]
                worst[group] = [*_why(label, rows, answers, i, names), *map(float, numbers)]
        what = "error over bound" if measured else "support score"
        head = f"query, reason, bound, {'error, ' * measured}{what}"
        parts.append(
            _part(f"{label.capitalize()} with the largest {what}", head, [*worst.values()])
        )
    return parts


def _why(label: str, rows: Rows, answers: dict[str, Any], i: int, names: Any) -> list[str]:
    """The name of a row and the reason for its answer."""
    if "step" in rows:
        group = int(rows["group"][i])
        why = answers[label].outcome(group) if label in answers else ["held out"]
        return [f"forecast {group}, step {rows['step'][i]}", "; ".join(why).split(": ", 1)[-1]]
    if label not in answers:
        far = f"{rows['distance'][i]:.2g} medians from the data"
        return [f"row {rows['point'][i]}", f"held out by {rows['family'][i]}, {far}"]
    answer = answers[label]
    why = answer.explanation(i, names)
    flagged = f"NOT safe: {why}" if why else answer.safety(i, names)
    return [str(i), why if rows["first"][i] else flagged]


def _named(text: str, names: Sequence[str] | None) -> str:
    """A description with the names of the inputs in place of their numbers."""
    if names is None:
        return text
    return re.sub(r"\binput (\d+)\b", lambda found: names[int(found[1])], text)


def _report(core: Any, about: Part, found: dict[str, Rows], answers: dict[str, Any]) -> Report:
    """All sections; the first rows are the test pairs if there are some, and else the held-out ones."""
    label, columns, level = next(iter(found), ""), about["columns"], core.quantile
    rows, tested = found.get(label, {}), label == TEST
    if label == PLANNED:
        rows = {}
    what, _, how = _named(core.describe(), about["names"]).partition(". ")
    kinds = ("safe", "not safe") if tested else about["kinds"]
    note = (
        "Errors of the test pairs."
        if tested
        else (
            f"Errors of the {label}. The bound was fitted to them, so this is no test; pass new pairs as x_test and y_test."
        )
    )
    carry = evidence.carriers(found[HELD_OUT], columns) if HELD_OUT in found and columns else []
    maps = bool(rows) and about["layout"] is not None and about["layout"].on_cells
    head = "input, fraction of the variation of the errors, errors are largest at, times the mean error there"
    intervals = f"The quantile level is {level:g}. Intervals have the level {evidence.CONFIDENCE:g}, and a row counts once."
    return {
        "What this is": [_identity(f"{what}.", core, *about["data"])],
        "The guarantee": [_part(_guarantee(core.fitted_))],
        "Five numbers": [_numbers(about, found if rows else {}, kinds)],
        "Where the data and the queries are": [
            *about["where"],
            *_ranges(columns, answers),
            *_distances(found),
        ],
        "Bound against error": [
            _scatter(rows, kinds, note) if rows else _part("No errors are stored in the file.")
        ],
        "Coverage": [_part(intervals), *(_coverage(rows, level, about["outputs"]) if rows else [])]
        + (_maps(rows, about["layout"]) if maps else []),
        "Worst queries": _worst(found, answers, about["names"]),
        "Which inputs carry the error": [
            _part(
                "The inputs by how much of the variation of the errors they explain"
                if carry
                else "This is counted for tables with held-out errors.",
                head,
                carry,
            )
        ],
        "The second opinion": [_part(about["opinion"])],
        "How the bound was calibrated": [_part(how)],
        "What is not guaranteed": [_part(text) for text in LIMITS],
    }


def of_pairs(core: Any, names: Any, outputs: Any, test: tuple[Any, Any], planned: Any) -> Report:
    """The report on a ``GeoQ``."""
    fitted, found, answers = core.fitted_, {}, {}
    if test[0] is not None:
        answers[TEST] = fitted.assess(test[0])
        found[TEST] = evidence.of_answer(fitted, answers[TEST], test[1])
    comparison, scale, tuples = None, np.ones(1), fitted.tuples
    if tuples is not None:
        found[HELD_OUT] = evidence.held_out(fitted)
        comparison = compared(tuples, outputs or fitted.output_names)
        scale = np.nanstd(flat(tuples.points.outputs), axis=0)
    if planned is not None:
        answers[PLANNED] = fitted.assess(planned)
        found[PLANNED] = evidence.of_answer(fitted, answers[PLANNED])
    opinion = "There is none: the bound does not use one, or the file was saved without its held-out errors."
    if comparison is not None:
        better = (
            "is the better model" if comparison[1] < CLEARLY else "is not clearly the better model"
        )
        opinion = f"{comparison[0]}: the second one {better}."
    n, known = fitted.layout.n_outputs(fitted.error.shape[1:]), outputs or fitted.output_names or []
    about: Part = {
        "n": len(fitted.error),
        "names": names,
        "outputs": known if len(known) == n else [f"output {j}" for j in range(n)],
        "columns": evidence.columns_of(fitted, names),
        "data": (fitted.geometry.points.inputs, fitted.error),
        "scale": np.where(scale > 0, scale, np.nan) if scale.size == fitted.error[:1].size else 1.0,
        "kinds": ("held out inside the data", "held out in clusters or shells"),
        "where": [],
        "opinion": opinion,
        "layout": fitted.layout,
    }
    return _report(core, about, found, answers)


def of_rollouts(core: Any, outputs: Any, test: tuple[Any, Any], planned: Any) -> Report:
    """The report on a ``RolloutGeoQ``; forced rollouts have pairs of initial states and forcing."""
    fitted, answers, where = core.fitted_, {}, []
    held, reference, calibration = fitted.held_out, fitted.reference, fitted.calibration
    for label, (x, y) in {TEST: test, PLANNED: (planned, None)}.items():
        if x is not None:
            start, forcing = x if isinstance(x, tuple) else (x, None)
            n_steps = held.bound.shape[1] if y is None else y.shape[1]
            answer = answers[label] = core.assess(start, n_steps, forcing=forcing)
            least, middle, most = np.quantile(numbers_of(answer.supported_horizon), (0, 0.5, 1))
            text = f"{label.capitalize()} are supported for {middle:g} of {n_steps} steps (median"
            where.append(_part(f"{text}, from {least:g} to {most:g})."))
    found = {TEST: evidence.of_forecasts(answers[TEST], test[1])} if TEST in answers else {}
    distance = None if calibration is None else calibration.features.support_distance
    found["held-out forecasts"] = evidence.of_steps(held.error, held.bound, None, distance)
    if PLANNED in answers:
        found[PLANNED] = evidence.of_forecasts(answers[PLANNED])
    n, layout = held.bound.shape[2], reference.layout
    scale = reference.coordinates.scale.reshape(-1)[: layout.n_values][layout.places]
    about: Part = {
        "n": len(reference.geometry.points),
        "names": None,
        "outputs": [] if n > N_OUTPUTS_SHOWN else outputs or [f"coordinate {j}" for j in range(n)],
        "columns": {},
        "data": (reference.geometry.points.inputs, held.error),
        "scale": scale if len(scale) == n else 1.0,
        "kinds": ("first half of the steps", "second half of the steps"),
        "where": where,
        "opinion": "Forecasts have none: members of the surrogate and of a companion are part of the bound.",
        "layout": None,
    }
    return _report(core, about, found, answers)
