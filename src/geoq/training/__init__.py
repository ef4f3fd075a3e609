"""Training of networks, and the sources of fold surrogates.

The package contains the mini-batch loop, stacks of networks that are trained together, CUDA graphs of training steps, recipes,
the progress of a calibration, checkpoints of finished folds, and fold surrogates that are trained here, on other workers, or elsewhere.
"""

from geoq.training.checkpoint import Checkpoint
from geoq.training.fold_surrogates import PredictedFolds, TrainedFolds
from geoq.training.loop import Training
from geoq.training.progress import Progress, ProgressBar
from geoq.training.recipe import TrainedNetwork, TrainNetwork
from geoq.training.shared import SharedTraining

__all__ = [
    "Checkpoint",
    "PredictedFolds",
    "Progress",
    "ProgressBar",
    "SharedTraining",
    "TrainNetwork",
    "TrainedFolds",
    "TrainedNetwork",
    "Training",
]
