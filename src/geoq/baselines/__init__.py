"""The four methods that the paper compares GeoQ with: Gaussian process, MC dropout, deep ensemble, split conformal.

Each baseline is a dataclass of settings. ``fit(x, y)`` trains it and returns the baseline; ``predict(x)`` returns a
``Bound``, the prediction of the baseline and an upper bound of the error of that prediction. Only baselines of the paper
live here.
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
