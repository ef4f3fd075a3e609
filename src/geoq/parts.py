"""Everything that a user may pass to a setting and that ``geoq`` itself does not export.

========================  ==============================================================================================
setting                   parts
========================  ==============================================================================================
``representation=``       ``StandardizedMetric``, ``Columns`` with ``Number``, ``Log``, ``Periodic``, ``Category``, ``Ignored``,
                          ``identity``
``bound_model=``          ``TwoLawBound``; ``FieldBound`` with ``Climatology``, ``NoFactor`` or ``FieldFactor``, which sees
                          ``inputs``, ``prediction``, ``displacement``, ``anchor_error``, ``log_bound`` or ``expected_error``;
                          ``IndicatorBound`` or ``LabelBound`` with
                          ``misclassification_values``, ``probability_error_values`` or ``logit_error_values``; of the paper
                          ``NormScaledBound`` and ``NormScaledFieldBound``
``safe_region=``          ``PaperRegion``; scores of ``Region``: ``EachInput``, ``PrincipalAxes``, ``EachPair``, ``Unexplained``,
                          ``SupportDistance`` of tables, ``Windows``, ``Moments``, ``Patterns``, ``Answers``, ``Values`` of fields
rollouts                  ``MemberGrowth`` with ``RandomFeatures``, ``AdditiveRecursion`` for ``scheme=``, ``RolloutRegion`` for ``safe_region=``,
                          tolerances ``Relative`` and ``Norm``, ``WithMemory`` for steps that remember
``checkpoint=``           ``Checkpoint``
``progress=``             ``Progress`` is what the function receives
========================  ==============================================================================================
"""

from geoq.bounds.climatology import Climatology
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.bounds.two_laws import TwoLawBound
from geoq.bounds.two_values import (
    LabelBound,
    logit_error_values,
    misclassification_values,
    probability_error_values,
)
from geoq.checks import names_with_torch
from geoq.data.coordinates import Category, Ignored, Log, Number, Periodic
from geoq.data.metric import Columns, StandardizedMetric, identity
from geoq.regions.field_scores import Answers, Moments, Patterns, Windows
from geoq.regions.region import PaperRegion, RolloutRegion
from geoq.regions.table_scores import (
    EachInput,
    EachPair,
    PrincipalAxes,
    SupportDistance,
    Unexplained,
)
from geoq.regions.views import Values
from geoq.rollout.additive import AdditiveRecursion
from geoq.rollout.growth import MemberGrowth
from geoq.rollout.horizon import Norm, Relative
from geoq.rollout.members import RandomFeatures
from geoq.rollout.memory import WithMemory
from geoq.training.checkpoint import Checkpoint
from geoq.training.sources import Progress

# Without the names that need PyTorch, so that a star import works without it.
__all__ = [
    "AdditiveRecursion",
    "Answers",
    "Category",
    "Checkpoint",
    "Climatology",
    "Columns",
    "EachInput",
    "EachPair",
    "FieldBound",
    "Ignored",
    "LabelBound",
    "Log",
    "MemberGrowth",
    "Moments",
    "NoFactor",
    "Norm",
    "Number",
    "PaperRegion",
    "Patterns",
    "Periodic",
    "PrincipalAxes",
    "Progress",
    "RandomFeatures",
    "Relative",
    "RolloutRegion",
    "StandardizedMetric",
    "SupportDistance",
    "TwoLawBound",
    "Unexplained",
    "Values",
    "Windows",
    "WithMemory",
    "identity",
    "logit_error_values",
    "misclassification_values",
    "probability_error_values",
]
WITH_TORCH = {
    "FieldFactor": "geoq.bounds.factor",
    "IndicatorBound": "geoq.bounds.indicator",
    "NormScaledBound": "geoq.bounds.paper",
    "NormScaledFieldBound": "geoq.bounds.paper",
    "TrainedNetwork": "geoq.training.recipe",
}
SEEN = "anchor_error", "displacement", "expected_error", "inputs", "log_bound", "prediction"
WITH_TORCH |= dict.fromkeys(SEEN, "geoq.bounds.network")
__getattr__, __dir__ = names_with_torch("geoq.parts", __all__, WITH_TORCH)
