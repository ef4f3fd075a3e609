"""The result of a baseline, and the mean and standard deviation of several predictions."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array

# The paper multiplies a predictive standard deviation by this factor: 95 % of a Gaussian lies within.
GAUSSIAN_95 = 1.96


class Bound(NamedTuple):
    """Prediction of a baseline and an upper bound of its error, as NumPy arrays or tensors like the input.

    Attributes:
        prediction: The prediction of the baseline itself.
        error_hat: Upper bound of the error of that prediction.
    """

    prediction: Float[Array, " n *output"]
    error_hat: Float[Array, " n *field"]


def spread(
    predictions: Iterable[Float[Tensor, " n *output"]],
) -> tuple[Float[Tensor, " n *output"], Float[Tensor, " n *output"]]:
    r"""Mean and standard deviation of several predictions, with the unbiased divisor M - 1.

    .. math:: \overline y = \frac1M \sum_m \widehat y_m, \quad
        \sigma^2 = \frac1{M - 1} \sum_m (\widehat y_m - \overline y)^2

    Of the predictions, at least two, only one is in memory at a time.

    Example:
        >>> import torch
        >>> mean, deviation = spread([torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([5.0])])
        >>> mean.tolist(), deviation.tolist()
        ([3.0], [2.0])
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
    return mean, (sum_of_squares / (count - 1)).sqrt()
