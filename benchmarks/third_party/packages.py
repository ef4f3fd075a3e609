"""The packages that these cases need and that no other part of the repository needs."""

import importlib.util

PACKAGES = {
    "neuralop": "neuraloperator",
    "reservoirpy": "reservoirpy",
    "dysts": "dysts",
    "statsmodels": "statsmodels",
}


def missing():
    """Distribution names of the packages that cannot be imported."""
    return [PACKAGES[name] for name in PACKAGES if not importlib.util.find_spec(name)]


def check_installed():
    """Stop with the install command if a package is missing."""
    if absent := missing():
        raise SystemExit(
            f"{', '.join(absent)} cannot be imported, but the third-party cases need "
            f'{", ".join(PACKAGES.values())}; run pip install -c constraints.txt ".[third-party]".'
        )
