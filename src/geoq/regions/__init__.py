"""Safe regions: where the calibration supports a bound (lines 15 and 16)."""
