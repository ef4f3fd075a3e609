"""Methods to compare GeoQ with: the paper's four, and rivals that use GeoQ's own folds and held-out errors.

Each is a dataclass of settings with ``fit(x, y)``, which returns itself, and ``predict(x)``, which returns a ``Bound``.
"""

from geoq.baselines.boosted_quantile import BoostedQuantile
from geoq.baselines.bound import Bound
from geoq.baselines.conformal import SplitConformal
from geoq.baselines.cross_fitted import NoIncrement, RememberedTraining
from geoq.baselines.deep_ensemble import DeepEnsemble
from geoq.baselines.deup import MeanErrorPredictor
from geoq.baselines.gaussian_process import GaussianProcess
from geoq.baselines.knn_conformal import KNNDistanceConformal, KNNResidualConformal
from geoq.baselines.mc_dropout import MCDropout
from geoq.baselines.per_coordinate import (
    of_x,
    of_x_and_distance,
    of_x_distance_and_prediction,
)
from geoq.baselines.quantile_network import OnField, OnTable, QuantileNetwork

__all__ = [
    "BoostedQuantile",
    "Bound",
    "DeepEnsemble",
    "GaussianProcess",
    "KNNDistanceConformal",
    "KNNResidualConformal",
    "MCDropout",
    "MeanErrorPredictor",
    "NoIncrement",
    "OnField",
    "OnTable",
    "QuantileNetwork",
    "RememberedTraining",
    "SplitConformal",
    "of_x",
    "of_x_and_distance",
    "of_x_distance_and_prediction",
]
