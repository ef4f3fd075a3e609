"""What every baseline answers, and what the baselines of the paper share."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from geoq.surrogate import Array, check_finite, to_tensor

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


def check_pairs(x: Array, y: Array) -> tuple[Tensor, Tensor]:
    """Inputs and outputs as tensors, refused if they are no finite pairs."""
    inputs, outputs = to_tensor(x, "x"), to_tensor(y, "y")
    for name, tensor in (("x", inputs), ("y", outputs)):
        if tensor.ndim == 0 or not tensor.numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and holds no samples; pass one per row."
            )
        check_finite(tensor, name)
    if len(inputs) != len(outputs):
        raise ValueError(
            f"x has {len(inputs)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    return inputs, outputs


def check_fitted(baseline: object, attribute: str) -> None:
    """Refuse to answer before ``fit``."""
    if not hasattr(baseline, attribute):
        from sklearn.exceptions import (
            NotFittedError,
        )  # here, because importing scikit-learn takes long

        raise NotFittedError(
            f"this {type(baseline).__name__} is not fitted yet; call fit(x, y) first."
        )
