"""Networks (with torch): ``mlp.py`` for tables, ``unet.py`` for grids (the paper's appendix), ``mesh.py`` for meshes."""
