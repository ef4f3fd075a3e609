"""Numbers of the paper's tables, and the tables that show ours beside them."""

from benchmarks.markdown import Ratio, compare, group, paired, select, spread, table

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
# fmt: off
PAPER_SECONDS = {
    "forrester": {"GP": (20, 0.02), "MC dropout": (40, 4), "Deep ensemble": (400, 4), "Split conformal": (30, 0.6),
                  "GeoQ (paper)": (500, 1.2)},
    "kuramoto_sivashinsky": {"GP": (9480, 540), "MC dropout": (540, 300), "Deep ensemble": (2700, 300),
                             "Conformal (per coordinate)": (420, 120), "GeoQ (paper)": (3900, 216)},
    "weather": {"MC dropout, 1.96 s": (180, 20), "Deep ensemble, 1.96 s": (1800, 20),
                "Split conformal per cell (random fifth)": (150, 6), "GeoQ (paper, k_a = 1)": (2160, 1.2)},
    "richtmyer_meshkov": {"MC dropout": (3960, 180), "Deep ensemble": (39600, 180), "Split conformal": (3600, 26),
                          "GeoQ (paper, k_a=1, background penalty)": (45000, 51),
                          "GeoQ (paper, k_a=5, background penalty)": (45000, 51)},
}
# fmt: on
# Safe fraction, pinball, correlation, coverage inside the safe region.
PAPER_SAFE = {
    "forrester": {"GeoQ (paper)": (0.582, 0.000, 0.978, 1.000)},
    "kuramoto_sivashinsky": {"GeoQ (paper)": (0.900, 0.017, 0.495, 0.891)},
    "richtmyer_meshkov": {
        f"GeoQ (paper, k_a={k_a}, background penalty)": (0.959, 0.001, 0.502, 1.000)
        for k_a in (1, 5)
    },
}

# Parts of the names of methods that are no bounds of level 0.95: they are not ranked by their loss.
NO_BOUNDS = ("expected error", "background penalty", "oracle")
BEST = {"pinball": min, "pinball x 1000": min, "relative L2": min, "correlation": max}
SEEDWISE = {"over": ("seed",), "within": ()}


def is_bound(method):
    return not any(name in str(method) for name in NO_BOUNDS)


def thousandth(column, digits=2):
    return spread(column, digits, 1000)


def numbers_of_paper(name, source=PAPER):
    """The column of the paper's numbers."""
    known = source.get(name, {})

    def cell(rows):
        theirs = known.get(rows[0]["method"], ())
        return " / ".join("-" if v is None else f"{v:.3f}" for v in theirs)

    return {"the paper": cell}


def seconds_of_paper(name):
    """The column of the paper's seconds."""
    known = {method: "{:g} / {:g}".format(*times) for method, times in PAPER_SECONDS[name].items()}
    return {"the paper": lambda rows: known.get(rows[0]["method"], "")}


def methods_table(rows, columns):
    return table("method", group(rows, "method"), columns, best=BEST, ranked=is_bound)


def flagging(rows):
    return [r for r in rows if r.get("safe_fraction") is not None]


def ratios(rows, reference="GeoQ", **how):
    """Pinball loss of the reference relative to each method on the same seed."""
    ours = select(rows, method=reference)
    how = how or SEEDWISE

    def seeds(own):
        return Ratio.of(found) if (found := paired(ours, own, **how)) else None

    columns = {
        f"pinball of {reference} over it": lambda own: compare(ours, own, **how),
        "better on": lambda own: f"{r.better} of {r.n} seeds" if (r := seeds(own)) else "-",
    }
    bounds = {m: own for m, own in group(rows, "method").items() if is_bound(m) and m != reference}
    return table("method", bounds, columns)


ALL = {"pinball": spread("pinball"), "correlation": spread("correlation")}
ALL |= {"coverage": spread("coverage"), "relative L2": spread("relative_l2")}
SAFE = {"fraction": spread("safe_fraction"), "pinball": spread("safe_pinball")}
SAFE |= {"correlation": spread("safe_correlation"), "coverage": spread("safe_coverage")}


def everywhere_and_safe(name, rows, title="", first="pinball"):
    """The tables that all of the paper's problems have."""
    scale = {"pinball x 1000": thousandth("pinball")} if "1000" in first else {}
    all_columns = scale | {k: v for k, v in ALL.items() if k != "pinball" or not scale}
    safe = {
        k: thousandth("safe_pinball") if scale and k == "pinball" else v for k, v in SAFE.items()
    }
    return [
        f"**All queries{title}**",
        methods_table(rows, all_columns | numbers_of_paper(name)),
        f"**Inside the safe region{title}**",
        methods_table(flagging(rows), safe | numbers_of_paper(name, PAPER_SAFE)),
    ]
