"""Increment models: upper conditional quantiles of the part of the error that the anchors do not explain (line 12).

``protocol.py`` defines what an increment model is. ``NormScaledIncrement`` and ``FieldIncrement`` are the models of the paper;
``TwoLawIncrement`` and ``FieldScaleIncrement`` are the defaults for tables and for fields; ``IndicatorIncrement`` is for errors
that take two values. The other modules contain their parts: scales, references, priors, learned factors and networks.
"""

from geoq.increments.climatology import Climatology
from geoq.increments.domain import Grid, Mesh
from geoq.increments.field_factor import FieldFactor
from geoq.increments.field_network import (
    anchor_error,
    displacement,
    inputs,
    log_bound,
    prediction,
)
from geoq.increments.field_scale import FieldScaleIncrement
from geoq.increments.indicator import (
    IndicatorIncrement,
    logit_error_values,
    misclassification_values,
    probability_error_values,
)
from geoq.increments.paper import FieldIncrement, NormScaledIncrement
from geoq.increments.protocol import IncrementModel
from geoq.increments.scale import LowRankScale
from geoq.increments.two_laws import TwoLawIncrement

__all__ = [
    "Climatology",
    "FieldFactor",
    "FieldIncrement",
    "FieldScaleIncrement",
    "Grid",
    "IncrementModel",
    "IndicatorIncrement",
    "LowRankScale",
    "Mesh",
    "NormScaledIncrement",
    "TwoLawIncrement",
    "anchor_error",
    "displacement",
    "inputs",
    "log_bound",
    "logit_error_values",
    "misclassification_values",
    "prediction",
    "probability_error_values",
]
