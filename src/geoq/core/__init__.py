"""Algorithm 1 of the paper: geometry, folds, calibration tuples, bounds of queries."""
