"""Pictures of calibrations and answers.

``calibration``, ``distances`` and ``inputs`` draw a fitted ``GeoQ``; ``summary``, ``curve``, ``fields`` and ``rollouts`` draw an assessment;
``error_over_input`` and ``estimate_against_error`` draw arrays into axes. Each function returns the axes. Lines differ in colour
and in dash, so that the pictures can be read in grey.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as exc:
    raise ImportError('geoq.plots needs Matplotlib; pip install "geoq[plots]".') from exc

from geoq.plots.answers import error_over_input, estimate_against_error, fields, rollouts, summary
from geoq.plots.calibration import calibration, distances, inputs
from geoq.plots.curve import curve

__all__ = ["calibration", "curve", "distances", "error_over_input", "estimate_against_error"]
__all__ += ["fields", "inputs", "rollouts", "summary"]
