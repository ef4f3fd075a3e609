"""The answer of GeoQ: the bound, the safe flag, their parts, the reason, and all queries as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from geoq.arrays import native, to_numbers
from geoq.checks import check_index, check_quantile
from geoq.core.agreement import mean_of_each
from geoq.core.conformal import levels_of
from geoq.data.table import Table, is_frame, output_names
from geoq.surrogate import ELEMENTWISE, log_error

if TYPE_CHECKING:
    from geoq.core.fitted import Fitted

N_ANCHORS_SHOWN = 5
# More rows are left out of a table in a notebook, more lines out of a text.
N_ROWS_SHOWN, N_LINES_SHOWN = 20, 5
# Errors with more numbers than this are fields, which are described by their mean.
N_OUTPUTS_SHOWN, N_INPUTS_SHOWN = 10, 6
# Half transparent, for pages with a light or a dark background.
UNSAFE = "background-color: rgba(214, 69, 36, 0.25)"
STYLE = "text-align: left; white-space: normal; min-width: 18em; max-width: 48em"
SAFE = "safe, within the region of the held-out points"
NOT_SAFE = "NOT safe, outside the region of the held-out points; the bound is a guess"


def numbers_of(part: Any) -> np.ndarray:
    """An array of an answer as numbers, with nan under a mask."""
    if isinstance(part, np.ma.MaskedArray):
        return np.ma.filled(part.astype(float), np.nan)
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)


@dataclass(frozen=True)
class SecondOpinion:
    """What a Gaussian process through the data predicts at queries, in the shape of the predictions.

    Attributes:
        prediction: its prediction.
        deviation: its standard deviation.
    """

    prediction: Float[Any, " n *output"]
    deviation: Float[Any, " n *output"]


@dataclass(frozen=True, repr=False)
class Assessment:
    """Error bounds, safe flags and their parts, one row per query, in the user's kind of array.

    Attributes:
        prediction: the prediction of the surrogate.
        error_hat: the bound, an upper estimate of its error: ``anchor_error + increment``.
        safe: whether the data support the bound: the query passes the tests that nearly all held-out points pass.
        support_score: how far outside the data a query is, by the strictest of these tests; it is safe up to 1.
        anchor_error: mean observed error of the anchors.
        increment: the bound minus the anchor error; it can be negative.
        anchors: rows of the data that serve as anchors, the nearest first.
        anchor_distance: distances to the anchors in representation space.
        displacement: mean displacement from the anchors.
        support_distance: mean distance to the nearest points.
        lost: the queries without an answer, for example because an input is nan. They are not safe, their numbers are nan and
            their anchors -1.
        asked: the queries.
        fitted: the calibration that gave the answer.
    """

    prediction: Float[Any, " n *output"]
    error_hat: Float[Any, " n *field"]
    safe: Bool[Any, " n"]
    support_score: Float[Any, " n"]
    anchor_error: Float[Any, " n *field"]
    increment: Float[Any, " n *field"]
    anchors: Int[Any, " n n_anchors"]
    anchor_distance: Float[Any, " n n_anchors"]
    displacement: Float[Any, " n *z"]
    support_distance: Float[Any, " n"]
    lost: Bool[np.ndarray, " n"]
    asked: Any
    fitted: "Fitted" = field(compare=False)

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        n = len(self)
        lines = [f"  query {i}: {self._line(i)}" for i in range(min(n, N_LINES_SHOWN))]
        more = [f"  ... {n - N_LINES_SHOWN} more"] if n > N_LINES_SHOWN else []
        return "\n".join([self._title, *lines, *more])

    def _repr_html_(self) -> str:
        shown, answers = range(min(len(self), N_ROWS_SHOWN)), self._columns({})
        index: Any = getattr(native(self.asked), "index", None)
        labels = index if hasattr(index, "__getitem__") else shown
        why = [self.explanation(i) or self.safety(i).removeprefix("NOT safe, ") for i in shown]
        columns = [("", labels), *self._inputs()]
        columns += [(name.replace("error_hat", "bound"), part) for name, part in answers.items()]
        head = "".join(f"<th>{escape(name)}</th>" for name, _ in [*columns, ("reason", why)])
        rows = []
        for i in shown:
            cells = "".join(f"<td>{escape(_text(values[i]))}</td>" for _, values in columns)
            style = "" if self.safe[i] else f" style='{UNSAFE}'"
            rows.append(f"<tr{style}>{cells}<td style='{STYLE}'>{escape(why[i])}</td></tr>")
        more = f"; {len(self) - len(shown)} more are not shown" if len(self) > len(shown) else ""
        title = f"{self._title}. The quantile level of the bounds is {self.quantile:g}{more}"
        return (
            f"<table><caption>{escape(title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def _inputs(self) -> list[tuple[str, Any]]:
        """The first columns of the queries, with names and units; none for fields."""
        rows = self.asked[:N_ROWS_SHOWN]
        names = output_names(rows) or [f"input {j}" for j in range(N_INPUTS_SHOWN)]
        if isinstance(rows, Table):
            columns = [rows.native[name].to_list() for name in rows.native.columns]
        else:
            columns = [*to_numbers(rows, "x").T] if len(rows.shape) == 2 else []
        found = [*zip(names, columns[:N_INPUTS_SHOWN], strict=False)]
        return found + [("...", ["..."] * len(rows))] * (len(columns) > len(found))

    @property
    def _title(self) -> str:
        n, n_lost = len(self), int(self.lost.sum())
        without = f" and {n_lost} without an answer" if n_lost else ""
        noun = "query" if n == 1 else "queries"
        return f"Assessment of {n} {noun}, {int(self.safe.sum())} of them safe{without}; reason(i) explains query i"

    def _line(self, query: int) -> str:
        """One query in one line: its prediction, its bound and its flag."""
        flag = "safe" if self.safe[query] else "NOT safe"
        if self.lost[query]:
            return f"no error bound, {flag}"
        parts = []
        predictions = self.outputs_of(self.prediction)
        if len(predictions) == 1 and predictions[0][0] != "mean":
            parts.append(f"prediction {predictions[0][1][query]:.4g}")
        for output, bound in self.outputs_of(self.error_hat):
            of = f" of {output}" if output not in ("", "mean") else ""
            mean = "mean " if output == "mean" else ""
            parts.append(f"{mean}error bound{of} {bound[query]:.3g}")
        return ", ".join([*parts, flag])

    def outputs_of(self, part: Any) -> list[tuple[str, np.ndarray]]:
        """The outputs of a part of the answer with their names; the name is empty for one output, and "mean" for a field."""
        values = numbers_of(part).reshape(len(part), -1)
        n = values.shape[1]
        if n == 1:
            return [("", values[:, 0])]
        if n > N_OUTPUTS_SHOWN or len(part.shape) > 2:
            return [("mean", mean_of_each(values))]
        outputs = zip(self._names_of(n, None), values.T, strict=True)
        return [pair for pair in outputs if not len(pair[1]) or not np.isnan(pair[1]).all()]

    def _intervals(self, levels: Sequence[float]) -> dict[str, Any]:
        """The ends of the intervals at the level of the estimator and at others, by name; none if there are no intervals of numbers."""
        shape, found = tuple(self.prediction.shape[1:]), dict[str, Any]()
        if not self._has_intervals or len(shape) > 1 or sum(shape) > N_OUTPUTS_SHOWN:
            return found
        for level in (None, *levels_of(levels)):
            at = "" if level is None else f" {level:g}"
            found |= zip((f"lower{at}", f"upper{at}"), self.interval(level), strict=True)
        return found

    def _columns(self, intervals: dict[str, Any]) -> dict[str, np.ndarray]:
        """The columns of the table: predictions, bounds, intervals, flags and support scores."""
        parts = {"prediction": self.prediction, "error_hat": self.error_hat} | intervals
        found = {
            f"{name} {output}".rstrip(): values
            for name, part in parts.items()
            for output, values in self.outputs_of(part)
        }
        return found | {name: numbers_of(getattr(self, name)) for name in ("safe", "support_score")}

    @property
    def quantile(self) -> float:
        """The quantile level of the bounds."""
        return self.fitted.quantile

    @property
    def bound(self) -> Float[Any, " n *field"]:
        """The bound, another name of ``error_hat``."""
        return self.error_hat

    @property
    def lower(self) -> Float[Any, " n *output"]:
        """Lower ends of the intervals, see ``interval``."""
        return self.interval()[0]

    @property
    def upper(self) -> Float[Any, " n *output"]:
        """Upper ends of the intervals, see ``interval``."""
        return self.interval()[1]

    def interval(self, quantile: float | None = None) -> tuple[Any, Any]:
        """The lower and the upper ends of the intervals that contain the reference outputs with this probability.

        They are the prediction minus and plus the bound, within the ``limits`` of the outputs. For safe queries the two sides differ
        if the largest held-out errors of a table have clearly one sign, unless ``conformalize`` was called. With ``log_error``
        they are the prediction divided by a factor and multiplied by it.

        Args:
            quantile: the level of the bound; None means the level of the estimator.

        Returns:
            Two arrays in the shape of the predictions.
        """
        level = self.quantile if quantile is None else quantile
        check_quantile(level, "quantile")
        if not self._has_intervals:
            raise TypeError(
                "the bounds are not of single outputs in their unit, so there is no interval of each output; use error_functional=absolute_error."
            )
        bound = self.error_hat
        if level != self.quantile:
            (bound,) = self.fitted.bounds(native(self.asked), (level,)).values()
        return self.fitted.interval(self.prediction, bound, self.safe, level)

    @property
    def _has_intervals(self) -> bool:
        """Whether each bound is one of the difference of a prediction, or of its logarithm."""
        same = tuple(self.prediction.shape) == tuple(self.error_hat.shape)
        return same and self.fitted.error_functional in ELEMENTWISE

    @property
    def output_names(self) -> Sequence[str] | None:
        """The names of the outputs, if y was a data frame or a Series with a name."""
        return self.fitted.output_names

    @property
    def second_opinion(self) -> SecondOpinion:
        """What a Gaussian process through the same data predicts, with its standard deviation; the surrogate is asked again.

        Raises:
            TypeError: the bound does without the process, as the bound of fields does.
        """
        return self.fitted.second_opinion(native(self.asked))

    def to_frame(self, levels: Sequence[float] = ()) -> Any:
        """The predictions, bounds, intervals, flags and support scores as a data frame, one row per query.

        For each of the ``levels`` there are the ends of its interval as well. The data frame has the library and the index of the
        queries; for arrays it is of pandas, or of polars if pandas is not installed. Several outputs have a column each; a field has its mean.

        Example:
            >>> from geoq import GeoQ, RandomFolds
            >>> x = np.linspace(0, 1, 60)[:, None]
            >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, np.sin(x[:, 0]))
            >>> list(estimator.assess(x[:2]).to_frame().columns)
            ['prediction', 'error_hat', 'lower', 'upper', 'safe', 'support_score']
        """
        columns, asked = self._columns(self._intervals(levels)), native(self.asked)
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
            'to_frame needs pandas or polars; pip install "geoq[tables]", or use the arrays of the assessment.'
        )

    def safety(self, query: int, names: Sequence[str] | None = None) -> str:
        """Whether a query is safe, and why, as a phrase."""
        query = check_index(query, "query", len(self))
        if self.lost[query]:
            return f"NOT safe, {self.fitted.why_lost(self.asked, query, names)}"
        return SAFE if self.safe[query] else NOT_SAFE

    def explanation(self, query: int, names: Sequence[str] | None = None) -> str:
        """The inputs or the cells behind the flag of a query; empty for a query without an answer."""
        query = check_index(query, "query", len(self))
        return "" if self.lost[query] else self.fitted.explain(self, query, names)

    def support_map(self, query: int) -> Float[np.ndarray, " *cells"]:
        """Where a field differs from the data: a support score at each cell, from the windows around it; the flag uses their mean.

        The windows contain the input, or input and prediction if their score is larger. A field can also be unsafe as a
        whole, because of a mean or a large pattern; ``explanation`` states it.

        Raises:
            TypeError: the query is no field or has no answer, or the safe region compares no windows.
        """
        query = check_index(query, "query", len(self))
        find = getattr(self.fitted.region, "support_map", lambda _: None)
        found = None if self.lost[query] else find(self.fitted.seen_again(self, query))
        if found is None:
            raise TypeError(
                "support_map needs inputs that are fields on the cells of the output, and a query with an answer; see reason(query)."
            )
        return found

    def reason(
        self,
        query: int,
        *,
        name: str | None = None,
        labels: Any = None,
        names: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> str:
        """Explain the bound and the flag of one query in words and numbers.

        Up to ten outputs are listed one by one, because they can have different units. A field is described by its mean.

        Args:
            query: the number of the query.
            name: a name for the query in the text; its number if None.
            labels: a label per row of the data, to name the anchors: a list, an array or an index; their row numbers if None.
            names: names of the inputs; the columns of the table or their numbers if None.
            outputs: names of the outputs, with units if you like; the columns of y or their numbers if None.

        Returns:
            A few lines of text.
        """
        safety = self.safety(query, names)
        name, query = name or f"query {query}", query % len(self)
        if self.lost[query]:
            return f"{name}: no error bound, {safety}"
        first, *parts = self._bound_lines(query, outputs)
        why, distance = self.explanation(query, names), float(self.support_distance[query])
        lines = [
            f"{name}: {first}, {safety}",
            *([f"  {why}"] if why else []),
            *parts,
            *self._anchor_lines(query, labels),
            *self._repeat_lines(query, outputs),
            f"  support distance {distance:.3g}, {_times(distance, self.fitted.typical.support_distance)}",
            f"  support score {float(self.support_score[query]):.3g}, safe up to 1",
        ]
        return "\n".join(lines)

    def _bound_lines(self, query: int, outputs: Sequence[str] | None) -> list[str]:
        """The bound and its parts, for each output or as the mean over a field."""
        bound, anchor_error, increment = (
            numbers_of(part[query]).reshape(-1)
            for part in (self.error_hat, self.anchor_error, self.increment)
        )
        answer = np.asarray(self.prediction[query]).reshape(-1)
        of_logarithm = self.fitted.error_functional is log_error
        factors = ", with conformal factors" if self.fitted.conformal.n_pairs else ""
        level = f" (quantile level {self.quantile:g}{', of the logarithm' * of_logarithm}{factors})"
        if not self._is_list:
            mean = "mean " if len(bound) > 1 else ""
            one = self._names_of(1, outputs)[0] if not mean and outputs else ""
            of = f" of {one}" if one else ""
            prediction = f"prediction {answer[0]:.4g}, " if len(answer) == 1 else ""
            first = f"{prediction}{mean}error bound{of} {np.nanmean(bound):.3g}{level}"
            if not getattr(self.fitted.bound, "uses_anchor_error", True):
                return [first]
            return [
                first,
                f"  the bound is the anchor error {np.nanmean(anchor_error):.3g} + the increment {np.nanmean(increment):.3g}",
            ]
        names = self._names_of(len(bound), outputs)
        each = len(answer) == len(bound)
        lines = [
            f"  {output}: {f'prediction {answer[j]:.4g}, ' if each else ''}error bound {bound[j]:.3g} = anchor error "
            f"{anchor_error[j]:.3g} + increment {increment[j]:.3g}"
            for j, output in enumerate(names)
            if not np.isnan(bound[j])  # a masked output
        ]
        return [f"error bounds of {len(lines)} outputs{level}", *lines]

    @property
    def _is_list(self) -> bool:
        """Whether an error is a short list of outputs, which can have different units, and not a number or a field."""
        shape = tuple(self.error_hat.shape[1:])
        return len(shape) == 1 and 1 < shape[0] <= N_OUTPUTS_SHOWN

    def _names_of(self, n: int, outputs: Sequence[str] | None) -> Sequence[str]:
        known = self.output_names if outputs is None else outputs
        if outputs is not None and len(outputs) != n:
            raise ValueError(
                f"outputs has {len(outputs)} entries, but an error has {n}; pass one name per output."
            )
        return known if known is not None and len(known) == n else [f"output {i}" for i in range(n)]

    def _repeat_lines(self, query: int, outputs: Sequence[str] | None) -> list[str]:
        """The spread of the measurements at the nearest anchor, if it is repeated."""
        repeats = self.fitted.repeats
        row = int(self.anchors[query][0])
        if repeats is None or repeats.count[row] < 2:
            return []
        spread = repeats.spread[row].reshape(-1)
        if len(spread) > N_OUTPUTS_SHOWN:
            return []
        text = f"{spread[0]:.3g}"
        if len(spread) > 1:
            pairs = zip(spread, self._names_of(len(spread), outputs), strict=True)
            text = ", ".join(f"{value:.3g} ({output})" for value, output in pairs)
        return [
            f"  {repeats.count[row]} rows of the data have the inputs of this anchor; the standard deviation of their outputs is {text}"
        ]

    def _anchor_lines(self, query: int, labels: Any) -> list[str]:
        mean = "mean " if np.asarray(self.error_hat[query]).size > 1 else ""
        rows, distances = (np.asarray(p[query]) for p in (self.anchors, self.anchor_distance))
        # The error of a single anchor is the anchor error, which is given before.
        no_error = self._is_list or len(rows) == 1
        lines = []
        for row, distance in zip(rows.tolist(), distances.tolist(), strict=True):
            of = f"row {row}" if labels is None else labels[row]
            error = self.fitted.error_size[row]
            observed = "" if no_error else f"observed {mean}error {error:.3g}, "
            compared = _times(distance, self.fitted.typical.distance)
            lines.append(f"  anchor {of}: {observed}distance {distance:.3g}, {compared}")
        n_more = len(lines) - N_ANCHORS_SHOWN
        more = [f"  and {n_more} more anchors"] if n_more > 0 else []
        return lines[:N_ANCHORS_SHOWN] + more


def _times(value: float, typical: float) -> str:
    """A value in units of the median over the calibration."""
    if not typical > 0:
        return "the calibration median is 0"
    return f"{value / typical:.2g} times the calibration median"


def _text(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return str(value).removesuffix(" 00:00:00")
