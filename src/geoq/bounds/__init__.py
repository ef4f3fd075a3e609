"""Bounds: upper conditional quantiles of the error given the features of a query (line 12)."""
