"""Training: the mini-batch loop, recipes for surrogates, and where fold surrogates come from.

This package holds everything that trains a network or obtains a trained one: the one training loop, networks that are trained
together as a stack, CUDA graphs of training steps, recipes, the progress bar, checkpoints of finished folds, and the sources
of fold surrogates (trained here, on other workers, or elsewhere).
"""

from geoq.training.fold_surrogates import PredictedFolds, TrainedFolds
from geoq.training.loop import Training
from geoq.training.recipe import TrainedNetwork, TrainNetwork
from geoq.training.shared import SharedTraining

__all__ = [
    "PredictedFolds",
    "SharedTraining",
    "TrainNetwork",
    "TrainedFolds",
    "TrainedNetwork",
    "Training",
]
