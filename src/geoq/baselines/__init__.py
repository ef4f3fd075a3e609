"""The paper's four baselines: a Gaussian process, MC dropout, a deep ensemble and split conformal prediction.

Each is a dataclass of settings with ``fit(x, y)``, which returns itself, and ``predict(x)``, which returns a ``Bound``.
"""

from geoq.baselines.bound import Bound
from geoq.baselines.conformal import SplitConformal
from geoq.baselines.deep_ensemble import DeepEnsemble
from geoq.baselines.gaussian_process import GaussianProcess
from geoq.baselines.mc_dropout import MCDropout

__all__ = ["Bound", "DeepEnsemble", "GaussianProcess", "MCDropout", "SplitConformal"]
