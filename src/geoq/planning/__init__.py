"""Planning with a calibrated estimator: which simulations to run next, and optimisers that stay where the bound is small.

``propose`` picks the next simulations, ``constraint`` and ``TrustRegionSearch`` serve optimisation, and ``smooth`` guides optimisers
that need gradients. The functions take a fitted ``GeoQ`` as their first argument.
"""

from geoq.planning.guide import smooth
from geoq.planning.next_runs import Proposal, propose
from geoq.planning.search import TrustRegionSearch, constraint

__all__ = ["Proposal", "TrustRegionSearch", "constraint", "propose", "smooth"]
