"""Rollouts: error bounds along autoregressive forecasts, and the horizon up to which a forecast can be trusted."""
