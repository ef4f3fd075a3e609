"""Bounds of rollouts: the Kuramoto-Sivashinsky equation of the paper, and the trusted horizon on three systems.

``data`` makes the snapshots and the recipe of the network, ``methods`` has baselines and simple rivals, ``scores`` the rows,
``ablation`` the paper's ablation. ``kuramoto_sivashinsky``, ``trusted_horizon`` and ``small_states`` are the scripts.
"""
