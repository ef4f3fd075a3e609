"""Error fields of ten-day forecasts of the whole globe, on reanalysis data.

``data`` reads netCDF files, ``forecast`` is the surrogate, ``case`` one surrogate with its folds, ``bounds`` and ``activity``
are simple bounds, ``methods`` lists all methods, ``scores``, ``tables`` and ``pictures`` show them. ``information`` studies
which features predict the error. ``weatherbench`` is the script.
"""
