r"""The safe region for states of few coordinates: how far a state is from the surface that the nearest states of the data form.

.. math:: s(u) = \Bigl(\frac1d \sum_{j=1}^d \frac{(v_j^T (u - c))^2}{\lambda_j + \epsilon^2}\Bigr)^{1/2}

Here c is the mean of the 20 nearest states of the data, and :math:`\lambda_j, v_j` are the eigenvalues and eigenvectors of their
covariance, all in standardised coordinates. The states of a dissipative system fill a surface with few dimensions. A state off
this surface can be near the data, compared with distances in sparse parts of the surface, and still be unlike all of them: there
:math:`\lambda_j` is small across the surface, and the score is large.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.archive import with_prefix, without_prefix
from geoq.arrays import chunks
from geoq.coordinates import Coordinates
from geoq.crossfit import CalibrationSet
from geoq.neighbors import Neighbors
from geoq.quantiles import check_quantile, inverse_cdf_quantile

# The number of nearest states, and a deviation that counts as rounding, in standard deviations of a coordinate.
N_NEAREST, ROUNDING = 20, 1e-3


@dataclass(frozen=True)
class LocalRegion:
    """States on the surface that the nearest states of the data form.

    Attributes:
        quantile: the fraction of the held-out states that the region contains.
        places: the coordinates of the flat state that are compared; None means all.
    """

    quantile: float = 0.95
    places: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "LocalRegion.quantile")

    def fit(self, calibration: CalibrationSet) -> "FittedLocalRegion":
        """Set the threshold from held-out states, each scored against the states that its fold left in."""
        data = calibration.data
        assert data is not None
        assert isinstance(data.coordinates, Coordinates)
        states = self.compared(data.inputs)
        scores = []
        for fold in calibration.fold.unique().tolist():
            left_in = torch.as_tensor(data.splits[fold][0], device=states.device)
            held_out = calibration.point[calibration.fold == fold]
            scores.append(local_scores(Neighbors(states[left_in]), states[held_out]))
        threshold = float(inverse_cdf_quantile(torch.cat(scores), self.quantile))
        return FittedLocalRegion(self, data.coordinates, states, threshold)

    def compared(self, states: Float[Tensor, " n *state"]) -> Float[Tensor, " n d"]:
        """The coordinates that are compared."""
        flat = states.flatten(start_dim=1).double()
        return flat if self.places is None else flat[:, list(self.places)]


def local_scores(
    states: Neighbors, queries: Float[Tensor, " m d"]
) -> Float[Tensor, " m"]:
    """The score s of each query relative to these states."""
    points = states.points
    n_nearest = min(N_NEAREST, len(points))
    nearest, parts = states.nearest(queries, n_nearest)[1], []
    for rows in chunks(len(queries), 2 * n_nearest * points.shape[1]):
        near = points[nearest[rows]]
        centre = near.mean(dim=1, keepdim=True)
        spread = near - centre
        covariance = spread.mT @ spread / n_nearest
        size, axes = torch.linalg.eigh(covariance)
        along = ((queries[rows, None] - centre) @ axes)[:, 0]
        squares = along.square() / (size.clamp(min=0) + ROUNDING**2)
        parts.append(squares.mean(dim=1).sqrt())
    return torch.cat(parts)


@dataclass(frozen=True)
class FittedLocalRegion:
    """The standardised states of the data, their coordinates that are compared, and the largest score of a safe state."""

    rule: LocalRegion
    coordinates: Coordinates
    states: Float[Tensor, " n d"]
    threshold: float

    def ratios(
        self, inputs: Float[Tensor, " n *state"], prediction: Tensor
    ) -> Float[Tensor, " n 1"]:
        """The score of each state divided by the threshold; the prediction does not matter."""
        del prediction
        queries = self.rule.compared(inputs).to(self.states)
        return local_scores(self._neighbors, queries)[:, None] / self.threshold

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.states)

    def explain_field(
        self, inputs: Float[Tensor, " 1 *state"], prediction: Tensor
    ) -> str:
        """How far one state is from the surface of its nearest states."""
        score = self.threshold * float(self.ratios(inputs, prediction))
        return (
            f"the initial state is off the surface that its {N_NEAREST} nearest states in the data form: it is {score:.2g} of their "
            f"standard deviations away (held-out states: at most {self.threshold:.2g})"
        )

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        threshold = torch.tensor(self.threshold, dtype=torch.float64)
        own = {"states": self.states, "threshold": threshold}
        return own | with_prefix("coordinates.", vars(self.coordinates))

    @staticmethod
    def from_state(rule: LocalRegion, arrays: dict[str, Tensor]) -> "FittedLocalRegion":
        """The region that ``state`` described."""
        coordinates = Coordinates(**without_prefix("coordinates.", arrays))
        threshold = float(arrays["threshold"])
        return FittedLocalRegion(rule, coordinates, arrays["states"], threshold)
