"""Benchmarks of geoq: the paper's four problems, a suite of twenty problems, rollouts, weather and costs.

Every script runs from the root of the repository as ``python -m benchmarks.PACKAGE.SCRIPT`` and writes its rows to
``benchmarks/results``. ``record`` writes the results files and ``tables`` turns them into the tables of the pages in docs.
"""
