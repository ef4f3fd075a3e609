"""Safe regions: where the calibration supports a bound.

==============  ===================================================================================
module          content
==============  ===================================================================================
safe_region     the protocol, the paper's region (SafeRegion) and the region of a distance (DistanceRegion)
support_region  the default for tables (SupportRegion); its scores are in ``support_scores``
field_region    the default for inputs on a grid (FieldRegion); its scores are in ``field_scores``
==============  ===================================================================================
"""
