"""Rivals of GeoQ that only the benchmarks use.

Each rival is a dataclass of settings with ``fit(x, y)``, which returns itself, and ``predict(x)``, which returns a
``geoq.baselines.Bound``. Most of them use the surrogate, the folds and the held-out errors of a GeoQ, so that they differ
from it only in the bound, and weigh the calibration tuples by an argument ``weights``. ``RememberedTraining`` lets several
methods share their fold surrogates.
"""

from benchmarks.rivals.boosted_quantile import BoostedQuantile
from benchmarks.rivals.calibrated import CalibratedSpread
from benchmarks.rivals.constant import Constant
from benchmarks.rivals.cross_fitted import CrossFitted, NoIncrement
from benchmarks.rivals.cv_plus import CVPlus
from benchmarks.rivals.deup import MeanErrorPredictor
from benchmarks.rivals.gp_scaled import GPScaledConformal
from benchmarks.rivals.knn_conformal import KNNDistanceConformal, KNNResidualConformal
from benchmarks.rivals.per_coordinate import (
    of_x,
    of_x_and_distance,
    of_x_distance_and_prediction,
)
from benchmarks.rivals.quantile_network import OnField, OnTable, QuantileNetwork
from benchmarks.rivals.remembered import RememberedTraining
from benchmarks.rivals.spline_scaled import SplineScaledConformal
from benchmarks.rivals.weights import equal_families, equal_tuples

__all__ = [
    "BoostedQuantile",
    "CVPlus",
    "CalibratedSpread",
    "Constant",
    "CrossFitted",
    "GPScaledConformal",
    "KNNDistanceConformal",
    "KNNResidualConformal",
    "MeanErrorPredictor",
    "NoIncrement",
    "OnField",
    "OnTable",
    "QuantileNetwork",
    "RememberedTraining",
    "SplineScaledConformal",
    "equal_families",
    "equal_tuples",
    "of_x",
    "of_x_and_distance",
    "of_x_distance_and_prediction",
]
