"""Trainings: sources of fold surrogates, checkpoints, progress, and networks (with torch)."""
