"""The answers of an assessment as a table: a data frame, a table in a notebook, or a line of text per query."""

from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from geoq.data.table import is_frame

if TYPE_CHECKING:
    from geoq.core.assessment import Assessment

# More rows are left out of a table in a notebook, more lines out of a text.
N_ROWS_SHOWN = 20
N_LINES_SHOWN = 5
# Errors with more numbers than this are fields, which are described by their mean.
N_OUTPUTS_SHOWN = 10
STYLE = "text-align: left; white-space: normal; max-width: 48em"


def numbers_of(part: Any) -> np.ndarray:
    """An array of an answer as numbers, with nan under a mask."""
    if isinstance(part, np.ma.MaskedArray):
        return np.ma.filled(part.astype(float), np.nan)
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)


def outputs_named(assessment: "Assessment", part: Any) -> list[tuple[str, np.ndarray]]:
    """The outputs of a part of the answer with their names; the name is empty for one output, and "mean" for a field."""
    values = numbers_of(part).reshape(len(part), -1)
    n = values.shape[1]
    if n == 1:
        return [("", values[:, 0])]
    if n > N_OUTPUTS_SHOWN or len(part.shape) > 2:
        present = ~np.isnan(values)
        total = np.where(present, values, 0).sum(axis=1)
        count = present.sum(axis=1)
        mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return [("mean", mean)]
    known = assessment.output_names
    if known is None or len(known) != n:
        known = [f"output {i}" for i in range(n)]
    outputs = zip(known, values.T, strict=True)
    return [pair for pair in outputs if not len(pair[1]) or not np.isnan(pair[1]).all()]


def columns_of(assessment: "Assessment") -> dict[str, np.ndarray]:
    """The columns of the table: predictions, bounds, flags and support scores."""

    def columns(name: str, part: Any) -> dict[str, np.ndarray]:
        named = outputs_named(assessment, part)
        return {f"{name} {output}".rstrip(): values for output, values in named}

    return {
        **columns("prediction", assessment.prediction),
        **columns("error_hat", assessment.error_hat),
        "safe": numbers_of(assessment.safe),
        "support_score": numbers_of(assessment.support_score),
    }


def frame_of(assessment: "Assessment") -> Any:
    """A data frame of the library of the queries, with their index; of pandas or polars if the queries were arrays."""
    columns, asked = columns_of(assessment), assessment.frame
    if is_frame(asked) and not hasattr(asked, "iloc"):
        return type(asked)(columns)
    for library in ("pandas", "polars"):
        try:
            frames = import_module(library)
        except ImportError:
            continue
        frame = frames.DataFrame(columns)
        return frame.set_index(asked.index) if is_frame(asked) else frame
    raise ImportError(
        "to_frame needs pandas or polars; install one of them, or use the arrays of the assessment."
    )


def line_of(assessment: "Assessment", query: int) -> str:
    """One query in one line: its prediction, its bound and its flag."""
    flag = "safe" if assessment.safe[query] else "NOT safe"
    if assessment.lost[query]:
        return f"no error bound, {flag}"
    parts = []
    predictions = outputs_named(assessment, assessment.prediction)
    if len(predictions) == 1 and predictions[0][0] != "mean":
        parts.append(f"prediction {predictions[0][1][query]:.4g}")
    for output, bound in outputs_named(assessment, assessment.error_hat):
        of = f" of {output}" if output not in ("", "mean") else ""
        mean = "mean " if output == "mean" else ""
        parts.append(f"{mean}error bound{of} {bound[query]:.3g}")
    return ", ".join([*parts, flag])


def text_of(assessment: "Assessment") -> str:
    """A title, and a line for each query; the first ones of many queries."""
    n = len(assessment)
    lines = [
        f"  query {query}: {line_of(assessment, query)}" for query in range(min(n, N_LINES_SHOWN))
    ]
    more = [f"  ... {n - N_LINES_SHOWN} more"] if n > N_LINES_SHOWN else []
    return "\n".join([title_of(assessment), *lines, *more])


def title_of(assessment: "Assessment") -> str:
    """How many queries there are, and how many of them are safe."""
    n, n_safe = len(assessment), int(assessment.safe.sum())
    n_lost = int(assessment.lost.sum())
    without = f" and {n_lost} without an answer" if n_lost else ""
    noun = "query" if n == 1 else "queries"
    return f"Assessment of {n} {noun}, {n_safe} of them safe{without}; reason(i) explains query i"


def html_of(assessment: "Assessment") -> str:
    """A table for notebooks: a row per query with its numbers, its flag and the reason; the first ones of many queries."""
    columns = columns_of(assessment)
    n = len(assessment)
    names = ["", *columns, "reason"]
    head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    index: Any = getattr(assessment.frame, "index", None)
    rows = []
    for query in range(min(n, N_ROWS_SHOWN)):
        label = str(index[query]) if hasattr(index, "__getitem__") else str(query)
        why = assessment.explanation(query, None) or assessment.safety(query)
        why = why.removeprefix("NOT safe, ").removeprefix("safe, ")
        cells = [_cell(values[query]) for values in columns.values()]
        texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(
            f"<tr><th>{escape(label)}</th>{texts}<td style='{STYLE}'>{escape(why)}</td></tr>"
        )
    if n > N_ROWS_SHOWN:
        rows.append(f"<tr><td colspan='{len(names)}'>... {n - N_ROWS_SHOWN} more</td></tr>")
    title = f"{title_of(assessment)}. The quantile level of the bounds is {assessment.quantile:g}"
    return (
        f"<table><caption>{escape(title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(value: Any) -> str:
    return str(bool(value)) if isinstance(value, np.bool_) else f"{value:.4g}"
