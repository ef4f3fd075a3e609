"""Regressions on tables for errors of any shape: one model per coordinate, or one model for all coordinates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.arrays import chunks
from geoq.geometry import GeometricFeatures

# For more coordinates than this, one model is used for all; its inputs include the coordinate's prediction and number.
MOST_MODELS = 16
# The common model is fitted to at most this many values, drawn at random.
MOST_VALUES = 500_000

Predict = Callable[[np.ndarray], np.ndarray]
# regress(table, target, group, weight): rows of one group belong together and must not be split for validation.
Regress = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Predict]
TabularInputs = Callable[[Tensor, GeometricFeatures], Tensor]


def of_x(
    x: Float[Tensor, " n *input"], features: GeometricFeatures
) -> Float[Tensor, " n n_columns"]:
    """The standardised inputs only."""
    del features
    return x.reshape(len(x), -1)


def of_x_and_distance(
    x: Float[Tensor, " n *input"], features: GeometricFeatures
) -> Float[Tensor, " n n_columns"]:
    """The standardised inputs and the logarithm of the support distance."""
    smallest = torch.finfo(x.dtype).tiny
    return torch.cat(
        [
            x.reshape(len(x), -1),
            features.support_distance.clamp(min=smallest).log()[:, None],
        ],
        dim=1,
    )


def of_x_distance_and_prediction(
    x: Float[Tensor, " n *input"], features: GeometricFeatures
) -> Float[Tensor, " n n_columns"]:
    """The standardised inputs, the logarithm of the support distance and the surrogate's prediction."""
    return torch.cat(
        [of_x_and_distance(x, features), features.prediction.reshape(len(x), -1)], dim=1
    )


@dataclass(frozen=True)
class CoordinateModels:
    """Fitted regressions of an error of any shape: one model per coordinate, or a single one for all of them."""

    models: list[Predict]
    field_shape: tuple[int, ...]

    @classmethod
    def fit(
        cls,
        regress: Regress,
        table: Float[Tensor, " n n_columns"],
        prediction: Float[Tensor, " n *output"],
        target: Float[Tensor, " n *field"],
        group: Int[Tensor, " n"],
        weight: Float[Tensor, " n"],
    ) -> "CoordinateModels":
        field_shape = tuple(target.shape[1:])
        n_coordinates = math.prod(field_shape)
        columns, targets, groups, weights = (
            part.cpu().numpy()
            for part in (table, target.reshape(len(target), -1), group, weight)
        )
        if n_coordinates <= MOST_MODELS:
            return cls(
                [
                    regress(columns, targets[:, j], groups, weights)
                    for j in range(n_coordinates)
                ],
                field_shape,
            )
        if prediction.shape != target.shape:
            raise ValueError(
                f"the error has {n_coordinates} coordinates of shape {field_shape}, but the prediction has shape "
                f"{tuple(prediction.shape[1:])}; more than {MOST_MODELS} coordinates have one model that reads each "
                "coordinate's prediction, so use an error functional of the output's shape."
            )
        value = np.arange(targets.size)
        if len(value) > MOST_VALUES:
            value = np.sort(
                np.random.default_rng(0).choice(
                    targets.size, size=MOST_VALUES, replace=False
                )
            )
        row = value // n_coordinates
        pooled = _pooled(
            columns, prediction.reshape(len(prediction), -1).cpu().numpy(), value
        )
        return cls(
            [regress(pooled, targets.reshape(-1)[value], groups[row], weights[row])],
            field_shape,
        )

    def __call__(
        self,
        table: Float[Tensor, " n n_columns"],
        prediction: Float[Tensor, " n *output"],
    ) -> Float[Tensor, " n *field"]:
        columns, n_coordinates = table.cpu().numpy(), math.prod(self.field_shape)
        if n_coordinates <= MOST_MODELS:
            answers = np.stack([model(columns) for model in self.models], axis=1)
        else:
            flat = prediction.reshape(len(prediction), -1).cpu().numpy()
            parts = chunks(flat.size, columns.shape[1] + 2)
            values = [
                self.models[0](_pooled(columns, flat, np.arange(p.start, p.stop)))
                for p in parts
            ]
            answers = np.concatenate(values)
        return torch.as_tensor(answers).to(table).reshape(-1, *self.field_shape)


def _pooled(
    columns: np.ndarray, prediction: np.ndarray, value: np.ndarray
) -> np.ndarray:
    """One row per value: the columns of its sample, its prediction and its coordinate."""
    row, coordinate = np.divmod(value, prediction.shape[1])
    return np.column_stack([columns[row], prediction[row, coordinate], coordinate])
