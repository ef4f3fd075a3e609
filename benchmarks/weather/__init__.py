"""Error fields of ten-day forecasts of the whole globe, on reanalysis data."""
