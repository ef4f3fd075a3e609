"""Rivals of GeoQ and the paper's baselines, which only the benchmarks use.

Each is a dataclass of settings with ``fit(x, y)``, which returns itself, and ``predict(x)``, which returns a ``Bound``. Subclasses of
``Rival`` use the surrogate, the folds and the held-out errors of a GeoQ, so that they differ from it only in the bound.
``RememberedTraining`` lets several methods share their fold surrogates.
"""

# ruff: noqa: F401, I001
# fmt: off
from benchmarks.rivals.conformal import (
    Constant, CVPlus, GPScaledConformal, KNNDistanceConformal, KNNResidualConformal, OpinionScaledConformal, SplineScaledConformal,
    SplitConformal,
)
from benchmarks.rivals.cross_fitted import (
    AnchorError, Bound, DistanceRegion, Rival, conformal_factor, equal_families, equal_tuples,
)
from benchmarks.rivals.gaussian_process import GaussianProcess
from benchmarks.rivals.networks import CalibratedSpread, DeepEnsemble, MCDropout, QuantileNetwork
from benchmarks.rivals.remembered import RememberedTraining
from benchmarks.rivals.trees import BoostedQuantile, MeanErrorPredictor, of_x, of_x_distance_and_prediction
