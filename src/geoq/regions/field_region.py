r"""The safe region for inputs on a grid: four scores of a field, each with its own threshold.

.. math:: S(x) = \max_k s_k(x) / t_k, \qquad \Omega_{safe} = \{x : S(x) \le 1\}

=========  =================================================================================  =================================
score      definition                                                                         what it detects
=========  =================================================================================  =================================
windows    mean over positions of the distance from a small window of the input to the        roughness, noise, steps, bumps
           nearest window of the data
answers    the same for windows of the input together with the prediction; the windows of     predictions that do not fit the
           the data contain the reference output                                              input, states off an attractor
moments    max over channels of the distance from the mean, and from the logarithm of the     offsets, new amplitudes
           standard deviation, to the nearest value in the data
patterns   max over the leading principal axes of the distance to the nearest value in the    new large patterns
           data
=========  =================================================================================  =================================

Each held-out field of the interpolating folds is scored against the fields that its fold left in. A threshold is c times the
1 - (1 - alpha_safe) / K quantile of a score over the held-out fields; K is the number of scores. The factor c is a conformal
quantile of the largest ratio, in which a field does not contribute to the thresholds that it is compared with.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.spatial import cKDTree
from scipy.stats import binom
from torch import Tensor

from geoq.archive import state_of, with_prefix, without_prefix
from geoq.arrays import CHUNK_NUMBERS, chunks
from geoq.coordinates import Coordinates
from geoq.crossfit import CalibrationPoints, CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.quantiles import check_quantile, rank
from geoq.regions.field_scores import (
    MIN_MOMENT_DEVIATION,
    N_WINDOWS,
    TINY,
    Channels,
    Fields,
    Layout,
    Patterns,
    Values,
    Windows,
    grid_axes,
    windows_of,
)
from geoq.regions.safe_region import SAFE

SCORES = ("windows", "moments", "patterns", "answers")
# At most this many held-out fields set the thresholds.
N_SCORED = 1000
# The outputs of at most this many points are compared with the inputs, to recognise steps in time.
N_COMPARED = 100
# The leading principal axes; with more axes per field their deviations would be too small by chance.
N_PATTERNS, FIELDS_PER_PATTERN = 64, 4
# With this confidence the region contains the fraction ``quantile`` - 0.02 of the fields that resemble the calibration fields.
CONFIDENCE, SLACK = 0.9, 0.02


@dataclass(frozen=True)
class _Data:
    """Calibration fields by their rows, in chunks: the inputs in the units of the user, and the reference outputs."""

    coordinates: Coordinates
    inputs: Float[Tensor, " n *coordinates"]
    outputs: Float[Tensor, " n *output"]
    layout: Layout
    n_patterns: int

    @staticmethod
    def of(
        points: CalibrationPoints, coordinates: Coordinates, rule: "FieldRegion"
    ) -> "_Data":
        """The fields of the calibration points; a few of them show whether outputs are later states."""
        n = min(N_COMPARED, max(8, CHUNK_NUMBERS // points.inputs[:1].numel()))
        inputs, outputs = points.inputs[:n], points.outputs[:n]
        n_spatial = rule.n_spatial or grid_axes(points.inputs.shape[1:])
        raw = coordinates.inverse(inputs)
        layout = Layout.of(raw, outputs.to(inputs), n_spatial, rule.order)
        fewest = min(len(left_in) for left_in, _ in points.splits)
        n_patterns = max(1, min(N_PATTERNS, fewest // FIELDS_PER_PATTERN))
        return _Data(coordinates, points.inputs, points.outputs, layout, n_patterns)

    def __getitem__(self, rows: slice | Tensor) -> Fields:
        return self.with_outputs(rows, self.outputs[rows])

    def with_outputs(self, rows: slice | Tensor, outputs: Tensor) -> Fields:
        """The fields of these rows with other outputs, such as predictions."""
        raw = self.coordinates.inverse(self.inputs[rows])
        return self.layout.fields(raw, outputs)

    def chunks(self, n_rows: int) -> Iterator[slice]:
        """Slices of rows in bounded memory."""
        return chunks(n_rows, self[:1].numbers)

    @cached_property
    def channels(self) -> Channels:
        """The typical size of each channel."""
        parts = self.chunks(len(self.inputs))
        flat = (self[rows].inputs.flatten(start_dim=2) for rows in parts)
        sums = [(f.mean(dim=2), f.square().mean(dim=2)) for f in flat]
        return Channels.fit(*(torch.cat(part) for part in zip(*sums, strict=True)))

    @cached_property
    def summaries(self) -> tuple[Tensor, Tensor]:
        """The moments and the blocks of all fields."""
        channels, parts = self.channels, self.chunks(len(self.inputs))
        inputs = (self[rows].inputs for rows in parts)
        found = [(channels.moments(own), channels.blocks(own)) for own in inputs]
        moments, blocks = (torch.cat(part) for part in zip(*found, strict=True))
        return moments, blocks


@dataclass(frozen=True)
class _Cloud:
    """The calibration fields that queries are scored against."""

    channels: Channels
    windows: Windows
    moments: Values
    patterns: Patterns
    along: Values
    answers: Windows | None = None

    @staticmethod
    def fit(data: _Data, rows: Int[Tensor, " n"]) -> "_Cloud":
        moments, blocks = (part[rows] for part in data.summaries)
        patterns = Patterns.fit(blocks, data.n_patterns)
        drawn, drawn_answers = _drawn_windows(data, rows)
        return _Cloud(
            data.channels,
            Windows.fit(drawn),
            Values.fit(moments, MIN_MOMENT_DEVIATION),
            patterns,
            Values.fit(patterns(blocks), TINY),
            None if drawn_answers is None else Windows.fit(drawn_answers),
        )

    def scores(self, fields: Fields) -> Float[Tensor, " n n_scores"]:
        """One column per score, in the order of ``SCORES``."""
        blocks = self.channels.blocks(fields.inputs)
        columns = [
            self.windows.distances(fields.inputs).mean(dim=1),
            self.moments.gaps(self.channels.moments(fields.inputs)).amax(dim=1),
            self.along.gaps(self.patterns(blocks)).amax(dim=1),
        ]
        if self.answers is not None:
            columns.append(self.answers.distances(fields.joined).mean(dim=1))
        return torch.stack(columns, dim=1)


def _drawn_windows(
    data: _Data, rows: Int[Tensor, " n"]
) -> tuple[Tensor, Tensor | None]:
    """Windows of the inputs, and of inputs with reference outputs, at random positions of these rows."""
    n_positions = windows_of(data[:1].inputs).shape[1]
    order = np.random.default_rng(0).permutation(len(rows) * n_positions)
    chosen = torch.as_tensor(np.sort(order[:N_WINDOWS]), device=rows.device)
    field, at = chosen // n_positions, chosen % n_positions
    drawn, drawn_answers = [], []
    for part in data.chunks(len(rows)):
        here = (field >= part.start) & (field < part.stop)
        fields = data[rows[part]]
        index = (field[here] - part.start, at[here])
        drawn.append(windows_of(fields.inputs)[index])
        if fields.answer is not None:
            drawn_answers.append(windows_of(fields.joined)[index])
    return torch.cat(drawn), torch.cat(drawn_answers) if drawn_answers else None


@dataclass(frozen=True)
class FieldRegion:
    """Fields with windows, moments and patterns as the calibration fields have them; the default for inputs on a grid.

    Attributes:
        quantile: alpha_safe, the fraction of held-out fields that the region contains, nearly.
        n_spatial: the number of axes of the grid, which come last. None means all axes of a row but the first one, which
            counts channels.
        order: the numbers of the nodes of a mesh along a curve through it, see ``on_mesh``. None means a regular grid.

    Example:
        >>> FieldRegion(quantile=0.9)
        FieldRegion(quantile=0.9, n_spatial=None)
    """

    quantile: float = 0.95
    n_spatial: int | None = None
    order: Sequence[int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "FieldRegion.quantile")
        if self.order is not None:
            object.__setattr__(self, "order", tuple(self.order))

    @staticmethod
    def on_mesh(coordinates: np.ndarray, quantile: float = 0.95) -> "FieldRegion":
        """The region for inputs at the nodes of a mesh, the last axis of ``x``; ``coordinates`` has one row per node.

        A window is a group of seven neighbouring nodes: successive leaves of a k-d tree of the nodes.
        """
        nodes = np.asarray(coordinates, dtype=float)
        if nodes.ndim != 2 or not np.isfinite(nodes).all():
            raise ValueError(
                f"FieldRegion.on_mesh(coordinates) has shape {nodes.shape} or values that are not finite; pass one row of "
                "coordinates for each node."
            )
        return FieldRegion(quantile, 1, cKDTree(nodes, leafsize=1).indices.tolist())

    def fit(self, calibration: CalibrationSet) -> "FittedFieldRegion":
        """Set the thresholds from the held-out fields of the interpolating folds."""
        points = calibration.data
        assert points is not None
        assert isinstance(points.coordinates, Coordinates)
        shape = points.inputs.shape[1:]
        if self.n_spatial is not None and self.n_spatial > len(shape):
            raise ValueError(
                f"FieldRegion(n_spatial={self.n_spatial}), but a row of x has shape {tuple(shape)}; lower n_spatial."
            )
        if self.order is not None and len(self.order) != shape[-1]:
            raise ValueError(
                f"FieldRegion.on_mesh was called with {len(self.order)} nodes, but a row of x has shape {tuple(shape)}; put the "
                "nodes last in x, and give the coordinates of all of them."
            )
        data = _Data.of(points, points.coordinates, self)
        scores = _held_out_scores(data, calibration, points.splits)
        thresholds = joint_thresholds(scores, self.quantile)
        everything = torch.arange(len(points.inputs), device=points.inputs.device)
        cloud = _Cloud.fit(data, everything)
        return FittedFieldRegion(
            self, points.coordinates, data.layout, cloud, thresholds
        )


def _held_out_scores(
    data: _Data,
    calibration: CalibrationSet,
    splits: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Float[Tensor, " n n_scores"]:
    """Scores of held-out fields, with the predictions of their fold, against the fields that the fold left in."""
    tuples = calibration.interpolating.nonzero()[:, 0]
    tuples = tuples[:: math.ceil(len(tuples) / N_SCORED)]
    scores = []
    for fold in calibration.fold[tuples].unique_consecutive().tolist():
        held_out = tuples[calibration.fold[tuples] == fold]
        left_in = torch.as_tensor(splits[fold][0], device=tuples.device)
        cloud = _Cloud.fit(data, left_in)
        for part in data.chunks(len(held_out)):
            rows = held_out[part]
            prediction = calibration.features.prediction[rows]
            fields = data.with_outputs(calibration.point[rows], prediction)
            scores.append(cloud.scores(fields))
    return torch.cat(scores)


def joint_thresholds(
    held_out: Float[Tensor, " n n_scores"], quantile: float
) -> Float[Tensor, " n_scores"]:
    """Thresholds of several scores which nearly the fraction ``quantile`` of new rows does not exceed in any score.

    The ratio of a row is taken to the thresholds of the other rows. Otherwise the largest scores would be their own thresholds,
    and a new row would exceed one of them too often.
    """
    n, n_scores = held_out.shape
    level = 1 - (1 - quantile) / n_scores
    ordered = held_out.sort(dim=0).values.clamp(min=TINY)
    if n == 1:
        return ordered[0]
    place = min(rank(n, level), n - 1) - 1
    # Without row i, the score of this rank is the next one if row i is below it.
    below = held_out <= ordered[place]
    without = torch.where(below, ordered[place + 1], ordered[place])
    ratio = (held_out / without).amax(dim=1).sort().values
    confident = int(binom.ppf(CONFIDENCE, n, max(0.0, quantile - SLACK))) + 1
    place_c = min(max(rank(n + 1, quantile), confident), n) - 1
    return ordered[min(rank(n, level), n) - 1] * ratio[place_c]


@dataclass(frozen=True)
class FittedFieldRegion:
    """The calibration fields and the thresholds. The support score is the largest ratio of a score to its threshold."""

    rule: FieldRegion
    coordinates: Coordinates
    layout: Layout
    cloud: _Cloud
    thresholds: Float[Tensor, " n_scores"]
    threshold: float = 1.0
    meaning: tuple[str, str] = (
        "similar to held-out fields",
        "not similar to held-out fields; the bound is a guess",
    )

    def ratios(
        self,
        inputs: Float[Tensor, " n *coordinates"],
        prediction: Float[Tensor, " n *output"],
    ) -> Float[Tensor, " n n_scores"]:
        """Each score divided by its threshold, one column per score."""
        numbers = self.fields(inputs[:1], prediction[:1]).numbers
        parts = [
            self.cloud.scores(self.fields(inputs[rows], prediction[rows]))
            for rows in chunks(len(inputs), numbers)
        ]
        return torch.cat(parts) / self.thresholds

    def fields(self, inputs: Tensor, prediction: Tensor) -> Fields:
        """Queries as fields in the units of the user."""
        return self.layout.fields(self.coordinates.inverse(inputs), prediction)

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The largest ratio of a score to its threshold."""
        score = self.ratios(features.inputs, features.prediction).amax(dim=1)
        return score.to(features.support_distance)

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most 1."""
        return support_score <= SAFE

    def explain_field(
        self,
        inputs: Float[Tensor, " 1 *coordinates"],
        prediction: Float[Tensor, " 1 *output"],
        names: Sequence[str] | None = None,
    ) -> str:
        """Why one query is safe or not: the score with the largest ratio, and the place, channel or moment behind it."""
        fields = self.fields(inputs, prediction)
        n_channels = fields.inputs.shape[1]
        if names is not None and len(names) != n_channels:
            raise ValueError(
                f"names has {len(names)} entries, but the inputs have {n_channels} channels; pass one name per channel."
            )
        label = [f"channel {c}" for c in names or range(n_channels)]
        changed = self.coordinates.changed(inputs).reshape(fields.inputs.shape)[0]
        if changed.any():
            raw = self.coordinates.inverse(inputs).reshape(changed.shape)
            return self._explain_constant(raw, changed.nonzero()[0].tolist(), label)
        ratio = self.ratios(inputs, prediction)[0]
        which = int(ratio.argmax())
        if ratio[which] <= SAFE:
            return "windows, moments and patterns of the field are within the region of the held-out fields"
        if SCORES[which] == "moments":
            return self._explain_moments(fields, label)
        if SCORES[which] == "patterns":
            return self._explain_patterns(fields, which)
        return self._explain_windows(fields, which)

    def _explain_constant(self, raw: Tensor, place: list[int], label: list[str]) -> str:
        channel, *cell = place
        constant = float(self.coordinates.mean.reshape(raw.shape)[*place])
        return (
            f"cell {tuple(cell)} of {label[channel]} is {float(raw[*place]):.4g}, but it is {constant:.4g} in all the data, so its "
            "effect is unknown"
        )

    def _explain_windows(self, fields: Fields, which: int) -> str:
        grid = fields.inputs.shape[2:]
        if SCORES[which] == "windows":
            distance = self.cloud.windows.distances(fields.inputs)[0]
            what = "the input differs from the data within a few cells"
        else:
            assert self.cloud.answers is not None
            distance = self.cloud.answers.distances(fields.joined)[0]
            what = "the prediction and the input do not occur together in the data"
        cell = self.layout.cell(int(distance.argmax()), grid)
        at = f"{'cell' if self.layout.order is None else 'node'} {cell}"
        return (
            f"{what}, most of all around {at}: its windows are {float(distance.mean()):.2g} from the nearest windows of the "
            f"data on average (held-out fields: at most {float(self.thresholds[which]):.2g})"
        )

    def _explain_moments(self, fields: Fields, label: list[str]) -> str:
        channels, known = self.cloud.channels, self.cloud.moments
        found = channels.moments(fields.inputs)
        number = int(known.gaps(found)[0].argmax())
        value = float(found[0, number])
        taken = known.taken[number].tolist()
        channel, name, raw = channels.moment(number, value)
        ends = [channels.moment(number, at)[2] for at in known.around(number, value)]
        text = f"the {name} of {label[channel]} is {raw:.4g}"
        if taken[0] < value < taken[-1]:
            return f"{text}; its nearest values in the data are {ends[0]:.4g} and {ends[1]:.4g}"
        return f"{text}; it ranges from {ends[0]:.4g} to {ends[1]:.4g} in the data"

    def _explain_patterns(self, fields: Fields, which: int) -> str:
        along = self.cloud.patterns(self.cloud.channels.blocks(fields.inputs))
        gaps = self.cloud.along.gaps(along)[0]
        axis = int(gaps.argmax())
        return (
            f"the large-scale pattern of principal axis {axis} is {float(gaps[axis]):.2g} deviations from the nearest value in "
            f"the data (held-out fields: at most {float(self.thresholds[which]):.2g})"
        )

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        layout = (self.layout.n_spatial, self.layout.answers, self.layout.changes)
        arrays = {
            "layout": torch.tensor(layout, dtype=torch.int64),
            "thresholds": self.thresholds,
            **with_prefix("coordinates.", vars(self.coordinates)),
        }
        for name, part in state_of(self.cloud).items():
            if part is not None:
                arrays |= with_prefix(f"{name}.", state_of(part))
        return arrays

    @staticmethod
    def from_state(rule: FieldRegion, arrays: dict[str, Tensor]) -> "FittedFieldRegion":
        """The region that ``state`` described."""
        n_spatial, answers, changes = arrays["layout"].tolist()
        coordinates = Coordinates(**without_prefix("coordinates.", arrays))
        parts = {name: without_prefix(f"{name}.", arrays) for name in _PARTS}
        cloud = _Cloud(**{n: _PARTS[n](**part) for n, part in parts.items() if part})
        layout = Layout(n_spatial, bool(answers), bool(changes), rule.order)
        return FittedFieldRegion(rule, coordinates, layout, cloud, arrays["thresholds"])


_PARTS: dict[str, Any] = {
    "channels": Channels,
    "windows": Windows,
    "moments": Values,
    "patterns": Patterns,
    "along": Values,
    "answers": Windows,
}
