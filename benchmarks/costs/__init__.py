"""Time and memory of GeoQ.

``cost`` measures calibrations relative to one training and assessments relative to one prediction, ``quality`` calibrations
with fewer trainings, ``speed`` the neighbour searches and GeoQ as a whole. ``tables`` has their tables.
"""
