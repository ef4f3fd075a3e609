"""A tolerance for rollouts that is relative to the data."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

from geoq.arrays import Array, restore
from geoq.representation import Standardization
from geoq.rollout.features import ReferenceStates
from geoq.settings import is_number


@dataclass(frozen=True)
class Relative:
    r"""A tolerance relative to the spread of the data.

    .. math:: \varepsilon_j = f \sigma_j

    Here :math:`\sigma_j` is the standard deviation of coordinate j over all states of the data. So the tolerance does not
    depend on units of measurement, nor on a mean value such as 273 K. A coordinate that is constant in the data has no
    tolerance.

    Attributes:
        fraction: f; 0.1 means 10 % of the standard deviation.

    Example:
        >>> Relative(0.1)
        Relative(fraction=0.1)
    """

    fraction: float

    def __post_init__(self) -> None:
        if not is_number(self.fraction) or self.fraction <= 0:
            raise ValueError(
                f"Relative(fraction={self.fraction!r}), but a fraction of the spread of the data is needed; pass a positive number, "
                "for example Relative(0.1) for 10 %."
            )

    def numbers(
        self, reference: ReferenceStates, normalization: Standardization, like: Array
    ) -> Float[Array, " *output"]:
        """The tolerance of each coordinate of the output, as an array of the kind of ``like``."""
        spread = normalization.scale.masked_fill(reference.constant, torch.inf)
        return restore(self.fraction * reference.output(spread[None, None])[0, 0], like)
