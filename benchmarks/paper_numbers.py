"""Numbers of the paper's tables, which the tables of the results show for comparison."""

# Tables 2, 3 and the accuracy appendix of the paper: pinball, correlation, coverage, relative L2.
PAPER = {
    "forrester": {
        "GP": (0.001, 0.799, 1.000, 0.093),
        "MC dropout": (0.300, 0.977, 0.150, 0.879),
        "Deep ensemble": (0.303, 0.984, 0.487, 0.884),
        "Split conformal": (0.298, None, 0.490, 0.945),
        "GeoQ (paper)": (0.117, 0.989, 0.804, 0.868),
    },
    "kuramoto_sivashinsky": {
        "GP": (0.021, 0.551, 0.719, 0.429),
        "MC dropout": (0.035, 0.108, 0.706, 0.522),
        "Deep ensemble": (0.039, 0.265, 0.718, 0.446),
        "Conformal (per coordinate)": (0.023, 0.372, 0.840, 0.492),
        "GeoQ (paper)": (0.019, 0.490, 0.868, 0.484),
    },
    # The paper has k_a = 1 and the background penalty; it does not define the error functional. Older rows have k_a = 5.
    "richtmyer_meshkov": {
        "MC dropout": (0.004, 0.384, 0.995, 0.082),
        "Deep ensemble": (0.002, 0.645, 0.997, 0.082),
        "Split conformal": (0.004, 0.377, 0.990, 0.087),
        "GeoQ (paper, k_a=1, background penalty)": (0.001, 0.501, 1.000, 0.083),
        "GeoQ (paper, k_a=5, background penalty)": (0.001, 0.501, 1.000, 0.083),
    },
    # The paper gives no relative L2 error for the ablation.
    "kuramoto_sivashinsky_ablation": {
        "phi = encoder, psi = (dz, dd), k_a = 50, K_f = 5": (0.019, 0.490, 0.868),
        "phi = identity": (0.024, 0.412, 0.856),
        "psi = (abs dz, dd)": (0.021, 0.483, 0.835),
        "psi = (length of dz, dd)": (0.020, 0.481, 0.868),
        "psi = dz": (0.021, 0.478, 0.832),
        "k_a = 1": (0.017, 0.505, 0.901),
        "k_a = 10": (0.019, 0.473, 0.881),
        "k_a = 100": (0.018, 0.491, 0.875),
        "K_f = 2": (0.057, 0.243, 0.549),
        "K_f = 10": (0.023, 0.457, 0.834),
        "K_f = 20": (0.024, 0.444, 0.812),
    },
}
# Table 2 of the paper: training and inference, in seconds.
PAPER_SECONDS = {
    "forrester": {
        "GP": (20, 0.02),
        "MC dropout": (40, 4),
        "Deep ensemble": (400, 4),
        "Split conformal": (30, 0.6),
        "GeoQ (paper)": (500, 1.2),
    },
    "kuramoto_sivashinsky": {
        "GP": (9480, 540),
        "MC dropout": (540, 300),
        "Deep ensemble": (2700, 300),
        "Conformal (per coordinate)": (420, 120),
        "GeoQ (paper)": (3900, 216),
    },
    "weather": {
        "MC dropout, 1.96 s": (180, 20),
        "Deep ensemble, 1.96 s": (1800, 20),
        "Split conformal per cell (random fifth)": (150, 6),
        "GeoQ (paper, k_a = 1)": (2160, 1.2),
    },
    "richtmyer_meshkov": {
        "MC dropout": (3960, 180),
        "Deep ensemble": (39600, 180),
        "Split conformal": (3600, 26),
        "GeoQ (paper, k_a=1, background penalty)": (45000, 51),
        "GeoQ (paper, k_a=5, background penalty)": (45000, 51),
    },
}
# Safe fraction, pinball, correlation, coverage inside the safe region.
PAPER_SAFE = {
    "forrester": {"GeoQ (paper)": (0.582, 0.000, 0.978, 1.000)},
    "kuramoto_sivashinsky": {"GeoQ (paper)": (0.900, 0.017, 0.495, 0.891)},
    "richtmyer_meshkov": {
        f"GeoQ (paper, k_a={k_a}, background penalty)": (0.959, 0.001, 0.502, 1.000)
        for k_a in (1, 5)
    },
}
