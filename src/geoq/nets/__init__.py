"""Networks of the paper's model appendix: ``mlp.py`` for tables, ``unet.py`` for fields.

Only ``torch.nn.Module`` classes live here. They contain no training, no normalization of data and no GeoQ.
"""
