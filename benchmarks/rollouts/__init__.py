"""Bounds of rollouts: the Kuramoto-Sivashinsky equation of the paper with its ablation, and trusted horizons of small systems."""
