"""Wrong cells of a Fourier neural operator that predicts the Richtmyer-Meshkov instability."""
