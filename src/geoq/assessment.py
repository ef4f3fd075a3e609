"""What GeoQ answers: the bound, the flag, their parts, and the reason."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int

from geoq.surrogate import Array

N_ANCHORS_TOLD = 5


def check_asked(number: int, name: str, n: int) -> None:
    """Refuse the number of a query, or of a rollout, that was not assessed."""
    if not -n <= number < n:
        raise IndexError(
            f"{name}={number}, but {n} were assessed; choose 0 to {n - 1}."
        )


@dataclass(frozen=True)
class QueryFeatures:
    """psi of the queries in the user's kind of array; inside, ``GeometricFeatures`` are tensors."""

    displacement: Float[Array, " n *z"]
    support_distance: Float[Array, " n"]


@dataclass(frozen=True, repr=False)
class Assessment:
    """What GeoQ says of each query, in the user's kind of array.

    Attributes:
        prediction: the surrogate's answer.
        error_hat: upper estimate of its error, ``anchor_error + increment``.
        safe: whether the calibration supports the bound here; ``meaning`` says in which sense.
        support_score: how far the query is from that support; safe means at most ``threshold``.
        anchor_error: mean observed error of the anchors.
        increment: learned correction for the way from the anchors to the query.
        anchors: rows of the data that serve as anchors, the nearest first.
        anchor_distance: their distances in representation space.
        observed_error: the anchors' observed errors, averaged over the field where the error is one.
        features: psi of the queries.
        threshold: largest support score that counts as safe.
        meaning: what it means to be safe, and not to be.
        typical_distance: median length of the calibration displacements, a yardstick for ``anchor_distance``.
        typical_support_distance: median support distance of the calibration.
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

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        return f"Assessment of {len(self)} queries, {int(self.safe.sum())} of them safe; reason(i) says why"

    def reason(self, query: int) -> str:
        """Why this bound and this flag, in words and numbers, for one query."""
        check_asked(query, "query", len(self))
        bound, baseline, increment = (
            float(part[query].mean())
            for part in (self.error_hat, self.anchor_error, self.increment)
        )
        mean = "mean " if len(self.error_hat[query].reshape(-1)) > 1 else ""
        support, score = (
            float(self.features.support_distance[query]),
            float(self.support_score[query]),
        )
        verdict = (
            f"safe, {self.meaning[0]}"
            if self.safe[query]
            else f"NOT safe, {self.meaning[1]}"
        )
        lines = [
            f"query {query}: {mean}error bound {bound:.3g}, {verdict}",
            f"  anchor error {baseline:.3g} + increment {increment:.3g} = {bound:.3g}",
            *self._anchors_told(query, mean),
            f"  support distance {support:.3g}, {_times(support, self.typical_support_distance)}",
            f"  support score {score:.3g} against the threshold {self.threshold:.3g}",
        ]
        return "\n".join(lines)

    def _anchors_told(self, query: int, mean: str) -> list[str]:
        told = [
            f"  anchor row {int(row)}: observed {mean}error {float(error):.3g}, "
            f"distance {float(distance):.3g}, {_times(float(distance), self.typical_distance)}"
            for row, distance, error in zip(
                self.anchors[query],
                self.anchor_distance[query],
                self.observed_error[query],
                strict=True,
            )
        ]
        untold = len(told) - N_ANCHORS_TOLD
        return told[:N_ANCHORS_TOLD] + (
            [f"  and {untold} more anchors"] if untold > 0 else []
        )


def _times(value: float, typical: float) -> str:
    return (
        f"{value / typical:.2g} times the typical one of the calibration"
        if typical > 0
        else "the typical is 0"
    )
