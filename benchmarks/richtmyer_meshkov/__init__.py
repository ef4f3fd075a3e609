"""Wrong cells of a Fourier neural operator that predicts the Richtmyer-Meshkov instability.

``euler``, ``riemann`` and ``data`` make the simulations, ``fourier_operator`` and ``operator_training`` the surrogate, ``study``
the data and networks of one seed, ``bounds``, ``networks`` and ``methods`` the bounds, ``scores`` and ``pictures`` show them.
``run`` and ``few_fields`` are the scripts.
"""
