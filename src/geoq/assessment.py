"""The answer of GeoQ: the bound, the safe flag, their parts, and the reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int

from geoq.answer_table import N_OUTPUTS_SHOWN, frame_of, html_of, text_of
from geoq.arrays import Array
from geoq.checks import check_index
from geoq.regions.safe_region import Explanations
from geoq.repeats import Repeats
from geoq.table import Names
from geoq.unanswered import Gaps

N_ANCHORS_SHOWN = 5


@runtime_checkable
class Labels(Protocol):
    """One label per row: a list, an array, or an index of pandas."""

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True)
class QueryFeatures:
    """The features psi of the queries in the user's kind of array; inside geoq, ``GeometricFeatures`` holds tensors."""

    displacement: Float[Array, " n *z"]
    support_distance: Float[Array, " n"]


@dataclass(frozen=True, repr=False)
class Assessment:
    """Error bounds, safe flags and their parts, one row per query, in the user's kind of array.

    Attributes:
        prediction: the prediction of the surrogate.
        error_hat: upper estimate of its error, ``anchor_error + increment``.
        safe: whether the calibration supports the bound; ``meaning`` explains in which sense.
        support_score: a measure of the distance to the calibration; a query is safe if it is at most ``threshold``.
        anchor_error: mean observed error of the anchors.
        increment: learned correction for the displacement from the anchors to the query.
        anchors: rows of the data that serve as anchors, the nearest first.
        anchor_distance: distances to the anchors in representation space.
        observed_error: observed errors of the anchors, averaged over the field if the error is a field.
        features: the features psi of the queries.
        threshold: largest support score that counts as safe.
        meaning: why a query is safe, and why it is not.
        typical_distance: median length of the calibration displacements, for comparison with ``anchor_distance``.
        typical_support_distance: median support distance of the calibration.
        explanations: the reasons for the flags, if the safe region gives any.
        gaps: the queries without an answer, for example because an input is nan. They are not safe, their numbers are nan and
            their anchors -1. None if all queries have an answer.
        input_names: the columns of the table that GeoQ was fitted on; None for arrays.
        output_names: the names of the outputs, if y was a data frame or a Series with a name.
        repeats: repeated measurements in the data; None if all inputs differ.
        quantile: the quantile level of the bounds.
        asked: the data frame of the queries; None for arrays.
    """

    prediction: Float[Array, " n *output"]
    error_hat: Float[Array, " n *field"]
    safe: Bool[Array, " n"]
    support_score: Float[Array, " n"]
    anchor_error: Float[Array, " n *field"]
    increment: Float[Array, " n *field"]
    anchors: Int[Array, " n n_anchors"]
    anchor_distance: Float[Array, " n n_anchors"]
    observed_error: Float[Array, " n n_anchors"]
    features: QueryFeatures
    threshold: float
    meaning: tuple[str, str]
    typical_distance: float
    typical_support_distance: float
    explanations: Explanations | None = None
    gaps: Gaps | None = None
    input_names: Names | None = None
    output_names: Sequence[str] | None = None
    repeats: Repeats | None = None
    quantile: float | None = None
    asked: Any = None

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    def to_frame(self) -> Any:
        """The predictions, bounds, flags and support scores as a data frame, one row per query.

        The data frame is of the library of the queries and has their index. For queries in arrays it is of pandas, or of polars
        if pandas is not installed. Several outputs have a column each; a field has its mean.

        Example:
            >>> import numpy as np
            >>> from geoq import GeoQ, RandomFolds
            >>> x = np.linspace(0, 1, 60)[:, None]
            >>> geoq = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, np.sin(x[:, 0]))
            >>> list(geoq.assess(x[:2]).to_frame().columns)
            ['prediction', 'error_hat', 'safe', 'support_score']
        """
        return frame_of(self)

    def safety(self, query: int, names: Sequence[str] | None = None) -> str:
        """Whether a query is safe, and why, as a phrase."""
        check_index(query, "query", len(self))
        if self.gaps is not None and query % len(self) in self.gaps:
            known = self.input_names if names is None else names
            return f"NOT safe, {self.gaps.explain(query % len(self), known)}"
        safe, not_safe = self.meaning
        return f"safe, {safe}" if self.safe[query] else f"NOT safe, {not_safe}"

    def reason(
        self,
        query: int,
        *,
        name: str | None = None,
        labels: Labels | None = None,
        names: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> str:
        """Explain the bound and the flag of one query in words and numbers.

        Up to ten outputs are listed one by one, because they can have different units. A field is described by its mean.

        Args:
            query: the number of the query.
            name: a name for the query in the text; its number if None.
            labels: labels of the rows of the data, to name the anchors; their row numbers if None.
            names: names of the inputs; the columns of the table or their numbers if None.
            outputs: names of the outputs, with units if you like; the columns of y or their numbers if None.
        """
        safety = self.safety(query, names)
        name, query = name or f"query {query}", query % len(self)
        if self.gaps is not None and query in self.gaps:
            return f"{name}: no error bound, {safety}"
        first, *parts = self._bound_lines(query, outputs)
        lines = [
            f"{name}: {first}, {safety}",
            *parts,
            *self._anchor_lines(query, labels),
            *self._repeat_lines(query, outputs),
            *self._support_lines(query),
        ]
        why = self.explanations(query, names) if self.explanations else ""
        if why:
            lines.insert(1, f"  {why}")
        return "\n".join(lines)

    def _bound_lines(self, query: int, outputs: Sequence[str] | None) -> list[str]:
        """The bound and its parts, for each output or as the mean over a field."""
        parts = [
            part[query].reshape(-1)
            for part in (self.error_hat, self.anchor_error, self.increment)
        ]
        answer = self.prediction[query].reshape(-1).tolist()
        if not self._is_list:
            bound, anchor_error, increment = (float(part.mean()) for part in parts)
            mean = "mean " if len(parts[0]) > 1 else ""
            one = self._output_names(1, outputs)[0] if not mean and outputs else ""
            of = f" of {one}" if one else ""
            prediction = f"prediction {answer[0]:.4g}, " if len(answer) == 1 else ""
            return [
                f"{prediction}{mean}error bound{of} {bound:.3g}{self._level}",
                f"  the bound is the anchor error {anchor_error:.3g} + the increment {increment:.3g}",
            ]
        names = self._output_names(len(parts[0]), outputs)
        predictions = (
            [None if v is None else f"prediction {v:.4g}, " for v in answer]
            if len(answer) == len(names)
            else [""] * len(names)
        )
        lines = [
            f"  {output}: {prediction}error bound {bound:.3g} = anchor error {anchor_error:.3g} + increment {increment:.3g}"
            for output, prediction, bound, anchor_error, increment in zip(
                names, predictions, *(part.tolist() for part in parts), strict=True
            )
            if bound is not None  # a masked output
        ]
        return [f"error bounds of {len(lines)} outputs{self._level}", *lines]

    @property
    def _level(self) -> str:
        """The quantile level as a note."""
        return "" if self.quantile is None else f" (quantile level {self.quantile:g})"

    def _support_lines(self, query: int) -> list[str]:
        """The support distance and the support score, in one line if they are equal."""
        distance = float(self.features.support_distance[query])
        score = float(self.support_score[query])
        compared = f"  support distance {distance:.3g}, {_times(distance, self.typical_support_distance)}"
        threshold = f"threshold {self.threshold:.3g}"
        if score == distance:
            return [f"{compared}, {threshold}"]
        return [compared, f"  support score {score:.3g}, {threshold}"]

    @property
    def _is_list(self) -> bool:
        """Whether an error is a short list of outputs, which can have different units, and not a number or a field."""
        shape = tuple(self.error_hat.shape[1:])
        return len(shape) == 1 and 1 < shape[0] <= N_OUTPUTS_SHOWN

    def _output_names(self, n: int, outputs: Sequence[str] | None) -> Sequence[str]:
        known = self.output_names if outputs is None else outputs
        if outputs is not None and len(outputs) != n:
            raise ValueError(
                f"outputs has {len(outputs)} entries, but an error has {n}; pass one name per output."
            )
        if known is None or len(known) != n:
            return [f"output {i}" for i in range(n)]
        return [known[i] for i in range(n)]

    def _repeat_lines(self, query: int, outputs: Sequence[str] | None) -> list[str]:
        """The spread of the measurements at the nearest anchor, if it is repeated."""
        row = int(self.anchors[query][0])
        if self.repeats is None or int(self.repeats.count[row]) < 2:
            return []
        spread = self.repeats.spread[row].reshape(-1).tolist()
        text = f"{spread[0]:.3g}"
        if len(spread) > 1:
            if len(spread) > N_OUTPUTS_SHOWN:
                return []
            names = self._output_names(len(spread), outputs)
            pairs = zip(names, spread, strict=True)
            text = ", ".join(f"{value:.3g} ({output})" for output, value in pairs)
        n = int(self.repeats.count[row])
        return [
            f"  {n} rows of the data have the inputs of this anchor; the standard deviation of their outputs is {text}"
        ]

    def _anchor_lines(self, query: int, labels: Labels | None) -> list[str]:
        mean = "mean " if len(self.error_hat[query].reshape(-1)) > 1 else ""
        # The error of a single anchor is the anchor error, which is given before.
        no_error = self._is_list or len(self.anchors[query]) == 1
        lines = [
            f"  anchor {f'row {int(row)}' if labels is None else labels[int(row)]}: "
            + ("" if no_error else f"observed {mean}error {float(error):.3g}, ")
            + f"distance {float(distance):.3g}, {_times(float(distance), self.typical_distance)}"
            for row, distance, error in zip(
                self.anchors[query],
                self.anchor_distance[query],
                self.observed_error[query],
                strict=True,
            )
        ]
        n_more = len(lines) - N_ANCHORS_SHOWN
        more = [f"  and {n_more} more anchors"] if n_more > 0 else []
        return lines[:N_ANCHORS_SHOWN] + more


def _times(value: float, typical: float) -> str:
    if not typical > 0:
        return "the calibration median is 0"
    return f"{value / typical:.2g} times the calibration median"
