"""Exact nearest points in bounded memory, from one dimension to a hundred thousand.

Read ``search.py`` first: quick engines (``line.py``, ``tree.py``, ``products.py``)
propose points and bound the distance of all others; the search measures and decides.
"""

from geoq.neighbors.search import Neighbors

__all__ = ["Neighbors"]
