"""The shapes of one row of a problem, and checks of grids."""

from typing import Any, NamedTuple

from geoq.checks import warn
from geoq.crossfit import CalibrationSet
from geoq.settings import is_integer

# A shape such as (64, 64, 3) probably has its channels last: at most this many channels after a grid of at least this size.
MAX_CHANNELS_LAST, MIN_GRID_SIZE = 4, 8


class Shapes(NamedTuple):
    """The shapes of one row of each array, which are available before the fold surrogates are trained.

    Attributes:
        z: shape of the representation.
        error: shape of the error.
        inputs: shape of the inputs.
        outputs: shape of the reference outputs.
    """

    z: tuple[int, ...]
    error: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(calibration: CalibrationSet) -> "Shapes":
        """The shapes of the calibration tuples."""
        calibration = calibration[:1]
        features = calibration.features
        parts = (
            features.displacement,
            calibration.error,
            features.inputs,
            features.prediction,
        )
        return Shapes(*(tuple(part.shape[1:]) for part in parts))


def check_spatial(n_spatial: Any) -> None:
    """Refuse grids with a number of dimensions for which there is no network."""
    if not is_integer(n_spatial) or n_spatial not in (1, 2):
        raise ValueError(
            f"n_spatial={n_spatial!r}, but fields must lie on a line or in the plane; choose 1 or 2."
        )


def looks_channels_last(shape: tuple[int, ...], n_spatial: int) -> bool:
    """Whether the last axis of an error is short and the ``n_spatial`` axes before it are long."""
    if len(shape) <= n_spatial or shape[-1] > MAX_CHANNELS_LAST:
        return False
    return min(shape[-1 - n_spatial : -1]) >= MIN_GRID_SIZE


def warn_of_channels_last(shape: tuple[int, ...], n_spatial: int) -> None:
    """Warn if the last dimension of an error probably holds channels."""
    if not looks_channels_last(shape, n_spatial):
        return
    order = (0, len(shape), *range(1, len(shape)))
    warn(
        f"an error has shape {shape}, and its last n_spatial={n_spatial} dimensions, {shape[-n_spatial:]}, are used as the "
        "grid; if the last dimension holds channels, put it first in x and y and let the surrogate work in that order: "
        f"x.permute{order}, or numpy.moveaxis(x, -1, 1)."
    )
