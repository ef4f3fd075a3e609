"""Twenty problems with one-shot surrogates: the default of GeoQ against its rivals, and the ablation of the default.

``problems`` are the twelve problems that the default was designed with, ``confirmation`` eight further ones, ``recipes``
their surrogates. ``defaults`` compares the methods and ``ablation`` changes one ingredient of the default at a time.
"""
