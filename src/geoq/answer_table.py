"""The answers of an assessment as a table: a data frame, a table in a notebook, or a line of text per query."""

from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geoq.table import is_frame

if TYPE_CHECKING:
    from geoq.assessment import Assessment

# More rows are left out of a table in a notebook, more lines out of a text.
N_ROWS_SHOWN = 20
N_LINES_SHOWN = 5
# Errors with more numbers than this are fields, which are described by their mean.
N_OUTPUTS_SHOWN = 10
STYLE = "text-align: left; white-space: normal; max-width: 48em"


def outputs_named(assessment: "Assessment", part: Any) -> list[tuple[str, np.ndarray]]:
    """The outputs of a part of the answer with their names; the name is empty for one output, and "mean" for a field."""
    is_masked = isinstance(part, np.ma.MaskedArray)
    values = part if is_masked else torch.as_tensor(part).detach().cpu().numpy()
    values = values.reshape(len(values), -1)
    n = values.shape[1]
    if n == 1:
        return [("", values[:, 0])]
    if n > N_OUTPUTS_SHOWN or len(part.shape) > 2:
        # A tensor has nan in the masked cells.
        mean = np.ma.masked_invalid(values).mean(axis=1)
        return [("mean", np.ma.filled(mean, np.nan))]
    known = assessment.output_names
    if known is None or len(known) != n:
        known = [f"output {i}" for i in range(n)]
    outputs = zip(known, values.T, strict=True)
    return [pair for pair in outputs if not np.ma.getmaskarray(pair[1]).all()]


def columns_of(assessment: "Assessment") -> dict[str, np.ndarray]:
    """The columns of the table: predictions, bounds, flags and support scores."""

    def columns(name: str, part: Any) -> dict[str, np.ndarray]:
        named = outputs_named(assessment, part)
        return {f"{name} {output}".rstrip(): values for output, values in named}

    def numbers(part: Any) -> np.ndarray:
        array: np.ndarray = torch.as_tensor(part).detach().cpu().numpy()
        return array

    return {
        **columns("prediction", assessment.prediction),
        **columns("error_hat", assessment.error_hat),
        "safe": numbers(assessment.safe),
        "support_score": numbers(assessment.support_score),
    }


def frame_of(assessment: "Assessment") -> Any:
    """A data frame of the library of the queries, with their index; of pandas or polars if the queries were arrays."""
    columns = columns_of(assessment)
    asked = assessment.asked
    if is_frame(asked) and not hasattr(asked, "iloc"):
        return type(asked)(columns)
    for library in ("pandas", "polars"):
        try:
            frames = import_module(library)
        except ImportError:
            continue
        frame = frames.DataFrame(columns)
        return frame if asked is None else frame.set_index(asked.index)
    raise ImportError(
        "to_frame needs pandas or polars; install one of them, or use the arrays of the assessment."
    )


def line_of(assessment: "Assessment", query: int) -> str:
    """One query in one line: its prediction, its bound and its flag."""
    parts = []
    for output, bound in outputs_named(assessment, assessment.error_hat):
        of = f" of {output}" if output not in ("", "mean") else ""
        mean = "mean " if output == "mean" else ""
        parts.append(f"{mean}error bound{of} {bound[query]:.3g}")
    predictions = outputs_named(assessment, assessment.prediction)
    if len(predictions) == 1 and predictions[0][0] != "mean":
        parts.insert(0, f"prediction {predictions[0][1][query]:.4g}")
    flag = "safe" if assessment.safe[query] else "NOT safe"
    if assessment.gaps is not None and query in assessment.gaps:
        parts = ["no error bound"]
    return ", ".join([*parts, flag])


def text_of(assessment: "Assessment") -> str:
    """A title, and a line for each query; the first ones of many queries."""
    n = len(assessment)
    lines = [
        f"  query {query}: {line_of(assessment, query)}"
        for query in range(min(n, N_LINES_SHOWN))
    ]
    more = [f"  ... {n - N_LINES_SHOWN} more"] if n > N_LINES_SHOWN else []
    return "\n".join([title_of(assessment), *lines, *more])


def title_of(assessment: "Assessment") -> str:
    """How many queries there are, and how many of them are safe."""
    gaps = assessment.gaps
    without = "" if gaps is None else f" and {len(gaps)} without an answer"
    n, n_safe = len(assessment), int(assessment.safe.sum())
    noun = "query" if n == 1 else "queries"
    return f"Assessment of {n} {noun}, {n_safe} of them safe{without}; reason(i) explains query i"


def html_of(assessment: "Assessment") -> str:
    """A table for notebooks: a row per query with the short reason of its flag; many queries are shortened."""
    columns = columns_of(assessment)
    n = len(assessment)
    labels = _labels(assessment.asked, n)
    shown = range(min(n, N_ROWS_SHOWN))
    rows = [
        [labels[i], *(_cell(c[i]) for c in columns.values()), _why(assessment, i)]
        for i in shown
    ]
    if n > N_ROWS_SHOWN:
        rows.append(["\N{HORIZONTAL ELLIPSIS}"] * len(rows[0]))
    head = "".join(f"<th>{escape(str(name))}</th>" for name in ["", *columns, "reason"])
    body = "".join(
        "<tr>"
        + f"<th>{escape(first)}</th>"
        + "".join(f"<td>{escape(text)}</td>" for text in cells)
        + f'<td style="{STYLE}">{escape(why)}</td></tr>'
        for first, *cells, why in rows
    )
    level = assessment.quantile
    at = "" if level is None else f". The quantile level of the bounds is {level:g}"
    return (
        f"<table><caption>{escape(title_of(assessment) + at)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _labels(asked: Any, n: int) -> list[str]:
    index = getattr(asked, "index", None)
    shown = range(min(n, N_ROWS_SHOWN))
    if is_frame(asked) and index is not None:
        return [str(index[i]) for i in shown]
    return [str(i) for i in shown]


def _cell(value: Any) -> str:
    return str(bool(value)) if isinstance(value, np.bool_) else f"{value:.4g}"


def _why(assessment: "Assessment", query: int) -> str:
    """The inputs behind the flag, or the meaning of the flag."""
    if assessment.gaps is None or query not in assessment.gaps:
        why = assessment.explanations and assessment.explanations(
            query, assessment.input_names
        )
        if why:
            return why
    return assessment.safety(query).removeprefix("NOT ").removeprefix("safe, ")
