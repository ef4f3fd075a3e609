"""Networks: ``mlp.py`` for tables, ``unet.py`` for fields on a grid (the paper's model appendix), ``mesh.py`` for meshes.

Only ``torch.nn.Module`` classes and their parts live here. They contain no training, no normalization of data and no GeoQ.
"""
