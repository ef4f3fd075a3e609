"""A service for a calibrated estimator: UM-Bridge, the Open Inference Protocol, metrics and a page; it needs the extra ``serve``."""
