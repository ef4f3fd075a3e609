"""Attacks on the estimators: each ends in a refusal with the way out, or in a right answer."""
