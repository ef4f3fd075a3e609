"""Answers of the xarray interfaces as plain answers with one row per query, and the labels of their axes."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from geoq.assessment import Assessment, QueryFeatures
from geoq.rollout import RolloutAssessment
from geoq.rollout.horizon import Trust
from geoq.rollout.joint_band import JointBand

_STEP = "step"


def is_labelled(answer: object) -> bool:
    """Whether an answer or an array has labels, as a Dataset or a DataArray of xarray."""
    return hasattr(answer, "dims") and hasattr(answer, "coords")


def row_dims(dataset: Any) -> list[Hashable]:
    """The dimensions of the queries, or of the rollouts."""
    return [dim for dim in dataset["safe"].dims if dim != _STEP]


def plain_values(array: Any, dataset: Any) -> Any:
    """A labelled array with one row per query and the other dimensions of the bound in their order; others as they are."""
    if not is_labelled(array) or not is_labelled(dataset):
        return array
    rows, bound = row_dims(dataset), dataset["error_hat"]
    inner = [dim for dim in bound.dims if dim not in rows and dim in array.dims]
    more = [dim for dim in array.dims if dim not in (*rows, *inner)]
    values: np.ndarray = array.transpose(*rows, *inner, *more).values
    n = int(np.prod(values.shape[: len(rows)]))
    return values.reshape(n, *values.shape[len(rows) :])


def plain_answer(answer: Any) -> Any:
    """The Assessment or the RolloutAssessment of a Dataset, as far as pictures need it; anything else as it is."""
    if not is_labelled(answer):
        return answer
    parts = {
        name: plain_values(array, answer)
        for name, array in answer.data_vars.items()
        if name != "tolerance"
    }
    attrs = answer.attrs
    common = {"meaning": (attrs["safe"], attrs["not_safe"])}
    common["threshold"] = attrs["threshold"]
    if _STEP in answer["safe"].dims:
        return _rollouts(parts | common, answer)
    distance = parts.pop("support_distance")
    features = QueryFeatures(np.zeros((len(distance), 0)), distance)
    names = ("typical_distance", "typical_support_distance", "quantile")
    known = {name: attrs[name] for name in names}
    rows = np.zeros(parts["anchor_distance"].shape, dtype=int)
    return Assessment(**parts | common | known | {"anchors": rows}, features=features)


def _rollouts(parts: dict[str, Any], answer: Any) -> RolloutAssessment:
    for name in ("prediction", "error_hat"):
        if parts[name].ndim == 2:  # states of one number
            parts[name] = parts[name][..., None]
    attrs = answer.attrs
    rule = {n.removeprefix("trust_"): v for n, v in attrs.items() if "trust_" in n}
    if rule:
        rule["typical"] = tuple(np.atleast_1d(rule["typical"]).tolist())
        parts["trust"] = Trust(**rule)
    tolerance = answer.get("tolerance")
    return RolloutAssessment(
        **parts,
        n_calibrated=int(attrs["n_calibrated"]),
        joint=JointBand(torch.zeros(0, 0), torch.zeros(0, dtype=torch.long)),
        tolerance=attrs.get("tolerance") if tolerance is None else tolerance.values,
    )


def row_name(
    answer: Any, row: int, noun: str, dims: Sequence[Hashable] | None = None
) -> str:
    """The labels of a query, or of another position along these dimensions, in words; its number without labels."""
    if not is_labelled(answer):
        return f"{noun} {row}"
    dims = row_dims(answer) if dims is None else dims
    places = np.unravel_index(row, [answer.sizes[dim] for dim in dims])
    labels = [
        f"{dim} {answer.indexes[dim][place] if dim in answer.indexes else place}"
        for dim, place in zip(dims, places, strict=True)
    ]
    return ", ".join(labels) or noun


def place_grid(axes: Sequence[Axes], extent: Sequence[float]) -> None:
    """Put coordinates on maps, or on lines, given the edges of the grid."""
    for panel in axes:
        for image in panel.images:
            image.set_extent((extent[0], extent[1], extent[2], extent[3]))
        if panel.images:
            continue
        for line in panel.lines:
            n_cells = len(np.asarray(line.get_xdata()))
            half = (extent[1] - extent[0]) / n_cells / 2
            line.set_xdata(np.linspace(extent[0] + half, extent[1] - half, n_cells))
        panel.set_xlim(extent[0], extent[1])


def label_grid(axes: Sequence[Axes], answer: Any, n_spatial: int) -> None:
    """Put the coordinates of the grid on maps and lines; numbers only, and only if they are evenly spaced."""
    if not is_labelled(answer):
        return
    dims = answer["prediction"].dims[-n_spatial:]
    ends = []
    for dim in dims:
        labels = answer.indexes.get(dim)
        if labels is None or len(labels) < 2 or labels.dtype.kind not in "iuf":
            return
        half = (labels[-1] - labels[0]) / (len(labels) - 1) / 2
        if not np.allclose(np.diff(labels), 2 * half, rtol=1e-3):
            return
        ends.append((labels[0] - half, labels[-1] + half))
    place_grid(axes, [end for both in ends[::-1] for end in both])
    axes[-1].set_xlabel(str(dims[-1]))
    for panel in axes if n_spatial == 2 else ():
        # Coordinates increase to the right and upwards, also if the data have them in the other order.
        panel.set(xlabel=str(dims[1]), ylabel=str(dims[0]))
        panel.set(xlim=sorted(ends[1]), ylim=sorted(ends[0]))


def channel_name(answer: Any, channel: int, n_spatial: int) -> str:
    """The labels of a channel in words, or its number."""
    if not is_labelled(answer):
        return f"channel {channel}"
    dims = [dim for dim in answer["prediction"].dims if dim not in row_dims(answer)]
    return row_name(answer, channel, "channel", dims[: len(dims) - n_spatial])
