r"""A learned factor on a bound: boosted trees that see the inputs of the query and its prediction.

.. math:: \widehat E_j(x) = b_j(x) \, f(\nu(x), \log \Delta d(x), \widehat F_j(x), \log(\overline E_j(x) / b_j(x)))

The geometry contains the distance of a query to the data, but not its location. The factor is learned by quantile regression of
e / b. It is used only if it lowers the loss on points that it was not learned from.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import few_threads
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.factor import BoundOf, Learned, subsample
from geoq.quantiles import pinball_loss

# Trees of scalar errors see the inputs if there are at most this many. The coordinates of a vector have common trees.
MAX_INPUTS = 64
# The trees are evaluated once per value, so there is no factor for errors with more coordinates.
MAX_COORDINATES = 256


@dataclass(frozen=True)
class BoostedFactor:
    """How the factor is learned; scikit-learn grows the trees.

    Attributes:
        n_trees: numbers of trees to choose from, on held-out points.
        n_leaves: leaves per tree.
        learning_rate: fraction of the output of each tree that is used.
        n_splits: number of parts of the points; each part is held out once.
    """

    n_trees: tuple[int, ...] = (10, 25, 50, 100)
    n_leaves: int = 8
    learning_rate: float = 0.1
    n_splits: int = 5

    def fit(
        self, calibration: CalibrationSet, bound_of: BoundOf, quantile: float
    ) -> Learned:
        """Learn e / bound; the weights contain the bound, so that the loss is the pinball loss of the error."""
        if calibration.error[0].numel() > MAX_COORDINATES:
            return Learned.nothing(calibration)
        calibration = subsample(calibration)
        bound = bound_of(calibration.features).cpu()
        # The parts consist of groups, not of folds: several folds can hold out the same point.
        groups, group = calibration.group.cpu().unique(return_inverse=True)
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
        part = (order % self.n_splits)[group]
        if len(part.unique()) < 2 or not (bound > 0).all():
            return Learned.nothing(calibration)
        table = columns(calibration.features, bound).numpy()
        error = calibration.error.reshape(len(bound), -1).to(bound)
        ratio = (error / bound).reshape(-1).numpy()
        importance = (calibration.weight.to(bound)[:, None] * bound).reshape(-1)
        weight = (importance / importance.mean()).numpy()
        group_of_value = np.repeat(part.numpy(), bound.shape[1])
        with few_threads(table.size):
            n_best, held_out = self._held_out(
                table, ratio, weight, group_of_value, quantile
            )
            if n_best is None:
                return Learned.nothing(calibration)
            model = self._model(n_best, quantile).fit(table, ratio, weight)
        factors = torch.from_numpy(held_out).reshape(bound.shape)
        return Learned(Trees.of(model), calibration, factors)

    def _held_out(
        self,
        table: np.ndarray,
        ratio: np.ndarray,
        weight: np.ndarray,
        group: np.ndarray,
        quantile: float,
    ) -> tuple[int | None, np.ndarray]:
        """The best number of trees, or None if no factor is as good, and the factors learned from other groups."""
        held_out = {n: np.ones(len(ratio)) for n in self.n_trees}
        for left_out in np.unique(group):
            train, test = group != left_out, group == left_out
            model = self._model(max(self.n_trees), quantile).fit(
                table[train], ratio[train], weight[train]
            )
            for n, answer in enumerate(model.staged_predict(table[test]), start=1):
                if n in held_out:
                    held_out[n][test] = answer.clip(min=0)
        n_best = self._best(held_out, ratio, weight, group, quantile)
        return n_best, held_out[n_best or self.n_trees[0]]

    def _model(self, n_trees: int, quantile: float) -> Any:
        # Imported here, because the import of scikit-learn is slow.
        from sklearn.ensemble import HistGradientBoostingRegressor

        return HistGradientBoostingRegressor(
            loss="quantile",
            quantile=quantile,
            max_iter=n_trees,
            learning_rate=self.learning_rate,
            max_leaf_nodes=self.n_leaves,
            min_samples_leaf=40,
            early_stopping=False,
            random_state=0,
        )

    def _best(
        self,
        held_out: dict[int, np.ndarray],
        ratio: np.ndarray,
        weight: np.ndarray,
        group: np.ndarray,
        quantile: float,
    ) -> int | None:
        """The number of trees with the smallest held-out loss, if the gain exceeds its standard error over the groups."""

        def losses(factor: np.ndarray) -> np.ndarray:
            loss = pinball_loss(
                torch.from_numpy(ratio), torch.from_numpy(factor), quantile
            ).numpy()
            groups = np.unique(group)
            mine = [group == number for number in groups]
            return np.array([np.average(loss[m], weights=weight[m]) for m in mine])

        by_count = {n: losses(factor) for n, factor in held_out.items()}
        best = min(by_count, key=lambda n: float(by_count[n].mean()))
        gain = losses(np.ones(len(ratio))) - by_count[best]
        spread = gain.std(ddof=1) / math.sqrt(len(gain))
        return best if gain.mean() > spread else None


def columns(
    features: GeometricFeatures, bound: Float[Tensor, " n n_coordinates"]
) -> Float[Tensor, " n_values n_columns"]:
    """The columns that the trees see, one row per query and coordinate."""
    n, n_coordinates = bound.shape
    anchor = (features.anchor_error.reshape(n, -1).to(bound) / bound + 1e-3).log()
    distance = features.support_distance.to(bound).clamp(min=1e-300).log()[:, None]
    prediction = features.prediction.reshape(n, -1).to(bound)
    inputs = features.inputs.reshape(n, -1).to(bound)
    if n_coordinates == 1:
        seen = [inputs] if inputs.shape[1] <= MAX_INPUTS else []
        own = (
            prediction
            if prediction.shape[1] == 1
            else prediction.mean(dim=1, keepdim=True)
        )
        return torch.cat([*seen, distance, own, anchor], dim=1)
    own = (
        prediction
        if prediction.shape == bound.shape
        else prediction.mean(dim=1, keepdim=True).expand_as(bound)
    )
    coordinate = torch.arange(n_coordinates).to(bound).expand_as(bound)
    parts = [distance.expand_as(bound), own, anchor, coordinate]
    return torch.stack([part.reshape(-1) for part in parts], dim=1)


# This many nodes are visited in one step, so that they fit into the cache; a GPU visits more by this factor.
TREE_NUMBERS, TREES_ON_GPU = 2**16, 64
TREE_ARRAYS = ("feature", "threshold", "child", "value")


@dataclass(frozen=True)
class Trees:
    """Regression trees as arrays, so that a file can hold them.

    Node 0 of each tree is its root; a leaf is its own child.
    """

    start: float
    feature: Tensor
    threshold: Tensor
    child: Tensor
    value: Tensor

    @staticmethod
    def of(model: Any) -> "Trees":
        """The trees of a fitted ``HistGradientBoostingRegressor``; this reads private attributes of scikit-learn."""
        grown = [predictor.nodes for (predictor,) in model._predictors]
        most = max(len(nodes) for nodes in grown)
        feature, threshold, value = (np.zeros((len(grown), most)) for _ in range(3))
        child = np.tile(np.arange(most), (2, len(grown), 1))
        for tree, nodes in enumerate(grown):
            inner = np.flatnonzero(nodes["is_leaf"] == 0)
            feature[tree, inner] = nodes["feature_idx"][inner]
            threshold[tree, inner] = nodes["num_threshold"][inner]
            child[0, tree, inner], child[1, tree, inner] = (
                nodes["left"][inner],
                nodes["right"][inner],
            )
            value[tree, : len(nodes)] = nodes["value"]
        return Trees(
            float(np.ravel(model._baseline_prediction)[0]),
            torch.from_numpy(feature).long(),
            torch.from_numpy(threshold),
            torch.from_numpy(child),
            torch.from_numpy(value),
        )

    def factor(
        self, features: GeometricFeatures, bound: Float[Tensor, " n n_coordinates"]
    ) -> Float[Tensor, " n n_coordinates"]:
        """The factor of each value of the bound."""
        return self(columns(features, bound)).reshape(bound.shape)

    def __str__(self) -> str:
        return f"a factor of {len(self.value)} boosted trees"

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and arrays, for a file."""
        arrays = {name: vars(self)[name] for name in TREE_ARRAYS}
        return {"start": self.start}, arrays

    @staticmethod
    def from_state(settings: dict[str, Any], arrays: dict[str, Tensor]) -> "Trees":
        """The trees that ``state`` described."""
        return Trees(settings["start"], *(arrays[name] for name in TREE_ARRAYS))

    def __call__(self, rows: Float[Tensor, " n n_columns"]) -> Float[Tensor, " n"]:
        n_trees, n_nodes = self.value.shape
        # The nodes of all trees are stored in one row, so that a step takes three look-ups.
        root = torch.arange(n_trees) * n_nodes
        child = (self.child + root[:, None]).permute(1, 2, 0).reshape(-1)
        root, child, feature, threshold, value = (
            part.reshape(-1).to(rows.device)
            for part in (root, child, self.feature, self.threshold, self.value)
        )
        most = TREE_NUMBERS * (TREES_ON_GPU if rows.is_cuda else 1)
        answers = []
        for part in rows.split(max(1, most // n_trees)):
            node = root.repeat(len(part))
            # The depth of a tree is at most the number of its inner nodes.
            for _ in range(n_nodes // 2):
                column = feature.index_select(0, node).view(len(part), n_trees)
                right = part.gather(1, column).view(-1) > threshold.index_select(
                    0, node
                )
                below = child.index_select(0, 2 * node + right)
                if torch.equal(below, node):
                    break
                node = below
            leaves = value.index_select(0, node).view(len(part), n_trees)
            answers.append(self.start + leaves.sum(dim=1))
        return torch.cat(answers).clamp(min=0)
