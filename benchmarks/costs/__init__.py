"""Time and memory of GeoQ."""
