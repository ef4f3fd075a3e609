"""Planning with a calibrated estimator: planned queries, the next simulations, and optimisers that stay where the bound is small.

``MatchedFolds``, ``conformalize`` and ``accept`` serve the queries that you plan, ``propose`` picks the next simulations, ``constraint`` and
``TrustRegionSearch`` serve optimisation, and ``smooth`` guides optimisers that need gradients. The functions take a fitted ``GeoQ`` as
their first argument.
"""

from geoq.planning.guarantee import EstimatedRatio, KnownRatio, PlannedBound, accept, conformalize
from geoq.planning.guide import smooth
from geoq.planning.matched import MatchedFolds
from geoq.planning.next_runs import Proposal, propose
from geoq.planning.search import TrustRegionSearch, constraint

__all__ = ["EstimatedRatio", "KnownRatio", "MatchedFolds", "PlannedBound", "Proposal"]
__all__ += ["TrustRegionSearch", "accept", "conformalize", "constraint", "propose", "smooth"]
