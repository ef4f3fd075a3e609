"""The default against its rivals on 44 problems, its ablation, one input at a time, and data frames of other packages."""

# Test sets: distributed as the training data, moderately outside of them or in their hole, and far outside.
SHIFTS = ("interpolation", "mild", "strong")


def is_ours(method):
    """Whether a method is GeoQ in some form."""
    return method.startswith("GeoQ")
