"""What every baseline answers, and what the baselines of the paper share."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array

# The paper turns a predictive standard deviation into a bound by this factor: 95 % of a Gaussian's values lie within.
GAUSSIAN_95 = 1.96


class Bound(NamedTuple):
    """A baseline's own prediction and its upper estimate of that prediction's error, in the user's kind of array."""

    prediction: Float[Array, " n *output"]
    error_hat: Float[Array, " n *field"]


def spread(
    predictions: Iterable[Float[Tensor, " n *output"]],
) -> tuple[Float[Tensor, " n *output"], Float[Tensor, " n *output"]]:
    r"""Mean and population standard deviation of several predictions, keeping only one of them at a time.

    .. math:: \overline y = \frac1M \sum_m \widehat y_m, \quad \sigma^2 = \frac1M \sum_m (\widehat y_m - \overline y)^2
    """
    members = iter(predictions)
    mean = next(members).clone()
    sum_of_squares = mean.new_zeros(mean.shape)
    count = 1
    for prediction in members:
        count += 1
        deviation = prediction - mean
        mean += deviation / count
        sum_of_squares += deviation * (prediction - mean)
    return mean, (sum_of_squares / count).sqrt()
