"""Exact nearest neighbours in bounded memory, from one dimension to a hundred thousand.

``Neighbors`` is the only public name. This package contains searches and nothing else: no geometry of GeoQ, no fold, no error. The files, in reading order:

- ``blocks.py``: queries that are answered together, and the points excluded from the answer of each query.
- ``distances.py``: distances in float64, and copies of points.
- ``engines.py``: fast methods that propose neighbours and bound the distance of all other points.
- ``search.py``: ``Neighbors``, which measures the proposals and searches again where they do not decide.
- ``planes.py``: ``Planes``, distances to the nearest point in the planes of pairs of inputs.
"""

from geoq.neighbors.search import Neighbors

__all__ = ["Neighbors"]
